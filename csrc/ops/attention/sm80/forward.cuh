// Forward on mma.sync. A unit is (document, tile of packed rows, kv head); a block works its units off one after the
// other. Each warp owns its rows through the whole unit; K and V come in tiles of kKeys, always from the first visible
// tile upwards, so a row's sum has one order wherever its document lies. Copies run one tile ahead, over the seam
// between units too: while a unit ends, the next one's first tiles are already on their way. Short documents have a
// kernel of smaller units, which starts where the other one's blocks run out of work.
#pragma once

#include "core/launch.cuh"
#include "ops/attention/sm80/forward_unit.cuh"
#include "ops/attention/sm80/persistent.h"

namespace packing_ops::sm80 {

// Unit number `round` of this block, in a serpentine so that no block always gets the longer one.
__device__ __forceinline__ uint32_t serpentine(uint32_t round) {
  const uint32_t at = (round & 1) ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  return round * gridDim.x + at;
}

struct ForwardWork {
  DocumentView d;
  GroupRows rows;
  int32_t kv_head;
  int32_t first_tile;
  int32_t end_tile;  // at least one tile, also where no key is seen

  template <class Shape>
  static __device__ __forceinline__ ForwardWork make(const Args& args, const PlanEntry& entry, int32_t kv_head) {
    const DocumentView d = document_view(entry, args.plan.window);
    const GroupRows rows(args, d, kv_head, entry.first_token, entry.skipped,
                         static_cast<int64_t>(entry.tile) * Shape::kRows, Shape::kRows);
    const Range keys = d.keys_seen(rows.token, rows.last_token());
    const int32_t first = keys.first / Shape::kKeys;
    return {d, rows, kv_head, first, keys.empty() ? first + 1 : (keys.end - 1) / Shape::kKeys + 1};
  }
};

__device__ inline void zero_padding(const Args& args) {
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

// log(sum_j exp(unit * s_j)) from the largest s and the sum of 2^(s scale - largest scale), scale = unit * log2(e):
// what rounding scale and the product left out is put back.
__device__ __forceinline__ float log_of_sum(float most, float scale, double unit, float sum) {
  const float left_out = most == -INFINITY ? 0.f : fmaf(most, scale, -(most * scale));
  return static_cast<float>(most * unit + (logf(sum) - kLn2 * left_out));
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

template <class T, int kDim, bool kShort, bool kTransform>
__global__ void __launch_bounds__(128, ForwardShape<kDim, kShort>::kResident)
    attention_forward_kernel(__grid_constant__ const Args args) {
  using Shape = ForwardShape<kDim, kShort>;
  constexpr int kList = kShort ? PlanView::kForwardShort : PlanView::kForward;
  using Unit = ForwardUnit<T, Shape, kTransform>;
  constexpr int kBlocks = Shape::kRowBlocks;
  extern __shared__ uint8_t shared[];
  __shared__ PlanEntry entries[3];  // of this unit, the next and the one after
  __shared__ ForwardWork works[2];  // this unit and the next
  const uint32_t base = (ptx::shared_address(shared) + 127) & ~127u;
  const typename Shape::TileQ tile_q{base};
  const auto tile_k = [&](int stage) {
    return typename Shape::TileK{ptx::opaque(base) + Shape::TileQ::kBytes + stage * 2 * Shape::TileK::kBytes};
  };
  const auto tile_v = [&](int stage) { return typename Shape::TileK{tile_k(stage).base + Shape::TileK::kBytes}; };

  const int warp_row = (threadIdx.x / 32) * Shape::kWarpRows;
  const int g = (threadIdx.x & 31) >> 2;
  const float scale = kTransform ? 1.f : args.softmax_scale * kLog2e;
  const double unit = kTransform ? 0.6931471805599453 : args.softmax_scale;
  const uint32_t units = static_cast<uint32_t>(args.plan.data[kList]) * args.num_kv_heads;
  const auto kv_head_of = [&](uint32_t round) {
    const uint32_t unit = serpentine(round);
    return static_cast<int32_t>(unit - args.kv_heads.quotient(unit) * args.kv_heads.value);
  };
  const auto load_entry = [&](uint32_t round) {
    if (threadIdx.x < 2 && serpentine(round) < units) {
      const auto* from = args.plan.entries[kList] + args.kv_heads.quotient(serpentine(round));
      ptx::copy_16(ptx::shared_address(&entries[round % 3]) + threadIdx.x * 16,
                   reinterpret_cast<const uint8_t*>(from) + threadIdx.x * 16, true);
    }
  };
  const auto load_next_keys = [&](const ForwardWork& work, int32_t tile, int stage) {
    const int32_t first_key = tile * Shape::kKeys;
    load_keys<Shape::kThreads>(tile_k(stage), args.k, work.d, work.kv_head, first_key, args.head_dim);
    load_keys<Shape::kThreads>(tile_v(stage), args.v, work.d, work.kv_head, first_key, args.head_dim);
  };
  // Only this warp reads these rows.
  const auto load_own_rows = [&](const ForwardWork& work) {
    const uint16_t* data = static_cast<const uint16_t*>(args.q.data);
    const int lane = threadIdx.x & 31;
    const auto address = [&](int row) { return data + work.rows.offset(row, args.q.token_stride, args.q.head_stride); };
    if (warp_row + Shape::kWarpRows <= work.rows.valid && args.whole_group > 0 && args.whole_group <= 4) {
      load_whole_rows<32, Shape::kWarpRows>(tile_q, warp_row, lane, address(warp_row + (lane >> 3)) + (lane & 7) * 8,
                                            work.rows.token_step(4) * args.q.token_stride);
      return;
    }
    load_rows<32, Shape::kWarpRows>(tile_q, warp_row, lane, args.head_dim, data, [&](int row) -> const void* {
      return row < work.rows.valid ? address(row) : nullptr;
    });
  };

  ptx::let_next_kernel_start();
  if (serpentine(0) < units) {
    load_entry(0);
    load_entry(1);
    ptx::copy_commit();
    ptx::copy_wait<0>();
    __syncthreads();
    const ForwardWork work = ForwardWork::make<Shape>(args, entries[0], kv_head_of(0));
    load_own_rows(work);
    load_next_keys(work, work.first_tile, 0);
    ptx::copy_commit();
    if (threadIdx.x == 0) works[0] = work;
  }
  if constexpr (!kShort) zero_padding(args);
  __syncthreads();

  int stage = 0;
  for (uint32_t round = 0; serpentine(round) < units; ++round) {
    const ForwardWork& work = works[round & 1];
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
    bool last = false;
    bool fresh = true;
    Range some;  // keys that some row of this warp sees
    Range all;   // keys that all of them see
    for (int32_t tile = 0; !last; ++tile, stage ^= 1) {
      ptx::copy_wait<0>();
      __syncthreads();
      if (fresh) {
        tile = work.first_tile;
        load_entry(round + 2);
      }
      last = tile + 1 >= work.end_tile;
      const bool more = serpentine(round + 1) < units;
      if (!last) {
        load_next_keys(work, tile + 1, stage ^ 1);
      } else if (more) {
        const ForwardWork next = ForwardWork::make<Shape>(args, entries[(round + 1) % 3], kv_head_of(round + 1));
        load_next_keys(next, next.first_tile, stage ^ 1);
        if (threadIdx.x == 0) works[(round + 1) & 1] = next;
      }
      ptx::copy_commit();

      const int32_t first_key = tile * Shape::kKeys;
      const int32_t end_key = first_key + Shape::kKeys;
      if (fresh) {
        fresh = false;
        const int last_row =
            warp_row + Shape::kWarpRows < work.rows.valid ? warp_row + Shape::kWarpRows - 1 : work.rows.valid - 1;
        const int32_t first_token = work.rows.token_of(warp_row);
        const int32_t last_token = work.rows.token_of(last_row);
        some = warp_row < work.rows.valid ? work.d.keys_seen(first_token, last_token) : Range{0, 0};
        all = work.d.keys_seen_by_all(first_token, last_token);
      }
      // A tile that no row of this warp sees would change no bit.
      if (first_key < some.end && end_key > some.first) {
        const bool masked = first_key < all.first || end_key > all.end;
        if (some.end - first_key <= Shape::kKeys / 2) {
          Unit::template step<Unit::kKeyBlocks / 2>(o, state, args, tile_q, tile_k(stage), tile_v(stage), work.d,
                                                    work.rows, warp_row, first_key, masked, scale);
        } else {
          Unit::template step<Unit::kKeyBlocks>(o, state, args, tile_q, tile_k(stage), tile_v(stage), work.d, work.rows,
                                                warp_row, first_key, masked, scale);
        }
      }
      if (last && more) {
        __syncwarp();
        load_own_rows(ForwardWork::make<Shape>(args, entries[(round + 1) % 3], kv_head_of(round + 1)));
        ptx::copy_commit();
      }
    }
    if (warp_row < work.rows.valid) finish<T, Shape>(args, work.rows, warp_row + g, state, o, scale, unit);
  }
  ptx::wait_for_kernel_before();
}

template <class T, int kDim, bool kShort, bool kTransform>
void run_forward(const Args& args, cudaStream_t stream) {
  using Shape = ForwardShape<kDim, kShort>;
  static PersistentKernel kernel{reinterpret_cast<const void*>(attention_forward_kernel<T, kDim, kShort, kTransform>),
                                 Shape::kThreads, Shape::kShared, "attention_forward_kernel", kShort};
  const int64_t entries = kShort ? args.plan.forward_short_capacity() : args.plan.forward_capacity();
  launch_persistent(kernel, args, entries * args.num_kv_heads, stream);
}

}  // namespace packing_ops::sm80
