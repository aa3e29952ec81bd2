// The ring of dq's partial sums, PlanView::sum_ring. Units are claimed in the order in which their documents have
// places there, so a place's memory is taken again when whoever had it is done, and memory is for the documents under
// way. Each tile of the ring has a counter: the first place of the lap that it is in, and key tiles that have added to
// the row tile that has it now, which are fewer than the ring's tiles.
#pragma once

#include "core/launch.cuh"
#include "ops/attention/cuda/args.cuh"
#include "ops/attention/cuda/mask.cuh"

namespace packing_ops::attention {

// At a place: the tile where it lies, and what that one's counter is when `before` key tiles have added.
struct Turn {
  int32_t tile = -1;
  uint32_t count = 0;

  __device__ bool first(uint32_t ring) const { return (count & (ring - 1)) == 0; }
  __device__ Turn next() const { return {tile, count + 1}; }
  __device__ Turn next_lap(uint32_t ring) const { return {tile, (count | (ring - 1)) + 1}; }
};
__device__ inline Turn turn_at(uint32_t place, uint32_t ring, int32_t before) {
  return {static_cast<int32_t>(place & (ring - 1)), (place & ~(ring - 1)) + before};
}

// A unit of several key tiles. The kv heads of its document go in parts whose sums the ring can hold.
struct SumUnit {
  PlanEntry entry;
  int32_t kv_head;
  uint32_t place;  // of the document's row tile 0 (if that had sums), for this head

  __device__ SumUnit(const Args& args, const PlanEntry* entries, int32_t unit, int rows, int keys)
      : entry(entries[unit / args.num_kv_heads]), kv_head(unit % args.num_kv_heads) {
    const DocumentView d = document_view(entry, args.plan.window);
    const Range with_sums = tiles_with_sums(d, args.group, rows, keys);
    const uint32_t sums = with_sums.end - with_sums.first;  // of a head
    int32_t heads = args.num_kv_heads;                      // of a part
    while (heads > 1 && sums * heads > args.plan.sum_ring) heads = (heads + 1) / 2;
    if (heads < args.num_kv_heads) {
      const int32_t tiles = static_cast<int32_t>(ceil_div(d.keys, keys));
      const bool ascend = args.plan.tiles.start_at_last_row(d.tokens);
      const int32_t index = (ascend ? entry.tile : tiles - 1 - entry.tile) * args.num_kv_heads + kv_head;
      const int32_t first_head = index / (tiles * heads) * heads;
      heads = heads < args.num_kv_heads - first_head ? heads : args.num_kv_heads - first_head;
      const int32_t in_part = index - first_head * tiles;
      entry.tile = ascend ? in_part / heads : tiles - 1 - in_part / heads;
      kv_head = first_head + in_part % heads;
    }
    place = entry.first_sum + kv_head * sums - with_sums.first;
  }
};

}  // namespace packing_ops::attention
