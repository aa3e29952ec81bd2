// What the backward's first warpgroup does: a lane loads rows and keys and describes steps, a warp loads row_stats, a
// lane waits for turns to add to dq, a lane tells of what was added.
#pragma once

#include "ops/attention/cuda/sm90/backward_shape.cuh"

namespace packing_ops::attention::sm90 {

// A unit as the loader walks it. Row tiles ascend or descend (AttentionTiles::start_at_last_row).
struct UnitWalk {
  BackwardUnit unit;
  int32_t key_tile;
  bool descending;
  Interval<int32_t> tiles;  // of rows
  uint32_t ring_index;      // of row tile 0

  __device__ __forceinline__ UnitWalk(const BackwardArgs& args, int32_t index) {
    const Args& common = args.common;
    const int32_t rows = static_cast<int32_t>(args.tile_tokens.value) * common.group;
    const BackwardWork work(common, common.plan.entries[PlanView::kBackward], index, rows, kKeys);
    unit.d = document_view(work.entry, common.plan.window);
    unit.kv_head = work.kv_head;
    unit.first_key = work.entry.tile * kKeys;
    key_tile = work.entry.tile;
    ring_index = work.ring_index;
    const DocumentView& d = unit.d;
    const int32_t end_key = unit.first_key + kKeys < d.keys ? unit.first_key + kKeys : d.keys;
    const Interval<int32_t> tokens = d.tokens_attending_to(unit.first_key, end_key - 1);
    tiles.begin = static_cast<int32_t>(args.tile_tokens.quotient(tokens.begin));
    tiles.end = tokens.empty() ? tiles.begin : static_cast<int32_t>(args.tile_tokens.quotient(tokens.end - 1)) + 1;
    descending = common.plan.tiles.start_at_last_row(d.tokens);
  }

  // Row tile number i of the walk.
  __device__ __forceinline__ BackwardTile tile(const BackwardArgs& args, int32_t i) const {
    const DocumentView& d = unit.d;
    const int32_t tokens = static_cast<int32_t>(args.tile_tokens.value);
    if (i >= tiles.end - tiles.begin) return {d.tokens, 0, {}, 0, DqAction::kNone};
    const int32_t index = descending ? tiles.end - 1 - i : tiles.begin + i;
    BackwardTile t;
    t.token = index * tokens;
    const int32_t end = t.token + tokens < d.tokens ? t.token + tokens : d.tokens;
    t.rows = (end - t.token) * args.common.group;
    const Interval<int32_t> keys = d.visible_keys(t.token, end - 1);
    const int32_t first = static_cast<uint32_t>(keys.begin) / kKeys;
    const int32_t last = static_cast<uint32_t>(keys.end - 1) / kKeys;
    const uint32_t ring = args.common.plan.dq_ring;
    const DqTicket ticket = dq_ticket(ring_index + index, ring, descending ? key_tile - first : last - key_tile);
    const bool is_last = key_tile == (descending ? last : first);
    t.ticket = last == 0 ? DqTicket() : ticket;
    t.next_ticket = (is_last ? ticket.next_lap(ring) : ticket.next()).ticket;
    const bool is_first = last == 0 || ticket.is_first(ring);
    t.action = is_last ? (is_first ? DqAction::kStore : DqAction::kFinish)
                       : (is_first ? DqAction::kPut : DqAction::kAdd);
    return t;
  }

  // Whether a row of the tile does not see a key of warpgroup w's.
  __device__ __forceinline__ bool masked(const BackwardArgs& args, const BackwardTile& t, int w) const {
    const int32_t tokens = static_cast<int32_t>(args.tile_tokens.value);
    const int32_t end = t.token + tokens < unit.d.tokens ? t.token + tokens : unit.d.tokens;
    const int32_t key = unit.first_key + w * (kKeys / 2);
    return t.action != DqAction::kNone && !unit.d.all_visible(t.token, end - 1, key, key + kKeys / 2 - 1);
  }
};

template <class Shape>
__device__ __forceinline__ void load_units(const BackwardArgs& args, BackwardBarriers<Shape>& shared, uint32_t base) {
  const Args& common = args.common;
  const int32_t units = common.plan.data[PlanView::kBackward] * common.num_kv_heads;
  RingPlace<kUnitsAhead> kv;
  RingPlace<kRowStages> q;
  RingPlace<kStepsKnown> step;
  int32_t index = atomicAdd(common.counters, 1);
  while (index < units) {
    const UnitWalk walk(args, index);
    const BackwardUnit& unit = walk.unit;
    const int32_t steps = (walk.tiles.end - walk.tiles.begin + Shape::kTiles - 1) / Shape::kTiles;
    const DocumentTokens keys(unit.d.start_k, unit.d.keys);
    const DocumentTokens rows(unit.d.start_q, unit.d.tokens);
    ptx::mbarrier_wait(&shared.kv_empty[kv.stage], kv.odd ^ 1);
    shared.units[kv.stage] = unit;
    shared.units[kv.stage].steps = steps;
    ptx::mbarrier_arrive_expect_tx(&shared.kv_full[kv.stage], 2 * Shape::kTileK);
#pragma unroll
    for (int panel = 0; panel < Shape::kPanels; ++panel) {
      const ptx::BoxStart start = {64 * panel, keys.before_end + unit.first_key, unit.kv_head, keys.to_end, kMapTokens};
      ptx::load_box(Shape::tile_k(base, kv.stage) + panel * Shape::kPanelK, args.k, start, &shared.kv_full[kv.stage]);
      ptx::load_box(Shape::tile_v(base, kv.stage) + panel * Shape::kPanelK, args.v, start, &shared.kv_full[kv.stage]);
    }
    kv.next();
    // The next unit is claimed with this one's last rows: others may wait for the tickets of a claimed unit.
    if (steps == 0) index = atomicAdd(common.counters, 1);
#pragma unroll 1
    for (int32_t i = 0; i < steps; ++i) {
      if (i + 1 == steps) index = atomicAdd(common.counters, 1);
      ptx::mbarrier_wait(&shared.told[step.stage], step.odd ^ 1);
      BackwardStep<Shape>& description = shared.steps[step.stage];
      uint32_t masked = 0;
#pragma unroll
      for (int r = 0; r < Shape::kTiles; ++r) {
        const BackwardTile tile = walk.tile(args, Shape::kTiles * i + r);
        for (int w = 0; w < 2; ++w) masked |= walk.masked(args, tile, w) ? 1u << w : 0;
        description.tiles[r] = tile;
      }
      description.start_q = static_cast<int32_t>(unit.d.start_q);
      description.first_head = unit.kv_head * common.group;
      description.masked = masked;
      description.exists = true;
      ptx::mbarrier_wait(&shared.q_empty[q.stage], q.odd ^ 1);
      ptx::mbarrier_arrive(&shared.described[step.stage]);
      uint64_t* full = &shared.q_full[q.stage];
      ptx::mbarrier_arrive_expect_tx(
          full, 2 * Shape::kTiles * Shape::kPanels * 128 * static_cast<int>(args.tile_tokens.value) * common.group);
#pragma unroll
      for (int r = 0; r < Shape::kTiles; ++r) {
#pragma unroll
        for (int panel = 0; panel < Shape::kPanels; ++panel) {
          const ptx::BoxStart start = {64 * panel, unit.kv_head * common.group,
                                       rows.before_end + description.tiles[r].token, rows.to_end, kMapTokens};
          const int place = panel * Shape::kPanelQ + r * kTileRows * 128;
          ptx::load_box(Shape::tile_q(base, q.stage) + place, args.q, start, full);
          ptx::load_box(Shape::tile_dout(base, q.stage) + place, args.dout, start, full);
        }
      }
      q.next();
      step.next();
    }
  }
  ptx::mbarrier_wait(&shared.told[step.stage], step.odd ^ 1);
  shared.steps[step.stage].exists = false;
  ptx::mbarrier_arrive(&shared.described[step.stage]);
  ptx::mbarrier_wait(&shared.kv_empty[kv.stage], kv.odd ^ 1);
  shared.units[kv.stage].steps = -1;
  ptx::mbarrier_arrive(&shared.kv_full[kv.stage]);
}

// f(step, its place) for each of the block's steps, once it is described.
template <class Shape, class F>
__device__ __forceinline__ void for_each_step(BackwardBarriers<Shape>& shared, const F& f) {
  RingPlace<kStepsKnown> place;
  while (true) {
    ptx::mbarrier_wait(&shared.described[place.stage], place.odd);
    const BackwardStep<Shape>& step = shared.steps[place.stage];
    if (!step.exists) return;
    f(step, place);
    place.next();
  }
}

// By a warp: zeros where there is no row.
template <class Shape>
__device__ __forceinline__ void load_row_stats(const BackwardArgs& args, BackwardBarriers<Shape>& shared) {
  const Args& common = args.common;
  RingPlace<kRowStages> q;
  for_each_step(shared, [&](const BackwardStep<Shape>& step, const RingPlace<kStepsKnown>&) {
#pragma unroll
    for (int i = 0; i < Shape::kRows / 32; ++i) {
      const BackwardTile& tile = step.tiles[i / 2];
      const int32_t row = static_cast<int32_t>(threadIdx.x & 31) + i % 2 * 32;
      const bool valid = row < tile.rows;
      const int32_t token = static_cast<int32_t>(common.group_size.quotient(row));
      const int64_t at = static_cast<int64_t>(step.start_q + tile.token + token) * common.num_heads + step.first_head +
                         row - token * common.group;
      const float* from = reinterpret_cast<const float*>(common.row_stats + (valid ? at : 0));
      const int32_t to = i / 2 * kTileRows + row;
      ptx::cp_async_4(ptx::shared_address(&shared.lse[q.stage][to]), from, valid);
      ptx::cp_async_4(ptx::shared_address(&shared.row_sum[q.stage][to]), from + 1, valid);
    }
    ptx::mbarrier_arrive_after_cp_async(&shared.q_full[q.stage]);
    q.next();
  });
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
}

template <class Shape>
__device__ __forceinline__ void wait_for_turns(const BackwardArgs& args, BackwardBarriers<Shape>& shared) {
  const int32_t* tickets = args.common.counters + Args::kWorkCounters;
  for_each_step(shared, [&](const BackwardStep<Shape>& step, const RingPlace<kStepsKnown>& place) {
#pragma unroll
    for (int r = 0; r < Shape::kTiles; ++r) {
      const DqTicket ticket = step.tiles[r].ticket;
      if (ticket.slot < 0) continue;
      while (static_cast<uint32_t>(ptx::load_acquire(tickets + ticket.slot)) != ticket.ticket) {
      }
    }
    ptx::mbarrier_arrive(&shared.turn[place.stage]);
  });
}

template <class Shape>
__device__ __forceinline__ void tell_of_sums(const BackwardArgs& args, BackwardBarriers<Shape>& shared) {
  int32_t* tickets = args.common.counters + Args::kWorkCounters;
  for_each_step(shared, [&](const BackwardStep<Shape>& step, const RingPlace<kStepsKnown>& place) {
    ptx::mbarrier_wait(&shared.sent[place.stage], place.odd);
#pragma unroll
    for (int r = 0; r < Shape::kTiles; ++r) {
      const BackwardTile& tile = step.tiles[r];
      if (tile.ticket.slot < 0) continue;
      if (tile.action == DqAction::kPut || tile.action == DqAction::kAdd) {
        ptx::store_release(tickets + tile.ticket.slot, tile.next_ticket);
      } else {  // the slot's next user overwrites it
        ptx::store_relaxed(tickets + tile.ticket.slot, tile.next_ticket);
      }
    }
    ptx::mbarrier_arrive(&shared.told[place.stage]);
  });
}

}  // namespace packing_ops::attention::sm90
