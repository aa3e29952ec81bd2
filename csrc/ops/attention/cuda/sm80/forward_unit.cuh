// The forward's shapes and the parts of one tile of keys: scores, mask, softmax, values.
#pragma once

#include "ops/attention/cuda/epilogue.cuh"
#include "ops/attention/cuda/persistent.cuh"
#include "ops/attention/cuda/sm80/forward.h"
#include "ops/attention/cuda/sm80/lane_view.cuh"
#include "ops/attention/cuda/softmax.cuh"

namespace packing_ops::attention::sm80 {

template <int kDim_, bool kShort>
struct ForwardShape {
  static constexpr int kDim = kDim_;
  static constexpr bool kIsShort = kShort;
  static constexpr int kThreads = 128;
  static constexpr int kRows = kShort ? kShortRows : forward_rows(kDim);
  static constexpr int kKeys = kShort ? kShortKeys : forward_keys(kDim);
  static constexpr int kResident = kShort ? 4 : 2;  // blocks of a multiprocessor
  static constexpr int kRowBlocks = kRows / 64;     // blocks of 16 rows a warp owns
  static constexpr int kShared = (kRows + 4 * kKeys) * kDim * 2 + 128;
  static constexpr int kWarpRows = 16 * kRowBlocks;
  static constexpr int kLoadsAhead = 0;            // blocks of 16 columns of q and k, at most 1
  static constexpr bool kFewInstructions = false;  // see forward_whole.cuh
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

  // What a dot product is multiplied by before 2^x, and before e^x.
  static __device__ __forceinline__ float scale(const Args& args) {
    return kTransform ? 1.f : args.softmax_scale * kLog2e;
  }
  static __device__ __forceinline__ double natural_scale(const Args& args) {
    return kTransform ? 0.6931471805599453 : args.softmax_scale;
  }

  // Before a row's first key.
  static __device__ __forceinline__ void clear(Sums& o, RowState<kBlocks>& rows) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows.most[b][half] = -INFINITY;
        rows.sum[b][half] = 0.f;
      }
#pragma unroll
      for (int n = 0; n < kDimBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[b][n][i] = 0.f;
    }
  }

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
    constexpr int kAhead = Shape::kLoadsAhead;
    constexpr int kPlaces = 1 + kAhead;
    uint32_t a[kPlaces][kBlocks][4];
    uint32_t bb[kPlaces][kCount / 2][4];
    const auto load_rows = [&](int d) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) ptx::ldmatrix(a[d % kPlaces][b], rows.at(16 * b, d));
    };
    const auto load_keys = [&](int d, int n) { ptx::ldmatrix(bb[d % kPlaces][n / 2], keys.at(8 * n, d)); };
    const auto load = [&](int d) {
      load_rows(d);
#pragma unroll
      for (int n = 0; n < kCount; n += 2) load_keys(d, n);
    };
    if (kAhead > 0) load(0);
#pragma unroll
    for (int d = 0; d < Shape::kDim / 16; ++d) {
      if (kAhead == 0) load_rows(d);
      if (kAhead > 0 && d + 1 < Shape::kDim / 16) load(d + 1);
#pragma unroll
      for (int n = 0; n < kCount; n += 2) {
        if (kAhead == 0) load_keys(d, n);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          const auto& right = bb[d % kPlaces][n / 2];
          ptx::mma<T>(s[b][n], a[d % kPlaces][b], right[0], right[1]);
          ptx::mma<T>(s[b][n + 1], a[d % kPlaces][b], right[2], right[3]);
        }
      }
    }
  }

  // o += p v, p rounded to T; `end`: keys of the tile, as in step.
  template <int kCount>
  static __device__ __forceinline__ void values(Sums& o, const Scores& p, typename Shape::TileK v, int32_t end) {
    const LaneView<Shape::kKeys, Shape::kDim> keys(v, Lanes::kRowsFirst, 0);
#pragma unroll
    for (int n = 0; n < kCount; n += 2) {
      if (Shape::kFewInstructions && n > 0 && 8 * n >= end) break;
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
        if (Shape::kFewInstructions && d.window.left >= kOpenWindow) {
          const int32_t end = seen.end - column;
#pragma unroll
          for (int n = 0; n < kCount; ++n) {
            if (8 * n >= end) s[b][n][2 * half] = -INFINITY;
            if (8 * n + 1 >= end) s[b][n][2 * half + 1] = -INFINITY;
          }
          continue;
        }
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

  // One tile of keys for this warp's rows, which see none of it from key `end` on.
  template <int kCount>
  static __device__ __forceinline__ void step(Sums& o, RowState<kBlocks>& state, const Args& args,
                                              typename Shape::TileQ q, typename Shape::TileK k, typename Shape::TileK v,
                                              const DocumentView& d, const GroupRows& rows, int warp_row,
                                              int32_t first_key, int32_t end, bool masked, float scale) {
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
    values<kCount>(o, s, v, end);
  }
};

// q of a warp's rows, which only this warp reads.
template <class Shape>
__device__ __forceinline__ void load_warp_rows(const Args& args, const GroupRows& rows, typename Shape::TileQ tile,
                                               int warp_row) {
  const uint16_t* data = static_cast<const uint16_t*>(args.q.data);
  const int lane = threadIdx.x & 31;
  const auto address = [&](int row) { return data + rows.offset(row, args.q.token_stride, args.q.head_stride); };
  if (warp_row + Shape::kWarpRows <= rows.valid && args.whole_group > 0 && args.whole_group <= 4) {
    load_whole_rows<32, Shape::kWarpRows>(tile, warp_row, lane, address(warp_row + (lane >> 3)) + (lane & 7) * 8,
                                          rows.token_step(4) * args.q.token_stride);
    return;
  }
  load_rows<32, Shape::kWarpRows>(tile, warp_row, lane, args.head_dim, data,
                                  [&](int row) -> const void* { return row < rows.valid ? address(row) : nullptr; });
}

// The unit's last step: out and lse of this warp's rows. unit: scale without its log2(e). A quad holds 2 kRowBlocks
// rows; each of its lanes works out lse and the factor of one of them.
template <class T, class Shape>
__device__ __forceinline__ void finish(const Args& args, const GroupRows& rows, int first_row,
                                       const RowState<Shape::kRowBlocks>& state,
                                       const float (&o)[Shape::kRowBlocks][Shape::kDim / 8][4], float scale,
                                       double unit) {
  constexpr int kQuadRows = 2 * Shape::kRowBlocks;
  const int lane = threadIdx.x & 31;
  const int mine = lane % kQuadRows;
  float sum = 0.f;
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < kQuadRows; ++i) {
    float whole = state.sum[i / 2][i % 2];
    whole += __shfl_xor_sync(0xffffffffu, whole, 1);
    whole += __shfl_xor_sync(0xffffffffu, whole, 2);
    sum = mine == i ? whole : sum;
    most = mine == i ? state.most[i / 2][i % 2] : most;
  }
  float inverse = sum == 0.f ? 0.f : 1.f / sum;
  const int own_row = first_row + 8 * mine;
  if (own_row < rows.valid && (lane & 3) == mine) {
    float lse = sum == 0.f ? -INFINITY : log_of_sum(most, scale, unit, sum);
    const int32_t step = rows.token_step(own_row);
    const int32_t head = rows.first_head + own_row + rows.skipped - step * rows.group;
    if (args.sinks != nullptr) {
      const float sink = args.sinks[head];
      const float top = fmaxf(lse, sink);
      const float whole = top == -INFINITY ? top : top + log1pf(expf(fminf(lse, sink) - top));
      inverse = sum == 0.f ? 0.f : inverse * expf(lse - whole);
      lse = whole;
    }
    args.lse[head * args.documents_q.total + rows.first_token + step] = lse;
  }
#pragma unroll
  for (int i = 0; i < kQuadRows; ++i) {
    const int row = first_row + 8 * i;
    uint16_t* out = row < rows.valid ? static_cast<uint16_t*>(args.out.data) +
                                           rows.offset(row, args.out.token_stride, args.out.head_stride)
                                     : nullptr;
    const float factor = __shfl_sync(0xffffffffu, inverse, (lane & 28) + i);
    store_row<T>(out, 0, args.head_dim, o[i / 2], i % 2, factor);
  }
}

}  // namespace packing_ops::attention::sm80
