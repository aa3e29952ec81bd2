// The forward's tile shapes, and one step of it: s = q k^T, mask, online softmax, o += p v.
#pragma once

#include "ops/attention/cuda/epilogue.cuh"
#include "ops/attention/cuda/persistent.cuh"
#include "ops/attention/cuda/sm80/forward.h"
#include "ops/attention/cuda/sm80/lane_view.cuh"
#include "ops/attention/cuda/softmax.cuh"

namespace packing_ops::attention::sm80 {

template <int kDim_, bool kShort, int kDimV_ = kDim_>
struct ForwardShape {
  static constexpr int kDim = kDim_;
  static constexpr int kDimV = kDimV_;
  static constexpr bool kIsShort = kShort;
  static constexpr int kThreads = 128;
  static constexpr int kRows = kShort ? kShortRows : forward_rows(kDim, kDimV);
  static constexpr int kKeys = kShort ? kShortKeys : forward_keys(kDim);
  static constexpr int kBlocksPerSm = kShort ? 4 : 2;  // blocks of a multiprocessor
  static constexpr int kRowBlocks = kRows / 64;        // blocks of 16 rows a warp owns
  static constexpr int kStageBytes = kKeys * (kDim + kDimV) * 2;
  static constexpr int kShared = kRows * kDim * 2 + 2 * kStageBytes + 128;
  static constexpr int kWarpRows = 16 * kRowBlocks;
  static constexpr int kLoadsAhead = 0;      // blocks of 16 columns by which ldmatrix is ahead of mma, 0 or 1
  static constexpr bool kSmallCode = false;  // see forward_resident.cuh
  using TileQ = Tile<kRows, kDim>;
  using TileK = Tile<kKeys, kDim>;
  using TileV = Tile<kKeys, kDimV>;
};

// What a warp reads in one step: tiles in shared memory, from its first row on, and which of the keys count.
template <class Shape>
struct WarpTile {
  typename Shape::TileQ q;
  typename Shape::TileK k;
  typename Shape::TileV v;
  int warp_row;
  int32_t first_key;    // in the document
  int32_t end_visible;  // in the tile: keys from here on are hidden from all rows of the warp
  bool masked;          // some of the others are hidden from some row
};

// A thread's rows: 16 b + g and 16 b + g + 8 of its warp, each with a separate softmax.
template <int kBlocks>
struct RowState {
  float row_max[kBlocks][2];
  float row_sum[kBlocks][2];  // of this thread's columns only, until the end
};

template <class T, class Shape, bool kTransform>
struct ForwardUnit {
  static constexpr int kBlocks = Shape::kRowBlocks;
  static constexpr int kKeyBlocks = Shape::kKeys / 8;
  static constexpr int kDimBlocks = Shape::kDimV / 8;  // of v and o
  using Scores = float[kBlocks][kKeyBlocks][4];
  using Sums = float[kBlocks][kDimBlocks][4];

  // Of a dot product before 2^x, and before e^x.
  static __device__ __forceinline__ float scale(const Args& args) {
    return ScoreTransform<kTransform>{args.scores}.unit() * kLog2e;
  }
  static __device__ __forceinline__ double natural_scale(const Args& args) {
    return ScoreTransform<kTransform>{args.scores}.unit();
  }

  // The state before a row's first key.
  static __device__ __forceinline__ void clear(Sums& o, RowState<kBlocks>& rows) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows.row_max[b][half] = -INFINITY;
        rows.row_sum[b][half] = 0.f;
      }
#pragma unroll
      for (int n = 0; n < kDimBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[b][n][i] = 0.f;
    }
  }

  // kCount: blocks of 8 keys, from the tile's first on, that are visible to the warp's rows.

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
    constexpr int kBuffers = 1 + kAhead;
    uint32_t a[kBuffers][kBlocks][4];
    uint32_t bb[kBuffers][kCount / 2][4];
    const auto load_rows = [&](int d) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) ptx::ldmatrix(a[d % kBuffers][b], rows.at(16 * b, d));
    };
    const auto load_keys = [&](int d, int n) { ptx::ldmatrix(bb[d % kBuffers][n / 2], keys.at(8 * n, d)); };
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
          const auto& right = bb[d % kBuffers][n / 2];
          ptx::mma<T>(s[b][n], a[d % kBuffers][b], right[0], right[1]);
          ptx::mma<T>(s[b][n + 1], a[d % kBuffers][b], right[2], right[3]);
        }
      }
    }
  }

  // o += p v, p rounded to T; `end`: keys of the tile, as in step.
  template <int kCount>
  static __device__ __forceinline__ void values(Sums& o, const Scores& p, typename Shape::TileV v, int32_t end) {
    const LaneView<Shape::kKeys, Shape::kDimV> keys(v, Lanes::kRowsFirst, 0);
#pragma unroll
    for (int n = 0; n < kCount; n += 2) {
      if (Shape::kSmallCode && n > 0 && 8 * n >= end) break;
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
  static __device__ __forceinline__ void mask(Scores& s, const DocumentWithEnds& d, const PackedRows& rows,
                                              int first_row, int32_t first_key) {
    const int32_t column = first_key + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t token = rows.token_of(first_row + 16 * b + 8 * half);
        const Interval<int32_t> visible = d.visible_keys(token, token);
        if (Shape::kSmallCode && d.window.left >= kOpenWindow) {
          const int32_t end = visible.end - column;
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
          if (key < visible.begin || key >= visible.end) s[b][n][2 * half] = -INFINITY;
          if (key + 1 < visible.begin || key + 1 >= visible.end) s[b][n][2 * half + 1] = -INFINITY;
        }
      }
    }
  }

  // Online softmax: s becomes p, o and row_sum are rescaled to the new row_max. `scale` is softmax_scale * log2(e).
  template <int kCount>
  static __device__ __forceinline__ void softmax(Scores& s, RowState<kBlocks>& rows, Sums& o, float scale) {
    float factor[kBlocks][2];
    bool max_grew = false;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float row_max = rows.row_max[b][half];
#pragma unroll
        for (int n = 0; n < kCount; ++n) row_max = fmaxf(row_max, fmaxf(s[b][n][2 * half], s[b][n][2 * half + 1]));
        row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 1));
        row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 2));
        max_grew |= row_max != rows.row_max[b][half] && rows.row_max[b][half] != -INFINITY;
        const float base = row_max == -INFINITY ? 0.f : row_max * scale;
        // No fused multiply-add: exactly 1 where the maximum stays, so that hidden keys change no bit of a row.
        factor[b][half] = ptx::exp2_approx(__fsub_rn(__fmul_rn(rows.row_max[b][half], scale), base));
        rows.row_max[b][half] = row_max;
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < kCount; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            s[b][n][i] = ptx::exp2_approx(fmaf(s[b][n][i], scale, -base));
            sum += s[b][n][i];
          }
        }
        rows.row_sum[b][half] = rows.row_sum[b][half] * factor[b][half] + sum;
      }
    }
    // Skipping the rescale changes no bit: an unchanged maximum has a factor of exactly 1, and a row's first maximum
    // rescales zeros.
    if (!__any_sync(0xffffffffu, max_grew)) return;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int d = 0; d < kDimBlocks; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[b][d][i] *= factor[b][i / 2];
  }

  // s = q k^T becomes p.
  template <int kCount>
  static __device__ __forceinline__ void weights(Scores& s, Sums& o, RowState<kBlocks>& state, const Args& args,
                                                 const WarpTile<Shape>& tile, const DocumentWithEnds& d,
                                                 const PackedRows& rows, float scale) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int n = 0; n < kCount; ++n) ScoreTransform<kTransform>{args.scores}.apply(s[b][n]);
    if (tile.masked) mask<kCount>(s, d, rows, tile.warp_row + ((threadIdx.x & 31) >> 2), tile.first_key);
    softmax<kCount>(s, state, o, scale);
  }

  // One key tile for this warp's rows.
  template <int kCount>
  static __device__ __forceinline__ void step(Sums& o, RowState<kBlocks>& state, const Args& args,
                                              const WarpTile<Shape>& tile, const DocumentWithEnds& d,
                                              const PackedRows& rows, float scale) {
    Scores s;
    scores<kCount>(s, tile.q, tile.k, tile.warp_row);
    weights<kCount>(s, o, state, args, tile, d, rows, scale);
    values<kCount>(o, s, tile.v, tile.end_visible);
  }
};

// q of a warp's rows, read only by this warp.
template <class Shape>
__device__ __forceinline__ void load_warp_rows(const Args& args, const PackedRows& rows, typename Shape::TileQ tile,
                                               int warp_row) {
  const uint16_t* data = static_cast<const uint16_t*>(args.q.data);
  const int lane = threadIdx.x & 31;
  const auto address = [&](int row) { return data + rows.offset(row, args.q.token_stride, args.q.head_stride); };
  if (warp_row + Shape::kWarpRows <= rows.valid && args.token_aligned_group > 0 && args.token_aligned_group <= 4) {
    load_rows_unchecked<32, Shape::kWarpRows>(tile, warp_row, lane, address(warp_row + (lane >> 3)) + (lane & 7) * 8,
                                              rows.token_step(4) * args.q.token_stride);
    return;
  }
  load_rows<32, Shape::kWarpRows>(tile, warp_row, lane, args.head_dim, data,
                                  [&](int row) -> const void* { return row < rows.valid ? address(row) : nullptr; });
}

// Epilogue: out and lse of this warp's rows. unit: scale without its log2(e). A quad of lanes holds 2 kRowBlocks rows,
// each lane computes lse and 1 / row_sum of one of them. first_column: of o, which may be a share of the columns.
template <class T, class Shape>
__device__ __forceinline__ void finish(const Args& args, const PackedRows& rows, int first_row,
                                       const RowState<Shape::kRowBlocks>& state,
                                       const float (&o)[Shape::kRowBlocks][Shape::kDimV / 8][4], float scale,
                                       double unit, int first_column = 0) {
  constexpr int kQuadRows = 2 * Shape::kRowBlocks;
  const int lane = threadIdx.x & 31;
  const int lane_row = lane % kQuadRows;
  float sum = 0.f;
  float row_max = 0.f;
#pragma unroll
  for (int i = 0; i < kQuadRows; ++i) {
    float row_sum = state.row_sum[i / 2][i % 2];
    row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 1);
    row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 2);
    sum = lane_row == i ? row_sum : sum;
    row_max = lane_row == i ? state.row_max[i / 2][i % 2] : row_max;
  }
  float inverse = sum == 0.f ? 0.f : 1.f / sum;
  const int thread_row = first_row + 8 * lane_row;
  if (thread_row < rows.valid && (lane & 3) == lane_row) {
    float lse = sum == 0.f ? -INFINITY : log_of_sum(row_max, scale, unit, sum);
    const int32_t step = rows.token_step(thread_row);
    const int32_t head = rows.first_head + thread_row + rows.head_offset - step * rows.group;
    if (args.sinks != nullptr) {
      const float sink = args.sinks[head];
      const float top = fmaxf(lse, sink);
      const float lse_with_sink = top == -INFINITY ? top : top + log1pf(expf(fminf(lse, sink) - top));
      inverse = sum == 0.f ? 0.f : inverse * expf(lse - lse_with_sink);
      lse = lse_with_sink;
    }
    if (first_column == 0) args.lse[head * args.documents_q.total + rows.first_token + step] = lse;
  }
#pragma unroll
  for (int i = 0; i < kQuadRows; ++i) {
    const int row = first_row + 8 * i;
    uint16_t* out = row < rows.valid ? static_cast<uint16_t*>(args.out.data) +
                                           rows.offset(row, args.out.token_stride, args.out.head_stride)
                                     : nullptr;
    const float factor = __shfl_sync(0xffffffffu, inverse, (lane & 28) + i);
    store_row<T>(out, first_column, args.head_dim_v, o[i / 2], i % 2, factor);
  }
}

}  // namespace packing_ops::attention::sm80
