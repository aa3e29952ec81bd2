// Forward on mma.sync. A unit is (document, tile of packed rows, kv head); a block works its units off one after the
// other. Each warp owns its rows through the whole unit; K and V come in tiles of kKeys, always from the first visible
// tile upwards, so a row's sum has one order wherever its document lies.
#pragma once

#include "core/launch.cuh"
#include "ops/attention/sm80/forward.h"
#include "ops/attention/sm80/persistent.h"
#include "ops/attention/sm80/tile.cuh"

namespace packing_ops::sm80 {

template <int kDim_>
struct ForwardShape {
  static constexpr int kDim = kDim_;
  static constexpr int kThreads = 128;
  static constexpr int kRows = forward_rows(kDim);
  static constexpr int kKeys = forward_keys(kDim);
  static constexpr int kRowBlocks = kRows / 64;  // blocks of 16 rows a warp owns
  static constexpr int kShared = (kRows + 4 * kKeys) * kDim * 2 + 128;
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

  // s = q k^T of this warp's rows and one key tile.
  static __device__ __forceinline__ void scores(Scores& s, typename Shape::TileQ q, typename Shape::TileK k,
                                                int first_row) {
    const LaneView<Shape::kRows, Shape::kDim> rows(q, Lanes::kRowsFirst, first_row);
    const LaneView<Shape::kKeys, Shape::kDim> keys(k, Lanes::kColumnsFirst, 0);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[b][n][i] = 0.f;
#pragma unroll
    for (int d = 0; d < Shape::kDim / 16; ++d) {
      uint32_t a[kBlocks][4];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) ptx::ldmatrix(a[b], rows.at(16 * b, d));
#pragma unroll
      for (int n = 0; n < kKeyBlocks; n += 2) {
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
  static __device__ __forceinline__ void values(Sums& o, const Scores& p, typename Shape::TileK v) {
    const LaneView<Shape::kKeys, Shape::kDim> keys(v, Lanes::kRowsFirst, 0);
#pragma unroll
    for (int n = 0; n < kKeyBlocks; n += 2) {
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
        for (int n = 0; n < kKeyBlocks; ++n) {
          const int32_t key = column + 8 * n;
          if (key < seen.first || key >= seen.end) s[b][n][2 * half] = -INFINITY;
          if (key + 1 < seen.first || key + 1 >= seen.end) s[b][n][2 * half + 1] = -INFINITY;
        }
      }
    }
  }

  // Scores to weights; o and the sums move to the new maximum. `scale` is softmax_scale * log2(e).
  static __device__ __forceinline__ void softmax(Scores& s, RowState<kBlocks>& rows, Sums& o, float scale) {
    float factor[kBlocks][2];
    bool moved = false;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = rows.most[b][half];
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) most = fmaxf(most, fmaxf(s[b][n][2 * half], s[b][n][2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        moved |= most != rows.most[b][half];
        const float base = most == -INFINITY ? 0.f : most * scale;
        factor[b][half] = ptx::exp2_approx(rows.most[b][half] * scale - base);
        rows.most[b][half] = most;
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            s[b][n][i] = ptx::exp2_approx(fmaf(s[b][n][i], scale, -base));
            sum += s[b][n][i];
          }
        }
        rows.sum[b][half] = rows.sum[b][half] * factor[b][half] + sum;
      }
    }
    // A maximum that stays is a factor of exactly 1, so leaving it out changes no bit.
    if (!__any_sync(0xffffffffu, moved)) return;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int d = 0; d < kDimBlocks; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[b][d][i] *= factor[b][i / 2];
  }
};

// Units in a serpentine, so that no block always gets the longer one.
__device__ __forceinline__ int64_t serpentine(int64_t round) {
  const int64_t at = (round & 1) ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  return round * gridDim.x + at;
}

template <class T>
__device__ void zero_padding(const Args& args) {
  const int64_t end = args.plan.data[PlanView::kEndQ];
  const int64_t words = args.head_dim / 8;
  const int64_t rows = (args.documents_q.total - end) * args.num_heads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * words; i += step) {
    const int64_t row = i / words;
    const int64_t token = end + row / args.num_heads;
    const int64_t head = row % args.num_heads;
    auto* out = static_cast<uint16_t*>(args.out.data) + token * args.out.token_stride + head * args.out.head_stride;
    *reinterpret_cast<uint4*>(out + (i % words) * 8) = make_uint4(0, 0, 0, 0);
    if (i % words == 0) args.lse[head * args.documents_q.total + token] = -INFINITY;
  }
}

template <class T, int kDim, bool kTransform>
__global__ void __launch_bounds__(128, 2) attention_forward_kernel(__grid_constant__ const Args args) {
  using Shape = ForwardShape<kDim>;
  using Unit = ForwardUnit<T, Shape, kTransform>;
  constexpr int kBlocks = Shape::kRowBlocks;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (ptx::shared_address(shared) + 127) & ~127u;
  const typename Shape::TileQ tile_q{base};
  const auto tile_k = [&](int stage) {
    return typename Shape::TileK{base + Shape::TileQ::kBytes + stage * 2 * Shape::TileK::kBytes};
  };
  const auto tile_v = [&](int stage) { return typename Shape::TileK{tile_k(stage).base + Shape::TileK::kBytes}; };

  zero_padding<T>(args);
  const int warp_row = (threadIdx.x / 32) * 16 * kBlocks;
  const int g = (threadIdx.x & 31) >> 2;
  const float scale = kTransform ? 1.f : args.softmax_scale * kLog2e;
  const int64_t units = static_cast<int64_t>(args.plan.data[PlanView::kForward]) * args.num_kv_heads;
  const PlanEntry* entries = args.plan.entries(PlanView::kForward);

  for (int64_t round = 0; round * gridDim.x < units; ++round) {
    const int64_t unit = serpentine(round);
    if (unit >= units) continue;
    const PlanEntry entry = entries[unit / args.num_kv_heads];
    const int32_t kv_head = static_cast<int32_t>(unit % args.num_kv_heads);
    const DocumentView d = document_view(args.documents_q, args.documents_k, entry.document, args.plan.window);
    const GroupRows rows(d, args.group, kv_head, static_cast<int64_t>(entry.tile) * Shape::kRows, Shape::kRows);
    if (rows.valid <= 0) continue;
    const int32_t last_token = rows.last_token();
    const Range keys = d.keys_seen(rows.token, last_token);
    const int32_t first_tile = keys.first / Shape::kKeys;
    const int32_t end_tile = keys.empty() ? first_tile : (keys.end - 1) / Shape::kKeys + 1;

    const auto load_keys = [&](int32_t tile) {
      const int stage = tile & 1;
      const KeyRows k = key_rows(args.k, d, kv_head, tile * Shape::kKeys);
      const KeyRows v = key_rows(args.v, d, kv_head, tile * Shape::kKeys);
      load_tile<Shape::kThreads>(tile_k(stage), args.head_dim, args.k.data, k);
      load_tile<Shape::kThreads>(tile_v(stage), args.head_dim, args.v.data, v);
      ptx::copy_commit();
    };

    __syncthreads();  // the unit before has read its tiles
    load_group_rows<Shape::kThreads>(tile_q, args.q, rows, args.head_dim);
    if (first_tile < end_tile) load_keys(first_tile);

    RowState<kBlocks> state;
    typename Unit::Sums o;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        state.most[b][half] = -INFINITY;
        state.sum[b][half] = 0.f;
      }
#pragma unroll
      for (int n = 0; n < Unit::kDimBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[b][n][i] = 0.f;
    }
    const bool warp_has_rows = warp_row < rows.valid;
    const int warp_last_row = warp_row + 16 * kBlocks - 1 < rows.valid ? warp_row + 16 * kBlocks - 1 : rows.valid - 1;
    const int32_t warp_first_token = rows.token_of(warp_row);
    const int32_t warp_last_token = rows.token_of(warp_last_row);
    const Range warp_keys = d.keys_seen(warp_first_token, warp_last_token);

    for (int32_t tile = first_tile; tile < end_tile; ++tile) {
      ptx::copy_wait<0>();
      __syncthreads();
      if (tile + 1 < end_tile) load_keys(tile + 1);
      const int32_t first_key = tile * Shape::kKeys;
      const int32_t last_key = first_key + Shape::kKeys - 1;
      // A tile that this warp does not see would change no bit.
      if (!warp_has_rows || first_key >= warp_keys.end || last_key < warp_keys.first) continue;
      typename Unit::Scores s;
      Unit::scores(s, tile_q, tile_k(tile & 1), warp_row);
      if constexpr (kTransform) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
          for (int n = 0; n < Unit::kKeyBlocks; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[b][n][i] = transform_score(s[b][n][i], args) * kLog2e;
      }
      if (!d.all_seen(warp_first_token, warp_last_token, first_key, last_key)) {
        Unit::mask(s, d, rows, warp_row + g, first_key);
      }
      Unit::softmax(s, state, o, scale);
      Unit::values(o, s, tile_v(tile & 1));
    }
    ptx::copy_wait<0>();
    if (!warp_has_rows) continue;

#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + 16 * b + 8 * half + g;
        const bool valid = row < rows.valid;
        float sum = state.sum[b][half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        float most = state.most[b][half] == -INFINITY ? -INFINITY : state.most[b][half] * scale;
        float factor = 1.f;
        const int32_t step = rows.token_step(row);
        const int32_t head = rows.first_head + row + rows.skipped - step * rows.group;
        if (args.sinks != nullptr && valid) {
          const float sink = args.sinks[head] * kLog2e;
          const float top = fmaxf(most, sink);
          if (top != -INFINITY) {
            factor = ptx::exp2_approx(most - top);
            sum = sum * factor + ptx::exp2_approx(sink - top);
            most = top;
          }
        }
        const float inverse = sum == 0.f ? 0.f : factor / sum;
        uint16_t* out = valid ? static_cast<uint16_t*>(args.out.data) +
                                    rows.offset(row, args.out.token_stride, args.out.head_stride)
                              : nullptr;
        store_row<T>(out, 0, args.head_dim, o[b], half, inverse);
        if (valid && (threadIdx.x & 3) == 0) {
          args.lse[head * args.documents_q.total + rows.first_token + step] =
              sum == 0.f ? -INFINITY : most * kLn2 + logf(sum);
        }
      }
    }
  }
}

template <class T, int kDim, bool kTransform>
void run_forward(const Args& args, cudaStream_t stream) {
  using Shape = ForwardShape<kDim>;
  static PersistentKernel kernel{reinterpret_cast<const void*>(attention_forward_kernel<T, kDim, kTransform>),
                                 Shape::kThreads, Shape::kShared, "attention_forward_kernel"};
  launch_persistent(kernel, args, args.plan.forward_capacity() * args.num_kv_heads, stream);
}

}  // namespace packing_ops::sm80
