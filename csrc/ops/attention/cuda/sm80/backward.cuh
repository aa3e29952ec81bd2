// Backward with mma.sync, for documents of several key tiles. A unit of work is (document, key tile, kv head): it loops
// over the row tiles that attend to its keys and keeps dk and dv in registers. A step has two halves:
//
//   scores  s = q k^T and dp = dout v^T; p and ds go to shared memory
//   sums    dv += p^T dout, dk += ds^T q, and dq = ds k, this key tile's part of dq
//
// dq of a row tile is summed over key tiles in a fixed order (AttentionTiles::start_at_last_row) by a ticket lock
// (dq_ring.cuh), so results are deterministic. Units are claimed in the order of their tickets, so a unit waits only
// for units that already run.
//
// kScoresAhead: scores are computed one step ahead. Between two barriers every warp computes the scores of step i and
// the sums of step i - 1. Half of the warps do the scores first, the other half the sums, so that the exponentials and
// stores of one half overlap the mma of the other. Results have the same bits either way.
#pragma once

#include "core/launch.cuh"
#include "ops/attention/cuda/dq_ring.cuh"
#include "ops/attention/cuda/persistent.cuh"
#include "ops/attention/cuda/sm80/backward_partial_dq.cuh"
#include "ops/attention/cuda/sm80/backward_split_scores.cuh"

namespace packing_ops::attention::sm80 {

template <int kDim, SmemTier kTier, int kDimV>
using SeveralTilesShape = BackwardShape<kDim, backward_keys(kDim, kTier), false, kTier, kDimV>;

template <class T, int kDim, bool kTransform, SmemTier kTier, int kDimV>
__global__ void __launch_bounds__(SeveralTilesShape<kDim, kTier, kDimV>::kThreads)
    attention_backward_kernel(__grid_constant__ const Args args) {
  using Shape = SeveralTilesShape<kDim, kTier, kDimV>;
  using Unit = BackwardUnit<T, Shape, kTransform>;
  constexpr int kKeys = Shape::kKeys;
  const int row_tile = args.plan.tiles.backward_rows;  // kRows, or as many of them as are whole tokens
  // Waiting for a ticket and releasing one each stall their warp for an L2 round trip. With kScoresAhead two different
  // warps do them, neither of which issues loads.
  constexpr int kTicketWaitThread = Shape::kScoresAhead ? Shape::kThreads / 2 : 32;
  constexpr int kTicketReleaseThread = Shape::kScoresAhead ? kTicketWaitThread + 32 : 0;
  extern __shared__ __align__(128) uint8_t shared[];
  const Unit u(ptx::shared_address(shared));
  // In p's shared memory, which is free between units.
  auto* next_unit = reinterpret_cast<volatile int32_t*>(shared + (u.tile_p(0).base - u.base));

  const int warp = threadIdx.x / 32;
  const int key_block = warp % Shape::kKeyWarps;  // this warp's 16 keys; its second block is kKeyBlockStride further on
  const int column_part = warp / Shape::kKeyWarps;
  const int64_t units = static_cast<int64_t>(args.plan.data[PlanView::kBackward]) * args.num_kv_heads;
  const PlanEntry* entries = args.plan.entries[PlanView::kBackward];
  int32_t* work_counter = args.counters;
  int32_t* tickets = args.counters + Args::kWorkCounters;

  ptx::griddepcontrol_launch_dependents();  // backward_single.cuh does not depend on this kernel
  if (threadIdx.x == 0) *next_unit = atomicAdd(work_counter, 1);
  __syncthreads();
  for (int32_t unit = *next_unit; unit < units; unit = *next_unit) {
    const BackwardWork work(args, entries, unit, row_tile, kKeys);
    const PlanEntry& entry = work.entry;
    const int32_t kv_head = work.kv_head;
    const DocumentWithEnds d = document_with_ends(entry, args.plan);
    const int32_t first_key = entry.tile * kKeys;
    const int32_t end_key = first_key + kKeys < d.keys ? first_key + kKeys : d.keys;
    const Interval<int32_t> tiles = row_tiles(d, d.tokens_attending_to(first_key, end_key - 1), args.group, row_tile);

    // Prologue: k and v of the key tile, q and dout of the first row tile
    static_assert(kForkAlignment % kKeys == 0);  // a tile is in one segment of a tree
    const KeySpan keys = {row_without_pages(args, d, first_key), d.keys - first_key};
    load_rows<Shape::kThreads, kKeys>(u.tile_k(), 0, threadIdx.x, args.head_dim, args.k.data,
                                      key_rows(args.k, keys, kv_head));
    load_rows<Shape::kThreads, kKeys>(u.tile_v(), 0, threadIdx.x, args.head_dim_v, args.v.data,
                                      key_rows(args.v, keys, kv_head));
    ptx::cp_async_commit();
    const bool descending = args.plan.tiles.start_at_last_row(d.keys);
    const int32_t tile_step = descending ? -1 : 1;
    const int32_t steps = tiles.end - tiles.begin;
    const int32_t start = descending && steps > 0 ? tiles.end - 1 : tiles.begin;
    PackedRows rows(args, d, kv_head, start, row_tile);
    const PackedRows::Stride stride = rows.stride(tile_step * row_tile);
    uint32_t ring_index = work.ring_index + start;
    if (steps > 0) u.load_rows(args, rows, 0);

    typename Unit::SumsK dk;
    typename Unit::SumsV dv;
    clear(dk);
    clear(dv);
    DqTicket next_ticket;  // of the previous step, to publish once its partial dq is stored or loaded
    const auto publish_ticket = [&] {
      if (threadIdx.x != kTicketReleaseThread || next_ticket.slot < 0) return;
      if (next_ticket.is_first(args.plan.dq_ring)) {
        ptx::store_relaxed(tickets + next_ticket.slot, next_ticket.ticket);  // its next user overwrites the slot
      } else {
        ptx::store_release(tickets + next_ticket.slot, next_ticket.ticket);
      }
    };

    // Scores: p and ds of the row tile `rows`, into slot i.
    const auto compute_scores = [&](int i) {
      const int32_t last_token = rows.last_token();
      const Interval<int32_t> keys = d.visible_keys(rows.begin_token(), last_token);
      const int32_t end_for_all = d.end_of(rows.begin_token());
      // Unsigned, so that the divisions are shifts.
      const int32_t first_tile = static_cast<uint32_t>(keys.begin) / kKeys;
      const int32_t last_tile = static_cast<uint32_t>(keys.end - 1) / kKeys;
      const uint32_t first_visible = keys.begin <= first_key ? 0 : keys.begin - first_key;
      const uint32_t end_visible = (keys.end >= end_key ? end_key : keys.end) - first_key;
      const Interval<int32_t> blocks{static_cast<int32_t>(first_visible / 16),
                                     static_cast<int32_t>((end_visible + 15) / 16)};
      const RowTileVisit visit(
          rows.valid, blocks.begin, blocks.end,
          dq_ticket(ring_index, args.plan.dq_ring, descending ? entry.tile - first_tile : last_tile - entry.tile),
          entry.tile == (descending ? last_tile : first_tile), last_tile == 0);
      if constexpr (Shape::kSplitScores) {
        split_scores<Shape>(u, shared, args, d, rows, i, first_key, blocks);
        return visit;
      }
      // The same as visit.attends_to, without unpacking: the first mma waits for these.
      const bool attends_first_block = key_block >= blocks.begin && key_block < blocks.end;
      const bool attends_second_block =
          key_block + Unit::kKeyBlockStride >= blocks.begin && key_block + Unit::kKeyBlockStride < blocks.end;
      const int first_row = column_part * Shape::kScoreRows;
      if (first_row < rows.valid && (attends_first_block || attends_second_block)) {
        const int tile_key = 16 * (attends_first_block ? key_block : key_block + Unit::kKeyBlockStride);
        const int last_key = 16 * (attends_second_block ? key_block + Unit::kKeyBlockStride : key_block) + 15;
        const bool masked = !d.all_visible(end_for_all, last_token, first_key + tile_key, first_key + last_key);
        const ScoreBlock block{first_row, first_key, tile_key, masked};
        if (attends_first_block && attends_second_block) {
          u.template scores<2>(shared, args, d, rows, i, block);
        } else {
          u.template scores<1>(shared, args, d, rows, i, block);
        }
      }
      return visit;
    };
    // Usually it is this unit's turn to add to dq already.
    const auto wait_for_ticket = [&](const RowTileVisit& visit) {
      if (!visit.is_only()) visit.ticket.wait(tickets);
    };
    // Sums: dk, dv and dq from slot i, whose row tile starts `back` rows from `rows`.
    const auto add_sums = [&](const RowTileVisit& visit, int i, int back) {
      u.add_keys(dk, dv, visit, i, key_block, column_part);
      publish_ticket();  // not earlier: the release would wait for the previous step's stores
      if (Unit::query_row() < visit.rows()) {
        typename Unit::Queries dq;
        u.queries(dq, visit, i);
        float* partial_dq = args.partial_dq + static_cast<int64_t>(visit.ticket.slot) * Shape::kRows * Shape::kDim;
        if (!visit.is_last()) {
          accumulate_partial_dq<Unit>(partial_dq, dq, visit.ticket.is_first(args.plan.dq_ring));
        } else {
          if (!visit.ticket.is_first(args.plan.dq_ring)) load_partial_dq<Unit>(partial_dq, dq);
          Unit::store_queries(args, rows.moved(back, row_tile), dq);
        }
      }
      next_ticket = visit.is_only()   ? DqTicket()
                    : visit.is_last() ? visit.ticket.next_lap(args.plan.dq_ring)
                                      : visit.ticket.next();
    };

    // Main loop over row tiles
    int slot = 0;
    if constexpr (Shape::kScoresAhead) {
      const bool sums_first = warp >= Shape::kWarps / 2;
      const auto barrier = [&] {
        ptx::cp_async_wait<0>();
        ptx::bar_sync<Shape::kThreads>();
      };
      RowTileVisit prev_visit;
      int prev_slot = 0;
      if (steps > 0 && sums_first) barrier();
      for (int32_t i = 0; i < steps + (steps > 0 && !sums_first); ++i) {
        if (!sums_first) {
          barrier();
          if (i + 1 < steps) u.load_rows(args, rows.moved(stride, row_tile), Unit::next_slot(slot));
        }
        RowTileVisit visit;
        if (i < steps) {
          visit = compute_scores(slot);
          if (threadIdx.x == kTicketWaitThread) wait_for_ticket(visit);
        }
        rows = rows.moved(stride, row_tile);
        ring_index += tile_step;
        slot = Unit::next_slot(slot);
        if (sums_first) {
          barrier();
          prev_visit = visit;
        }
        if (sums_first || i > 0) {
          add_sums(prev_visit, prev_slot, (sums_first ? -row_tile : -2 * row_tile) * tile_step);
          prev_slot = Unit::next_slot(prev_slot);
        }
        prev_visit = visit;
      }
    } else {
      for (int32_t i = 0; i < steps; ++i) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (Shape::kStages > 1 && i + 1 < steps) {
          u.load_rows(args, rows.moved(stride, row_tile), Unit::next_slot(slot));
        }
        const RowTileVisit visit = compute_scores(slot);
        if (threadIdx.x == kTicketWaitThread) wait_for_ticket(visit);
        __syncthreads();
        add_sums(visit, slot, 0);
        rows = rows.moved(stride, row_tile);
        ring_index += tile_step;
        slot = Unit::next_slot(slot);
        if constexpr (Shape::kStages == 1) {
          __syncthreads();  // these rows have been read
          if (i + 1 < steps) u.load_rows(args, rows, slot);
        }
      }
    }
    // Epilogue: dk and dv. The next unit is claimed only now: others may wait for the tickets of a claimed unit.
    int32_t next_claimed = 0;
    if (threadIdx.x == 0) next_claimed = atomicAdd(work_counter, 1);
    ptx::cp_async_wait<0>();
    __syncthreads();  // every tile has been read, every partial dq stored
    publish_ticket();
    u.store_keys(args, d, kv_head, {first_key, end_key}, key_block, column_part, dk, dv);
    if (threadIdx.x == 0) *next_unit = next_claimed;
    __syncthreads();
  }
}

template <class T, int kDim, bool kTransform, SmemTier kTier, int kDimV>
void run_backward(const Args& args, cudaStream_t stream) {
  using Shape = SeveralTilesShape<kDim, kTier, kDimV>;
  static PersistentKernel kernel{
      reinterpret_cast<const void*>(attention_backward_kernel<T, kDim, kTransform, kTier, kDimV>), Shape::kThreads,
      Shape::kShared, "attention_backward_kernel"};
  launch_persistent(kernel, &args, args.plan.backward_capacity() * args.num_kv_heads, stream);
}

}  // namespace packing_ops::attention::sm80
