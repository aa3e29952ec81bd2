// Forward on mma.sync. A unit is (document, tile of packed rows, kv head); a block works its units off one after the
// other. Each warp owns its rows through the whole unit; K and V come in tiles of kKeys, always from the first visible
// tile upwards, so a row's sum has one order wherever its document lies. Copies run one tile ahead, over the seam
// between units too: while a unit ends, the next one's first tiles are already on their way. Short documents have a
// kernel of smaller units, or the one in forward_whole.cuh; either starts where the other one's blocks run out of work.
#pragma once

#include "core/launch.cuh"
#include "ops/attention/cuda/persistent.cuh"
#include "ops/attention/cuda/plan_check.cuh"
#include "ops/attention/cuda/sm80/forward_unit.cuh"
#include "ops/attention/cuda/zero_padding.cuh"

namespace packing_ops::attention::sm80 {

struct ForwardWork {
  DocumentView d;
  GroupRows rows;
  int32_t kv_head;
  int32_t first_tile;
  int32_t end_tile;  // at least one tile, also where no key is seen

  template <class Shape>
  static __device__ __forceinline__ ForwardWork make(const Args& args, const PlanEntry& entry, int32_t kv_head) {
    const DocumentView d = document_view(entry, args.plan.window);
    const int32_t most = Shape::kIsShort ? Shape::kRows : args.plan.tiles.forward_rows;  // at most kRows
    const GroupRows rows(args, d, kv_head, entry.first_token, entry.skipped, static_cast<int64_t>(entry.tile) * most,
                         most);
    const Range keys = d.keys_seen(rows.token, rows.last_token());
    const int32_t first = keys.first / Shape::kKeys;
    return {d, rows, kv_head, first, keys.empty() ? first + 1 : (keys.end - 1) / Shape::kKeys + 1};
  }
};

template <class T, int kDim, bool kShort, bool kTransform>
__global__ void __launch_bounds__(128, ForwardShape<kDim, kShort>::kResident)
    attention_forward_kernel(__grid_constant__ const Args args) {
  using Shape = ForwardShape<kDim, kShort>;
  constexpr int kList = kShort ? PlanView::kForwardShort : PlanView::kForward;
  using Unit = ForwardUnit<T, Shape, kTransform>;
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
  const float scale = Unit::scale(args);
  const double natural_scale = Unit::natural_scale(args);
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
    load_keys<Shape::kThreads>(tile_k(stage), args.k, work.d, work.kv_head, first_key, args.head_dim, threadIdx.x);
    load_keys<Shape::kThreads>(tile_v(stage), args.v, work.d, work.kv_head, first_key, args.head_dim, threadIdx.x);
  };
  ptx::let_next_kernel_start();
  if (serpentine(0) < units) {
    load_entry(0);
    load_entry(1);
    ptx::copy_commit();
    ptx::copy_wait<0>();
    __syncthreads();
    const ForwardWork work = ForwardWork::make<Shape>(args, entries[0], kv_head_of(0));
    load_warp_rows<Shape>(args, work.rows, tile_q, warp_row);
    load_next_keys(work, work.first_tile, 0);
    ptx::copy_commit();
    if (threadIdx.x == 0) works[0] = work;
  }
  if constexpr (!kShort) {  // the kernel that every call launches
    check_plan(args.plan, args.documents_q, args.documents_k, args.fault);
    zero_padding(args);
  }
  __syncthreads();

  int stage = 0;
  for (uint32_t round = 0; serpentine(round) < units; ++round) {
    const ForwardWork& work = works[round & 1];
    RowState<Shape::kRowBlocks> state;
    typename Unit::Sums o;
    Unit::clear(o, state);
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
        const int32_t end = some.end - first_key;
        if (end <= Shape::kKeys / 2) {
          Unit::template step<Unit::kKeyBlocks / 2>(o, state, args, tile_q, tile_k(stage), tile_v(stage), work.d,
                                                    work.rows, warp_row, first_key, end, masked, scale);
        } else {
          Unit::template step<Unit::kKeyBlocks>(o, state, args, tile_q, tile_k(stage), tile_v(stage), work.d, work.rows,
                                                warp_row, first_key, end, masked, scale);
        }
      }
      if (last && more) {
        __syncwarp();
        load_warp_rows<Shape>(args,
                              ForwardWork::make<Shape>(args, entries[(round + 1) % 3], kv_head_of(round + 1)).rows,
                              tile_q, warp_row);
        ptx::copy_commit();
      }
    }
    if (warp_row < work.rows.valid) finish<T, Shape>(args, work.rows, warp_row + g, state, o, scale, natural_scale);
  }
  ptx::wait_for_kernel_before();
}

template <class T, int kDim, bool kShort, bool kTransform>
void run_forward(const Args& args, cudaStream_t stream) {
  using Shape = ForwardShape<kDim, kShort>;
  static PersistentKernel kernel{reinterpret_cast<const void*>(attention_forward_kernel<T, kDim, kShort, kTransform>),
                                 Shape::kThreads, Shape::kShared, "attention_forward_kernel", kShort};
  const int64_t entries = kShort ? args.plan.forward_short_capacity() : args.plan.forward_capacity();
  launch_persistent(kernel, &args, entries * args.num_kv_heads, stream);
}

}  // namespace packing_ops::attention::sm80
