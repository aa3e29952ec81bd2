// The forward's shapes and the parts of one tile of keys: scores, mask, softmax, values.
#pragma once

#include "ops/attention/sm80/forward.h"
#include "ops/attention/sm80/tile.cuh"

namespace packing_ops::sm80 {

template <int kDim_, bool kShort>
struct ForwardShape {
  static constexpr int kDim = kDim_;
  static constexpr int kThreads = 128;
  static constexpr int kRows = kShort ? kShortRows : forward_rows(kDim);
  static constexpr int kKeys = kShort ? kShortKeys : forward_keys(kDim);
  static constexpr int kResident = kShort ? 4 : 2;  // blocks of a multiprocessor
  static constexpr int kRowBlocks = kRows / 64;     // blocks of 16 rows a warp owns
  static constexpr int kShared = (kRows + 4 * kKeys) * kDim * 2 + 128;
  static constexpr int kWarpRows = 16 * kRowBlocks;
  using TileQ = Tile<kRows, kDim>;
  using TileK = Tile<kKeys, kDim>;
};

// A thread's rows: 16 b + g and 16 b + g + 8 of its warp, each with its own softmax.
template <int kBlocks>
struct RowState {
  float most[kBlocks][2];
  float sum[kBlocks][2];  // this thread's columns only, until the end
};

template <class T, class Shape, bool kTransform>
struct ForwardUnit {
  static constexpr int kBlocks = Shape::kRowBlocks;
  static constexpr int kKeyBlocks = Shape::kKeys / 8;
  static constexpr int kDimBlocks = Shape::kDim / 8;
  using Scores = float[kBlocks][kKeyBlocks][4];
  using Sums = float[kBlocks][kDimBlocks][4];

  // kCount: blocks of 8 keys, from the tile's first on, that the warp's rows see.

  // s = q k^T of this warp's rows and one key tile.
  template <int kCount>
  static __device__ __forceinline__ void scores(Scores& s, typename Shape::TileQ q, typename Shape::TileK k,
                                                int first_row) {
    const LaneView<Shape::kRows, Shape::kDim> rows(q, Lanes::kRowsFirst, first_row);
    const LaneView<Shape::kKeys, Shape::kDim> keys(k, Lanes::kColumnsFirst, 0);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int n = 0; n < kCount; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[b][n][i] = 0.f;
#pragma unroll
    for (int d = 0; d < Shape::kDim / 16; ++d) {
      uint32_t a[kBlocks][4];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) ptx::ldmatrix(a[b], rows.at(16 * b, d));
#pragma unroll
      for (int n = 0; n < kCount; n += 2) {
        uint32_t bb[4];
        ptx::ldmatrix(bb, keys.at(8 * n, d));
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          ptx::mma<T>(s[b][n], a[b], bb[0], bb[1]);
          ptx::mma<T>(s[b][n + 1], a[b], bb[2], bb[3]);
        }
      }
    }
  }

  // o += p v, p rounded to T.
  template <int kCount>
  static __device__ __forceinline__ void values(Sums& o, const Scores& p, typename Shape::TileK v) {
    const LaneView<Shape::kKeys, Shape::kDim> keys(v, Lanes::kRowsFirst, 0);
#pragma unroll
    for (int n = 0; n < kCount; n += 2) {
      uint32_t a[kBlocks][4];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        a[b][0] = pack<T>(p[b][n][0], p[b][n][1]);
        a[b][1] = pack<T>(p[b][n][2], p[b][n][3]);
        a[b][2] = pack<T>(p[b][n + 1][0], p[b][n + 1][1]);
        a[b][3] = pack<T>(p[b][n + 1][2], p[b][n + 1][3]);
      }
#pragma unroll
      for (int d = 0; d < kDimBlocks; d += 2) {
        uint32_t bb[4];
        ptx::ldmatrix_trans(bb, keys.at(8 * n, d / 2));
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          ptx::mma<T>(o[b][d], a[b], bb[0], bb[1]);
          ptx::mma<T>(o[b][d + 1], a[b], bb[2], bb[3]);
        }
      }
    }
  }

  // first_row: this thread's first row of the unit.
  template <int kCount>
  static __device__ __forceinline__ void mask(Scores& s, const DocumentView& d, const GroupRows& rows, int first_row,
                                              int32_t first_key) {
    const int32_t column = first_key + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t token = rows.token_of(first_row + 16 * b + 8 * half);
        const Range seen = d.keys_seen(token, token);
#pragma unroll
        for (int n = 0; n < kCount; ++n) {
          const int32_t key = column + 8 * n;
          if (key < seen.first || key >= seen.end) s[b][n][2 * half] = -INFINITY;
          if (key + 1 < seen.first || key + 1 >= seen.end) s[b][n][2 * half + 1] = -INFINITY;
        }
      }
    }
  }

  // Scores to weights; o and the sums move to the new maximum. `scale` is softmax_scale * log2(e).
  template <int kCount>
  static __device__ __forceinline__ void softmax(Scores& s, RowState<kBlocks>& rows, Sums& o, float scale) {
    float factor[kBlocks][2];
    bool moved = false;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = rows.most[b][half];
#pragma unroll
        for (int n = 0; n < kCount; ++n) most = fmaxf(most, fmaxf(s[b][n][2 * half], s[b][n][2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        moved |= most != rows.most[b][half] && rows.most[b][half] != -INFINITY;
        const float base = most == -INFINITY ? 0.f : most * scale;
        factor[b][half] = ptx::exp2_approx(rows.most[b][half] * scale - base);
        rows.most[b][half] = most;
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < kCount; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            s[b][n][i] = ptx::exp2_approx(fmaf(s[b][n][i], scale, -base));
            sum += s[b][n][i];
          }
        }
        rows.sum[b][half] = rows.sum[b][half] * factor[b][half] + sum;
      }
    }
    // A maximum that stays is a factor of exactly 1, and a row's first one meets zeros: leaving them out changes no
    // bit.
    if (!__any_sync(0xffffffffu, moved)) return;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int d = 0; d < kDimBlocks; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[b][d][i] *= factor[b][i / 2];
  }

  // One tile of keys for this warp's rows.
  template <int kCount>
  static __device__ __forceinline__ void step(Sums& o, RowState<kBlocks>& state, const Args& args,
                                              typename Shape::TileQ q, typename Shape::TileK k, typename Shape::TileK v,
                                              const DocumentView& d, const GroupRows& rows, int warp_row,
                                              int32_t first_key, bool masked, float scale) {
    Scores s;
    scores<kCount>(s, q, k, warp_row);
    if constexpr (kTransform) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int n = 0; n < kCount; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[b][n][i] = transform_score(s[b][n][i], args) * kLog2e;
    }
    if (masked) mask<kCount>(s, d, rows, warp_row + ((threadIdx.x & 31) >> 2), first_key);
    softmax<kCount>(s, state, o, scale);
    values<kCount>(o, s, v);
  }
};

}  // namespace packing_ops::sm80
