// What the backward's producer warpgroup does: a lane loads rows and keys and describes steps, a warp loads row_stats,
// and two warps alternate at the steps' dq: one lane waits for its ticket, adds it to the ring and publishes the next.
#pragma once

#include "ops/attention/cuda/pages.cuh"
#include "ops/attention/cuda/sm90/backward_shape.cuh"

namespace packing_ops::attention::sm90 {

template <class Shape>
__device__ __forceinline__ BackwardUnit describe_unit(const BackwardArgs& args, int32_t index) {
  const Args& common = args.common;
  const BackwardWork work(common, common.plan.entries[PlanView::kBackward], index, args.tile_tokens, Shape::kUnitKeys,
                          wgmma_backward_heads(common.group));
  BackwardUnit unit;
  const DocumentWithEnds d = document_with_ends(work.entry, common.plan);
  unit.d = d;
  unit.kv_head = work.kv_head;
  unit.first_key = work.entry.tile * Shape::kUnitKeys;
  unit.ring_index = work.ring_index;
  const int32_t last_key = unit.first_key + Shape::kUnitKeys;
  const int32_t end_key = last_key < unit.d.keys ? last_key : unit.d.keys;
  unit.tiles = row_tiles(d, d.tokens_attending_to(unit.first_key, end_key - 1), common.group, args.tile_tokens);
  unit.steps = (unit.tiles.size() + Shape::kTiles - 1) / Shape::kTiles;
  return unit;
}

// The i-th row tile of a unit. They ascend or descend (AttentionTiles::start_at_last_row).
__device__ __forceinline__ int32_t tile_index(const BackwardUnit& unit, int32_t i, bool descending) {
  return descending ? unit.tiles.end - 1 - i : unit.tiles.begin + i;
}

// DocumentWithEnds::end_of a row tile's first and last token.
struct TileEnds {
  int32_t first = 0;
  int32_t last = 0;
};

__device__ __forceinline__ TileEnds load_ends(const BackwardArgs& args, const BackwardUnit& unit, int32_t i) {
  if (i >= unit.tiles.size()) return {};
  const DocumentWithEnds d{unit.d, args.common.plan.ends};
  const int32_t tokens = static_cast<int32_t>(args.tile_tokens.value);
  const int32_t index = tile_index(unit, i, args.common.plan.tiles.start_at_last_row(d.keys));
  const int32_t first = index * tokens - d.queries_before();
  const int32_t end = first + tokens;
  return {d.end_of(first < 0 ? 0 : first), d.end_of((end < d.tokens ? end : d.tokens) - 1)};
}

template <class Shape>
__device__ __forceinline__ BackwardTile describe_tile(const BackwardArgs& args, const BackwardUnit& unit, int32_t i,
                                                      const TileEnds& ends) {
  const DocumentView& d = unit.d;
  const int32_t tokens = static_cast<int32_t>(args.tile_tokens.value);
  if (i >= unit.tiles.size()) return {d.tokens, 0, {}, 0, DqAction::kNone};
  const bool descending = args.common.plan.tiles.start_at_last_row(d.keys);
  const int32_t index = tile_index(unit, i, descending);
  const int32_t key_tile = unit.first_key / Shape::kUnitKeys;
  BackwardTile t;
  t.token = index * tokens - d.queries_before();
  const int32_t end = t.token + tokens < d.tokens ? t.token + tokens : d.tokens;
  t.rows = (end - t.token) * args.common.group;
  const Interval<int32_t> keys = d.keys_before(ends.last, t.token < 0 ? 0 : t.token);
  const int32_t first = static_cast<uint32_t>(keys.begin) / Shape::kUnitKeys;
  const int32_t last = static_cast<uint32_t>(keys.end - 1) / Shape::kUnitKeys;
  const uint32_t ring = args.common.plan.dq_ring;
  const DqTicket ticket = dq_ticket(unit.ring_index + index, ring, descending ? key_tile - first : last - key_tile);
  const bool is_last = key_tile == (descending ? last : first);
  t.ticket = last == 0 ? DqTicket() : ticket;
  t.next_ticket = (is_last ? ticket.next_lap(ring) : ticket.next()).ticket;
  const bool is_first = last == 0 || ticket.is_first(ring);
  t.action = is_last ? (is_first ? DqAction::kStore : DqAction::kFinish) : (is_first ? DqAction::kPut : DqAction::kAdd);
  return t;
}

// Bit w: some row of the tile does not see some of the unit's w-th kMaskedKeys keys.
template <class Shape>
__device__ __forceinline__ uint32_t masked(const BackwardArgs& args, const BackwardUnit& unit, int32_t token,
                                           const TileEnds& ends) {
  const int32_t next = token + static_cast<int32_t>(args.tile_tokens.value);
  const int32_t last = (next < unit.d.tokens ? next : unit.d.tokens) - 1;
  uint32_t bits = 0;
#pragma unroll
  for (int w = 0; w < Shape::kUnitKeys / Shape::kMaskedKeys; ++w) {
    const int32_t key = unit.first_key + w * Shape::kMaskedKeys;
    if (!unit.d.all_visible(ends.first, last, key, key + Shape::kMaskedKeys - 1)) bits |= 1u << w;
  }
  return bits;
}

template <class Shape>
__device__ __forceinline__ void load_keys(const BackwardArgs& args, const BackwardUnit& unit, uint32_t tile_k,
                                          uint64_t* full) {
  ptx::mbarrier_arrive_expect_tx(full, Shape::kTileK + Shape::kTileV);
  const int copied_keys = Shape::copied_keys(args.common);
#pragma unroll 1
  for (int i = 0; i < Shape::kUnitKeys; i += copied_keys) {
    const int32_t key = unit.first_key + i;
    const DocumentTokens tokens(row_without_pages(args.common, unit.d, key) - key, unit.d.keys);
    const uint32_t box = tile_k + i * 128;
#pragma unroll
    for (int panel = 0; panel < Shape::kPanels; ++panel) {
      const ptx::TmaCoords start = {64 * panel, tokens.before_end + key, unit.kv_head, tokens.to_end, kMapTokens};
      ptx::tma_load(box + panel * Shape::kPanelK, args.k, start, full);
      if (panel < Shape::kPanelsV) {
        ptx::tma_load(box + Shape::kTileK + panel * Shape::kPanelK, args.v, start, full);
      }
    }
  }
}

// q or dout of a step.
struct RowsCopy {
  const CUtensorMap& map;
  const CUtensorMap& token_map;
  uint32_t tile;
  uint64_t* full;
};

// Of a row tile that begins before its document, at a negative token: tokens before the first are outside of the map,
// which makes them zeros.
template <class Shape, int kPanels>
__device__ __forceinline__ void load_token_by_token(const BackwardArgs& args, const DocumentTokens& tokens,
                                                    int32_t first_head, int32_t token, RowsCopy to) {
  const int32_t end = token + static_cast<int32_t>(args.tile_tokens.value);
#pragma unroll 1
  for (; token < end; ++token, to.tile += args.common.group * 128) {
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel) {
      const ptx::TmaCoords start = {64 * panel, first_head, token < 0 ? kMapTokens : tokens.before_end + token,
                                    tokens.to_end, kMapTokens};
      ptx::tma_load(to.tile + panel * Shape::kPanelQ, to.token_map, start, to.full);
    }
  }
}

// Bytes of as many panels of a step's rows.
template <class Shape>
__device__ __forceinline__ void expect_rows(const BackwardArgs& args, uint64_t* full, int panels) {
  const int bytes = Shape::kTiles * panels * 128;
  ptx::mbarrier_arrive_expect_tx(full, bytes * static_cast<int>(args.tile_tokens.value) * args.common.group);
}

template <class Shape, int kPanels>
__device__ __forceinline__ void load_rows(const BackwardArgs& args, const DocumentView& d,
                                          const BackwardStep<Shape>& step, const RowsCopy& to) {
  const DocumentTokens tokens(d.start_q, d.tokens);
#pragma unroll
  for (int r = 0; r < Shape::kTiles; ++r) {
    const int32_t token = step.tiles[r].token;
    const RowsCopy tile{to.map, to.token_map, to.tile + r * kTileRows * 128, to.full};
    if (token < 0) {
      load_token_by_token<Shape, kPanels>(args, tokens, step.first_head, token, tile);
      continue;
    }
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const ptx::TmaCoords start = {64 * panel, step.first_head, tokens.before_end + token, tokens.to_end, kMapTokens};
      ptx::tma_load(tile.tile + panel * Shape::kPanelQ, tile.map, start, tile.full);
    }
  }
}

// A unit is read back from shared memory: there are few registers here.
template <class Shape>
__device__ __forceinline__ void load_units(const BackwardArgs& args, BackwardBarriers<Shape>& shared, uint32_t base) {
  const Args& common = args.common;
  const int32_t units = common.plan.data[PlanView::kBackward] * common.num_kv_heads;
  uint32_t unit_idx = 0;
  uint32_t step_idx = 0;
  int32_t index = atomicAdd(common.counters, 1);
  const auto wait_for_keys = [&] {
    ptx::mbarrier_wait(&shared.kv_empty[stage_of(unit_idx, kKvStages)], parity_of(unit_idx, kKvStages) ^ 1);
  };
  const auto free_step = [&]() -> BackwardStep<Shape>& {
    const int stage = stage_of(step_idx, kStepStages);
    ptx::mbarrier_wait(&shared.dq_ticket_published[stage], parity_of(step_idx, kStepStages) ^ 1);
    return shared.steps[stage];
  };
  while (index < units) {
    // Describe unit, load K and V
    BackwardUnit& unit = shared.units[stage_of(unit_idx, kUnitStages)];
    unit = describe_unit<Shape>(args, index);
    wait_for_keys();
    const int stage = stage_of(unit_idx, kKvStages);
    load_keys<Shape>(args, unit, Shape::tile_k(base, stage), &shared.kv_full[stage]);
    ++unit_idx;
    // Main loop over steps. The next unit is claimed with this one's last rows: others may wait for the tickets of a
    // claimed unit.
    int32_t steps_left = unit.steps;
    if (steps_left == 0) index = atomicAdd(common.counters, 1);
#pragma unroll 1
    for (; steps_left > 0; --steps_left) {
      if (steps_left == 1) index = atomicAdd(common.counters, 1);
      TileEnds ends[Shape::kTiles];  // loaded while the slot is still in use
#pragma unroll
      for (int r = 0; r < Shape::kTiles; ++r) {
        ends[r] = load_ends(args, unit, Shape::kTiles * (unit.steps - steps_left) + r);
      }
      // Describe step
      BackwardStep<Shape>& step = free_step();
      uint32_t hidden = 0;
#pragma unroll
      for (int r = 0; r < Shape::kTiles; ++r) {
        const BackwardTile tile =
            describe_tile<Shape>(args, unit, Shape::kTiles * (unit.steps - steps_left) + r, ends[r]);
        if (tile.action != DqAction::kNone) hidden |= masked<Shape>(args, unit, tile.token, ends[r]);
        step.tiles[r] = tile;
      }
      step.start_q = static_cast<int32_t>(unit.d.start_q);
      step.first_head = unit.kv_head * common.group;
      step.opens = steps_left == unit.steps ? stage_of(unit_idx - 1, kUnitStages) : -1;
      step.masked = hidden;
      step.exists = true;
      // Load Q and dO
      const int row_stage = stage_of(step_idx, kRowStages);
      ptx::mbarrier_wait(&shared.q_empty[row_stage], parity_of(step_idx, kRowStages) ^ 1);
      ptx::mbarrier_arrive(&shared.described[stage_of(step_idx, kStepStages)]);
      uint64_t* full = &shared.q_full[row_stage];
      expect_rows<Shape>(args, full, Shape::kPanels + (Shape::kByPanels ? 0 : Shape::kPanelsV));
      load_rows<Shape, Shape::kPanels>(args, unit.d, step,
                                       {args.q, args.q_token, Shape::tile_q(base, row_stage), full});
      if constexpr (!Shape::kByPanels) {
        load_rows<Shape, Shape::kPanelsV>(args, unit.d, step,
                                          {args.dout, args.dout_token, Shape::tile_dout(base, row_stage), full});
      }
      ++step_idx;
    }
  }
  // Announce the end, to each warp that sends dq
  static_assert(kDqSenders <= kStepStages);
  for (int i = 0; i < kDqSenders; ++i, ++step_idx) {
    free_step().exists = false;
    ptx::mbarrier_arrive(&shared.described[stage_of(step_idx, kStepStages)]);
  }
  wait_for_keys();
  shared.units[stage_of(unit_idx, kUnitStages)].steps = -1;
  ptx::mbarrier_arrive(&shared.kv_full[stage_of(unit_idx, kKvStages)]);
}

// f(step, its number) for the block's steps from `first` on, every `stride`-th of them, once it is described.
template <class Shape, class F>
__device__ __forceinline__ void for_each_step(BackwardBarriers<Shape>& shared, uint32_t first, uint32_t stride,
                                              const F& f) {
  for (uint32_t step_idx = first;; step_idx += stride) {
    const int stage = stage_of(step_idx, kStepStages);
    ptx::mbarrier_wait(&shared.described[stage], parity_of(step_idx, kStepStages));
    const BackwardStep<Shape>& step = shared.steps[stage];
    if (!step.exists) return;
    f(step, step_idx);
  }
}

// By a warp. The units before have left `first_tokens`, as they have left their keys.
template <int kUnitKeys>
__device__ __forceinline__ void load_first_tokens(const VisibleEnd& ends, const BackwardUnit& unit,
                                                  int32_t (&first_tokens)[kUnitKeys]) {
  static_assert(kKvStages == 1);
#pragma unroll
  for (int i = threadIdx.x & 31; i < kUnitKeys; i += 32) {
    const int32_t key = unit.first_key + i;
    const bool exists = key < unit.d.keys;
    const int32_t* from = ends.first_token + (exists ? unit.d.start_k + key : 0);
    ptx::cp_async_4(ptx::shared_address(&first_tokens[i]), from, exists);
  }
}

// By a warp: zeros for missing rows. By panels its first lane loads dout too, which has a stage less than q.
template <class Shape>
__device__ __forceinline__ void load_row_stats(const BackwardArgs& args, BackwardBarriers<Shape>& shared,
                                               uint32_t base) {
  const Args& common = args.common;
  int32_t unit = 0;  // in `units`, which keep it until consumers have left its last step
  for_each_step(shared, 0, 1, [&](const BackwardStep<Shape>& step, uint32_t step_idx) {
    const int stage = stage_of(step_idx, kRowStages);
    if (step.opens >= 0 && common.plan.ends.first_token != nullptr) {
      load_first_tokens(common.plan.ends, shared.units[step.opens], shared.first_tokens);
    }
#pragma unroll
    for (int i = 0; i < Shape::kRows / 32; ++i) {
      const BackwardTile& tile = step.tiles[i / 2];
      const int32_t row = static_cast<int32_t>(threadIdx.x & 31) + i % 2 * 32;
      const int32_t token = static_cast<int32_t>(common.group_size.quotient(row));
      const bool valid = row < tile.rows && tile.token + token >= 0;
      const int64_t at = static_cast<int64_t>(step.start_q + tile.token + token) * common.num_heads + step.first_head +
                         row - token * common.group;
      const float* from = reinterpret_cast<const float*>(common.row_stats + (valid ? at : 0));
      const int32_t to = i / 2 * kTileRows + row;
      ptx::cp_async_4(ptx::shared_address(&shared.lse[stage][to]), from, valid);
      ptx::cp_async_4(ptx::shared_address(&shared.row_sum[stage][to]), from + 1, valid);
    }
    ptx::cp_async_mbarrier_arrive(&shared.q_full[stage]);
    if constexpr (Shape::kByPanels) {
      if (step.opens >= 0) unit = step.opens;
      ptx::mbarrier_wait(&shared.dout_empty, parity_of(step_idx, 1) ^ 1);
      if ((threadIdx.x & 31) == 0) {
        expect_rows<Shape>(args, &shared.dout_full, Shape::kPanelsV);
        load_rows<Shape, Shape::kPanelsV>(args, shared.units[unit].d, step,
                                          {args.dout, args.dout_token, Shape::tile_dout(base, 0), &shared.dout_full});
      }
    }
  });
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
}

// Rows of q and dout that no load writes: zeros, which add nothing. By warps `first`, `first + step` and so on, of
// tiles of 64 rows and columns.
__device__ __forceinline__ void zero_unused_rows(const BackwardArgs& args, uint32_t tile_q, int tiles, int first,
                                                 int step) {
  const int used = static_cast<int>(args.tile_tokens.value) * args.common.group;
  if (used == kTileRows) return;
  for (int tile = first; tile < tiles; tile += step) {
    for (int row = used; row < kTileRows; ++row) {
      ptx::store_shared(tile_q + (tile * kTileRows + row) * 128 + (threadIdx.x & 31) * 4, 0u);
    }
  }
  ptx::fence_proxy_async();
}

// Adds dq that other key tiles add to as well to the ring, in the order of tickets, and publishes the next ticket once
// it is there. By one lane of a warp for every kDqSenders-th step; by columns by the warp, which also zeroes the rows
// of q and dout that dq has overwritten.
template <class Shape>
__device__ __forceinline__ void send_dq(const BackwardArgs& args, BackwardBarriers<Shape>& shared, uint32_t base,
                                        int sender) {
  int32_t* tickets = args.common.counters + Args::kWorkCounters;
  const bool sends = (threadIdx.x & 31) == 0;
  for_each_step(shared, sender, kDqSenders, [&](const BackwardStep<Shape>& step, uint32_t step_idx) {
    const int slot = stage_of(step_idx, kStepStages);
    const int stage = stage_of(step_idx, Shape::kDqStages);
    // Wait ticket and dQ
    if (sends) {
#pragma unroll
      for (int r = 0; r < Shape::kTiles; ++r) {
        const DqTicket ticket = step.tiles[r].ticket;
        if (ticket.slot >= 0) ticket.wait(tickets);
      }
      ptx::mbarrier_arrive(&shared.dq_ticket_ready[slot]);
    }
    // Done already; synccheck asks that somebody waits for each phase.
    ptx::mbarrier_wait(&shared.dq_ticket_ready[slot], parity_of(step_idx, kStepStages));
    ptx::mbarrier_wait(&shared.dq_full[sender], parity_of(step_idx, kDqSenders));
    // Add to the ring
    if (sends) {
      ptx::fence_proxy_async_global();
#pragma unroll
      for (int r = 0; r < Shape::kTiles; ++r) {
        const BackwardTile& tile = step.tiles[r];
        float* sums = args.common.partial_dq + static_cast<int64_t>(tile.ticket.slot) * Shape::kRingFloats;
        const uint32_t from = Shape::tile_dq(base, stage) + r * Shape::kRingFloats * 4;
        if (tile.action == DqAction::kAdd) ptx::bulk_reduce_add(sums, from, Shape::kRingFloats * 4);
        if (tile.action == DqAction::kPut) ptx::bulk_store(sums, from, Shape::kRingFloats * 4);
      }
      ptx::bulk_commit_group();
      ptx::bulk_wait_group_read();
    }
    // Restore zeros
    if constexpr (Shape::kByColumns) {
      __syncwarp();
      zero_unused_rows(args, Shape::tile_q(base, stage), 2 * Shape::kPanels, 0, 1);
      __syncwarp();
    }
    // Release dQ, publish ticket
    if (sends) {
      ptx::mbarrier_arrive(Shape::kByColumns ? &shared.q_empty[stage] : &shared.dq_empty[stage]);
      ptx::bulk_wait_group();
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
    }
    if constexpr (Shape::kByColumns) __syncwarp();  // all have read the step's description
    if (sends) ptx::mbarrier_arrive(&shared.dq_ticket_published[slot]);
  });
}

}  // namespace packing_ops::attention::sm90
