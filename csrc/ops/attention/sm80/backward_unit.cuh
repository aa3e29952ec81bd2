// The backward's shapes and the parts of one step: products, weights, exchange of ds, sums of dq.
#pragma once

#include "ops/attention/sm80/backward.h"
#include "ops/attention/sm80/tile.cuh"

namespace packing_ops::sm80 {

template <int kDim_, int kKeys_>
struct BackwardShape {
  static constexpr int kDim = kDim_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kRows = kBackwardRows;
  // From 192 columns on dk and dv of 16 keys do not fit one warp: two warps share them and exchange p and ds.
  static constexpr int kSplit = kDim > 128 ? 2 : 1;
  static constexpr int kWarps = kKeys / 16 * kSplit;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = 2;
  static constexpr int kColumns = kDim / kSplit;             // of dk and dv in a warp
  static constexpr int kScoreRows = kRows / kSplit;          // of s^T in a warp
  static constexpr int kQueryColumns = kDim / (kWarps / 4);  // of dq in a warp, which owns 16 rows
  static constexpr int kQueryPass = kDim <= 128 ? kDim / 2 : kDim / 4;
  using TileK = Tile<kKeys, kDim>;
  using TileQ = Tile<kRows, kDim>;
  using TileS = Tile<kKeys, kRows>;
  static constexpr int kStageBytes = 2 * TileQ::kBytes + kRows * 8;
  static constexpr int kShared = 2 * TileK::kBytes + kStages * kStageBytes + kSplit * TileS::kBytes + 128;
};

// acc [16 rows of a, columns] += a b over kBlocks blocks of 16; a by address or from registers.
template <class T, int kBlocks, int kColumnBlocks, class LoadA, class View>
__device__ __forceinline__ void multiply(float (&acc)[kColumnBlocks][4], const LoadA& load_a, const View& b,
                                         int first_column) {
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    uint32_t a[4];
    load_a(a, j);
#pragma unroll
    for (int n = 0; n < kColumnBlocks; n += 2) {
      uint32_t bb[4];
      ptx::ldmatrix_trans(bb, b.at(16 * j, first_column + n / 2));
      ptx::mma<T>(acc[n], a, bb[0], bb[1]);
      ptx::mma<T>(acc[n + 1], a, bb[2], bb[3]);
    }
  }
}

// out [16 keys, rows] = keys rows^T.
template <class T, class Shape, int kRowBlocks>
__device__ __forceinline__ void product(float (&out)[kRowBlocks][4], typename Shape::TileK keys, int first_key,
                                        typename Shape::TileQ rows, int first_row) {
  const LaneView<Shape::kKeys, Shape::kDim> a_view(keys, Lanes::kRowsFirst, first_key);
  const LaneView<Shape::kRows, Shape::kDim> b_view(rows, Lanes::kColumnsFirst, first_row);
#pragma unroll
  for (int n = 0; n < kRowBlocks; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) out[n][i] = 0.f;
#pragma unroll
  for (int j = 0; j < Shape::kDim / 16; ++j) {
    uint32_t a[4];
    ptx::ldmatrix(a, a_view.at(0, j));
#pragma unroll
    for (int n = 0; n < kRowBlocks; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix(b, b_view.at(8 * n, j));
      ptx::mma<T>(out[n], a, b[0], b[1]);
      ptx::mma<T>(out[n + 1], a, b[2], b[3]);
    }
  }
}

// The turn of a key tile at a row tile.
struct Turn {
  int32_t* counter;
  int32_t mine;
  int32_t last;
};

template <class T, int kDim, int kKeys, bool kTransform>
struct BackwardUnit {
  using Shape = BackwardShape<kDim, kKeys>;
  static constexpr int kScoreBlocks = Shape::kScoreRows / 8;
  using Scores = float[kScoreBlocks][4];
  using Sums = float[Shape::kColumns / 8][4];

  uint32_t base;
  __device__ typename Shape::TileK tile_k() const { return {ptx::opaque(base)}; }
  __device__ typename Shape::TileK tile_v() const { return {ptx::opaque(base) + Shape::TileK::kBytes}; }
  __device__ typename Shape::TileS tile_ds() const { return {ptx::opaque(base) + 2 * Shape::TileK::kBytes}; }
  __device__ typename Shape::TileS tile_p() const { return {tile_ds().base + Shape::TileS::kBytes}; }
  __device__ uint32_t stage(int i) const {
    return ptx::opaque(base) + 2 * Shape::TileK::kBytes + Shape::kSplit * Shape::TileS::kBytes +
           (i & 1) * Shape::kStageBytes;
  }
  __device__ typename Shape::TileQ tile_q(int i) const { return {stage(i)}; }
  __device__ typename Shape::TileQ tile_do(int i) const { return {stage(i) + Shape::TileQ::kBytes}; }
  __device__ uint32_t stats(int i) const { return stage(i) + 2 * Shape::TileQ::kBytes; }

  // By the last four warps: the first two have fences to pass, which would wait for these copies.
  static __device__ __forceinline__ void load_rows(const BackwardUnit& u, const Args& args, const GroupRows& rows,
                                                   int i) {
    const int thread = static_cast<int>(threadIdx.x) - (Shape::kThreads - 128);
    if (thread < 0) return;
    load_group_rows<128>(u.tile_q(i), thread, args.q, rows, args.head_dim);
    load_group_rows<128>(u.tile_do(i), thread, args.dout, rows, args.head_dim);
    if (thread < Shape::kRows) {
      const int row = thread;
      const bool valid = row < rows.valid;
      ptx::copy_8(u.stats(i) + row * 8, valid ? args.row_stats + rows.offset(row, args.num_heads, 1) : args.row_stats,
                  valid);
    }
    ptx::copy_commit();
  }

  // s becomes p (and t the tanh of a soft cap); rows that do not see the key get 0.
  static __device__ __forceinline__ void weights(Scores& s, Scores& t, const float2* stats, const Args& args,
                                                 const DocumentView& d, const GroupRows& rows, int32_t key,
                                                 int first_row, bool masked) {
    const int column = first_row + 2 * (threadIdx.x & 3);
    const float scale = args.softmax_scale * kLog2e;
#pragma unroll
    for (int n = 0; n < kScoreBlocks; ++n) {
      const float4 two = *reinterpret_cast<const float4*>(stats + column + 8 * n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float lse = i & 1 ? two.z : two.x;
        if constexpr (kTransform) {
          t[n][i] = 0.f;
          const float score = args.softcap > 0.f ? capped(s[n][i], args.softmax_scale, args.softcap, &t[n][i])
                                                 : s[n][i] * args.softmax_scale;
          s[n][i] = ptx::exp2_approx(fmaf(score, kLog2e, -lse));
        } else {
          s[n][i] = ptx::exp2_approx(fmaf(s[n][i], scale, -lse));
        }
      }
    }
    if (!masked) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t mine = key + 8 * half;
      const Range seeing = mine < d.keys ? d.tokens_seeing(mine, mine) : Range{0, 0};
#pragma unroll
      for (int n = 0; n < kScoreBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int32_t token = rows.token_of(column + 8 * n + i);
          if (token < seeing.first || token >= seeing.end) s[n][2 * half + i] = 0.f;
        }
      }
    }
  }

  static __device__ __forceinline__ void store_transposed(typename Shape::TileS tile, const Scores& x, int first_key,
                                                          int first_row) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < kScoreBlocks; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at = tile.chunk(0, first_key + (lane >> 2) + 8 * half, first_row / 8 + n) + (lane & 3) * 4;
        ptx::store_shared(at, pack<T>(x[n][2 * half], x[n][2 * half + 1]));
      }
    }
  }

  // dq of one row tile from the ds of this key tile.
  static __device__ __forceinline__ void add_queries(const BackwardUnit& u, const Args& args, const GroupRows& rows,
                                                     const Turn& turn, int first_block, int end_block) {
    constexpr int kBlocks = Shape::kQueryPass / 8;
    const int warp = threadIdx.x / 32;
    const int t = threadIdx.x & 3;
    const int row_group = warp % 4;
    const LaneView<kKeys, Shape::kRows> ds(u.tile_ds(), Lanes::kColumnsFirst, 0);
    const LaneView<kKeys, kDim> keys(u.tile_k(), Lanes::kRowsFirst, 0);
    const int row0 = row_group * 16 + ((threadIdx.x & 31) >> 2);
#pragma unroll 1
    for (int column = (warp / 4) * Shape::kQueryColumns; column < (warp / 4 + 1) * Shape::kQueryColumns;
         column += Shape::kQueryPass) {
      float acc[kBlocks][4];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] = 0.f;
#pragma unroll 2
      for (int j = first_block; j < end_block; ++j) {
        uint32_t a[4];
        ptx::ldmatrix_trans(a, ds.at(16 * j, row_group));
#pragma unroll
        for (int n = 0; n < kBlocks; n += 2) {
          uint32_t b[4];
          ptx::ldmatrix_trans(b, keys.at(16 * j, column / 16 + n / 2));
          ptx::mma<T>(acc[n], a, b[0], b[1]);
          ptx::mma<T>(acc[n + 1], a, b[2], b[3]);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row0 + 8 * half;
        const bool valid = row < rows.valid;
        float* sums =
            args.dq_sum +
            (turn.last > 0 && valid ? rows.offset(row, static_cast<int64_t>(args.num_heads) * kDim, kDim) + column : 0);
        if (turn.mine == turn.last) {
          if (turn.last > 0 && valid) {
#pragma unroll
            for (int n = 0; n < kBlocks; n += 2) {
              const float4 sum = __ldcg(reinterpret_cast<const float4*>(sums + 8 * n) + t);
              acc[n][2 * half] += sum.x;
              acc[n][2 * half + 1] += sum.y;
              acc[n + 1][2 * half] += sum.z;
              acc[n + 1][2 * half + 1] += sum.w;
            }
          }
          uint16_t* dq =
              valid ? static_cast<uint16_t*>(args.dq.data) + rows.offset(row, args.dq.token_stride, args.dq.head_stride)
                    : nullptr;
          store_row<T>(dq, column, args.head_dim, acc, half, args.softmax_scale);
        } else if (valid) {
#pragma unroll
          for (int n = 0; n < kBlocks; n += 2) {
            const float4 sum =
                make_float4(acc[n][2 * half], acc[n][2 * half + 1], acc[n + 1][2 * half], acc[n + 1][2 * half + 1]);
            float* to = sums + 8 * n + 4 * t;
            if (turn.mine == 0) {
              *reinterpret_cast<float4*>(to) = sum;
            } else {
              ptx::add_4(to, sum);
            }
          }
        }
      }
    }
  }
};

}  // namespace packing_ops::sm80
