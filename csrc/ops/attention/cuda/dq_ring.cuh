// The ring buffer of partial dq (PlanView::dq_ring) and its ticket lock. In a document of several key tiles, dq of a
// row tile is a sum over key tiles in a fixed order: each key tile waits for its ticket of the slot, adds, and
// publishes the next ticket. The first one stores instead of adding, the last one writes dq. Units are claimed in the
// order of their documents' ring indices, so the unit that is waited for always runs, and a slot is used again only
// when its row tile is done. A ticket is the slot's lap (its first ring index) plus the number of key tiles that have
// added, which is smaller than the ring.
#pragma once

#include "core/launch.cuh"
#include "core/ptx/mma.cuh"
#include "ops/attention/cuda/args.cuh"
#include "ops/attention/cuda/mask.cuh"

namespace packing_ops::attention {

// row_tiles of tiles that begin at a whole token, without divisions of 64 bits, which take many registers.
__device__ inline Interval<int32_t> row_tiles(const DocumentView& d, Interval<int32_t> tokens, int32_t,
                                              const Divisor& tile_tokens) {
  const int32_t before = d.queries_before();
  const int32_t begin = static_cast<int32_t>(tile_tokens.quotient(before + tokens.begin));
  if (tokens.empty()) return {begin, begin};
  return {begin, static_cast<int32_t>(tile_tokens.quotient(before + tokens.end - 1)) + 1};
}

// A slot of the ring, and its ticket when it is this unit's turn.
struct DqTicket {
  int32_t slot = -1;
  uint32_t ticket = 0;

  __device__ bool is_first(uint32_t ring) const { return (ticket & (ring - 1)) == 0; }
  // Spins until it is this unit's turn.
  __device__ void wait(const int32_t* tickets) const {
    while (static_cast<uint32_t>(ptx::load_acquire(tickets + slot)) != ticket) {
    }
  }
  __device__ DqTicket next() const { return {slot, ticket + 1}; }
  __device__ DqTicket next_lap(uint32_t ring) const { return {slot, (ticket | (ring - 1)) + 1}; }
};
// Of ring index `index`, when `key_tiles` key tiles have added.
__device__ inline DqTicket dq_ticket(uint32_t index, uint32_t ring, int32_t key_tiles) {
  return {static_cast<int32_t>(index & (ring - 1)), (index & ~(ring - 1)) + key_tiles};
}

// A unit of a document of several key tiles. Its kv heads are processed in parts of at most max_heads, whose partial dq
// the ring can hold.
struct BackwardWork {
  PlanEntry entry;
  int32_t kv_head;
  uint32_t ring_index;  // of row tile 0 (as if it had partial dq), for this head

  // rows: of a row tile, or as a Divisor its tokens.
  template <class Rows>
  __device__ BackwardWork(const Args& args, const PlanEntry* entries, int32_t unit, const Rows& rows, int keys,
                          int32_t max_heads = INT32_MAX)
      : entry(entries[unit / args.num_kv_heads]), kv_head(unit % args.num_kv_heads) {
    const DocumentWithEnds d = document_with_ends(entry, args.plan);
    const Interval<int32_t> summed = row_tiles_with_partial_dq(d, args.group, rows, keys);
    const uint32_t sums = summed.size();                                            // row tiles of a head
    int32_t heads = args.num_kv_heads < max_heads ? args.num_kv_heads : max_heads;  // of a part
    while (heads > 1 && sums * heads > args.plan.dq_ring) heads = (heads + 1) / 2;
    if (heads < args.num_kv_heads) {
      const int32_t tiles = static_cast<int32_t>(ceil_div(d.keys, keys));
      const bool ascend = args.plan.tiles.start_at_last_row(d.keys);
      const int32_t index = (ascend ? entry.tile : tiles - 1 - entry.tile) * args.num_kv_heads + kv_head;
      const int32_t first_head = index / (tiles * heads) * heads;
      heads = heads < args.num_kv_heads - first_head ? heads : args.num_kv_heads - first_head;
      const int32_t in_part = index - first_head * tiles;
      entry.tile = ascend ? in_part / heads : tiles - 1 - in_part / heads;
      kv_head = first_head + in_part % heads;
    }
    ring_index = entry.first_ring_index + kv_head * sums - summed.begin;
  }
};

}  // namespace packing_ops::attention
