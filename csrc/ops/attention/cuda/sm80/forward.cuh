// Forward on mma.sync. A unit of work is (document, row tile, kv head); a persistent block takes one after the other.
// Each warp owns its rows for the whole unit. K and V are read in tiles of kKeys in ascending order, from the first
// visible one on, so that a row's online softmax has one order wherever its document is in the pack. cp.async runs one
// tile ahead, across units too: the next unit's first tiles load while this one finishes. Resident rows have the kernel
// of forward_resident.cuh, which runs first; short ones an instance with smaller tiles (kShort), which runs last. Each
// but the first starts (programmatic dependent launch) as the blocks of the one before run out of work.
#pragma once

#include "core/launch.cuh"
#include "ops/attention/cuda/persistent.cuh"
#include "ops/attention/cuda/plan_check.cuh"
#include "ops/attention/cuda/sm80/forward_unit.cuh"
#include "ops/attention/cuda/zero_padding.cuh"

namespace packing_ops::attention::sm80 {

struct ForwardWork {
  DocumentWithEnds d;
  PackedRows rows;
  int32_t kv_head;
  int32_t first_tile;
  int32_t end_tile;  // at least one tile, even where no key is visible

  template <class Shape>
  static __device__ __forceinline__ ForwardWork make(const Args& args, const PlanEntry& entry, int32_t kv_head) {
    const DocumentWithEnds d = document_with_ends(entry, args.plan);
    const int32_t end_token = Shape::kIsShort ? d.first_token_beyond(args.plan.tiles.short_max_keys) : d.tokens;
    const PackedRows rows(args, d, kv_head, entry.first_token, entry.head_offset, end_token, Shape::kRows);
    const Interval<int32_t> keys = d.visible_keys(rows.token, rows.last_token());
    const int32_t first = keys.begin / Shape::kKeys;
    return {d, rows, kv_head, first, keys.empty() ? first + 1 : (keys.end - 1) / Shape::kKeys + 1};
  }
};

template <class T, int kDim, bool kShort, bool kTransform, int kDimV>
__global__ void __launch_bounds__(128, ForwardShape<kDim, kShort, kDimV>::kBlocksPerSm)
    attention_forward_kernel(__grid_constant__ const Args args) {
  using Shape = ForwardShape<kDim, kShort, kDimV>;
  constexpr int kList = kShort ? PlanView::kForwardShort : PlanView::kForward;
  using Unit = ForwardUnit<T, Shape, kTransform>;
  extern __shared__ uint8_t shared[];
  __shared__ PlanEntry entries[3];  // of this unit and the next two
  __shared__ ForwardWork works[2];  // this unit and the next
  const uint32_t base = (ptx::shared_address(shared) + 127) & ~127u;
  const typename Shape::TileQ tile_q{base};
  const auto tile_k = [&](int stage) {
    return typename Shape::TileK{ptx::opaque(base) + Shape::TileQ::kBytes + stage * Shape::kStageBytes};
  };
  const auto tile_v = [&](int stage) { return typename Shape::TileV{tile_k(stage).base + Shape::TileK::kBytes}; };

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
      ptx::cp_async_16(ptx::shared_address(&entries[round % 3]) + threadIdx.x * 16,
                       reinterpret_cast<const uint8_t*>(from) + threadIdx.x * 16, true);
    }
  };
  const auto load_next_keys = [&](const ForwardWork& work, int32_t tile, int stage) {
    const KeySpan keys = key_span(args, work.d, tile * Shape::kKeys);
    load_keys<Shape::kThreads>(tile_k(stage), args.k, keys, work.kv_head, args.head_dim, threadIdx.x);
    load_keys<Shape::kThreads>(tile_v(stage), args.v, keys, work.kv_head, args.head_dim_v, threadIdx.x);
  };
  // Prologue: q and the first key tile of the first unit
  ptx::griddepcontrol_launch_dependents();
  if (serpentine(0) < units) {
    load_entry(0);
    load_entry(1);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    const ForwardWork work = ForwardWork::make<Shape>(args, entries[0], kv_head_of(0));
    load_warp_rows<Shape>(args, work.rows, tile_q, warp_row);
    load_next_keys(work, work.first_tile, 0);
    ptx::cp_async_commit();
    if (threadIdx.x == 0) works[0] = work;
  }
  if constexpr (!kShort) {  // once per call: every call launches this instance
    check_plan(args.plan, args.documents_q, args.documents_k, args.fault);
    check_visible_end(args.plan, args.visible_end, args.fault);
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
    bool is_first_tile = true;
    Interval<int32_t> visible_any;  // keys visible to at least one row of this warp
    Interval<int32_t> visible_all;  // keys visible to all of them
    for (int32_t tile = 0; !last; ++tile, stage ^= 1) {
      // Wait for this tile, load the next one
      ptx::cp_async_wait<0>();
      __syncthreads();
      if (is_first_tile) {
        tile = work.first_tile;
        load_entry(round + 2);
      }
      last = tile + 1 >= work.end_tile;
      const bool has_next = serpentine(round + 1) < units;
      if (!last) {
        load_next_keys(work, tile + 1, stage ^ 1);
      } else if (has_next) {
        const ForwardWork next = ForwardWork::make<Shape>(args, entries[(round + 1) % 3], kv_head_of(round + 1));
        load_next_keys(next, next.first_tile, stage ^ 1);
        if (threadIdx.x == 0) works[(round + 1) & 1] = next;
      }
      ptx::cp_async_commit();

      const int32_t first_key = tile * Shape::kKeys;
      const int32_t end_key = first_key + Shape::kKeys;
      if (is_first_tile) {
        is_first_tile = false;
        const int last_row =
            warp_row + Shape::kWarpRows < work.rows.valid ? warp_row + Shape::kWarpRows - 1 : work.rows.valid - 1;
        const int32_t first_token = work.rows.token_of(warp_row);
        const int32_t last_token = work.rows.token_of(last_row);
        visible_any =
            warp_row < work.rows.valid ? work.d.visible_keys(first_token, last_token) : Interval<int32_t>{0, 0};
        visible_all =
            warp_row < work.rows.valid ? work.d.keys_visible_to_all(first_token, last_token) : Interval<int32_t>{0, 0};
      }
      // A tile that is hidden from all rows of this warp would change no bit.
      if (first_key < visible_any.end && end_key > visible_any.begin) {
        const bool masked = first_key < visible_all.begin || end_key > visible_all.end;
        const int32_t end = visible_any.end - first_key;
        const auto warp_tile = [&]() -> WarpTile<Shape> {  // in each branch: its addresses hold no registers across
          return {tile_q, tile_k(stage), tile_v(stage), warp_row, first_key, end, masked};
        };
        if (end <= Shape::kKeys / 2) {
          Unit::template step<Unit::kKeyBlocks / 2>(o, state, args, warp_tile(), work.d, work.rows, scale);
        } else {
          Unit::template step<Unit::kKeyBlocks>(o, state, args, warp_tile(), work.d, work.rows, scale);
        }
      }
      // q of the next unit, once this warp has read the last of this one's
      if (last && has_next) {
        __syncwarp();
        load_warp_rows<Shape>(args,
                              ForwardWork::make<Shape>(args, entries[(round + 1) % 3], kv_head_of(round + 1)).rows,
                              tile_q, warp_row);
        ptx::cp_async_commit();
      }
    }
    // Epilogue: out and lse
    if (warp_row < work.rows.valid) finish<T, Shape>(args, work.rows, warp_row + g, state, o, scale, natural_scale);
  }
  ptx::griddepcontrol_wait();
}

template <class T, int kDim, bool kShort, bool kTransform, int kDimV>
void run_forward(const Args& args, cudaStream_t stream, bool overlaps) {
  using Shape = ForwardShape<kDim, kShort, kDimV>;
  static PersistentKernel kernel{
      reinterpret_cast<const void*>(attention_forward_kernel<T, kDim, kShort, kTransform, kDimV>), Shape::kThreads,
      Shape::kShared, "attention_forward_kernel"};
  const int64_t entries = kShort ? args.plan.forward_short_capacity() : args.plan.forward_capacity();
  launch_persistent(kernel, &args, entries * args.num_kv_heads, stream, overlaps);
}

}  // namespace packing_ops::attention::sm80
