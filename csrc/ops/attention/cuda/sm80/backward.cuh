// Backward on mma.sync. A unit is (document, tile of keys, kv head): it goes once over the packed rows that see its
// keys and keeps dk and dv in registers through the whole group. A step takes a row tile: s = q k^T and dp = dout v^T
// with rows across and keys along the warps, p and ds through shared memory, then dv += p^T dout, dk += ds^T q and dq =
// ds k. dq of a row tile adds up over the key tiles that it sees, in an order that the document's length decides
// (start_at_last_row): the first in turn stores, the last one writes dq, and a counter for each row tile says whose
// turn it is (sum_ring.cuh). Units are claimed in the plan's order, where key tiles have the same order, so the one
// that is waited for is always under way.
//
// With room for it (kAhead) the scores are a step ahead: between two barriers every warp makes the scores of step i and
// the sums of step i - 1, half of the warps in this order and half in the other, so that one half's exponentials and
// stores run beside the other half's products. The bits are the same.
#pragma once

#include "core/launch.cuh"
#include "ops/attention/cuda/dq_ring.cuh"
#include "ops/attention/cuda/persistent.cuh"
#include "ops/attention/cuda/sm80/backward_unit.cuh"

namespace packing_ops::attention::sm80 {

template <int kDim, Room kRoom>
using SeveralTilesShape = BackwardShape<kDim, backward_keys(kDim, kRoom), false, kRoom>;

template <class T, int kDim, bool kTransform, Room kRoom>
__global__ void __launch_bounds__(SeveralTilesShape<kDim, kRoom>::kThreads)
    attention_backward_kernel(__grid_constant__ const Args args) {
  using Shape = SeveralTilesShape<kDim, kRoom>;
  using Unit = BackwardUnit<T, Shape, kTransform>;
  constexpr int kRows = Shape::kRows;
  constexpr int kKeys = Shape::kKeys;
  // One thread waits for turns and one tells of finished sums. Either is a trip to L2 for which its whole warp stands
  // still, so with kAhead they are of two warps of the half that loads nothing.
  constexpr int kTurnThread = Shape::kAhead ? Shape::kThreads / 2 : 32;
  constexpr int kDoneThread = Shape::kAhead ? kTurnThread + 32 : 0;
  extern __shared__ __align__(128) uint8_t shared[];
  const Unit u(ptx::shared_address(shared));
  // At p, which nobody needs between units.
  auto* next_unit = reinterpret_cast<volatile int32_t*>(shared + (u.tile_p(0).base - u.base));

  const int warp = threadIdx.x / 32;
  const int key_block = warp % Shape::kKeyWarps;  // and the one kApart further
  const int part = warp / Shape::kKeyWarps;
  const int64_t units = static_cast<int64_t>(args.plan.data[PlanView::kBackward]) * args.num_kv_heads;
  const PlanEntry* entries = args.plan.entries[PlanView::kBackward];
  int32_t* claim = args.order;
  int32_t* counters = args.order + Args::kClaims;

  ptx::let_next_kernel_start();  // the documents of one key tile need nothing from here
  if (threadIdx.x == 0) *next_unit = atomicAdd(claim, 1);
  __syncthreads();
  for (int32_t unit = *next_unit; unit < units; unit = *next_unit) {
    const SumUnit work(args, entries, unit, kRows, kKeys);
    const PlanEntry& entry = work.entry;
    const int32_t kv_head = work.kv_head;
    const DocumentView d = document_view(entry, args.plan.window);
    const int32_t first_key = entry.tile * kKeys;
    const int32_t end_key = first_key + kKeys < d.keys ? first_key + kKeys : d.keys;
    const Range tiles = row_tiles(d.tokens_seeing(first_key, end_key - 1), args.group, kRows);

    load_rows<Shape::kThreads, kKeys>(u.tile_k(), 0, threadIdx.x, args.head_dim, args.k.data,
                                      key_rows(args.k, d, kv_head, first_key));
    load_rows<Shape::kThreads, kKeys>(u.tile_v(), 0, threadIdx.x, args.head_dim, args.v.data,
                                      key_rows(args.v, d, kv_head, first_key));
    ptx::copy_commit();
    const bool down = args.plan.tiles.start_at_last_row(d.tokens);
    const int32_t forth = down ? -1 : 1;
    const int32_t steps = tiles.end - tiles.first;
    const int32_t start = down && steps > 0 ? tiles.end - 1 : tiles.first;
    GroupRows rows(args, d, kv_head, static_cast<int64_t>(start) * kRows, kRows);
    const GroupRows::Stride stride = rows.stride(forth * kRows);
    uint32_t sum_place = work.place + start;
    if (steps > 0) u.load_rows(args, rows, 0);

    typename Unit::Sums dk;
    typename Unit::Sums dv;
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int n = 0; n < Shape::kColumns / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) dk[c][n][i] = dv[c][n][i] = 0.f;
    Turn next;  // after the step before, once its sums are stored or read
    const auto tell_of_turn = [&] {
      if (threadIdx.x != kDoneThread || next.tile < 0) return;
      if (next.first(args.plan.sum_ring)) {
        ptx::store_relaxed(counters + next.tile, next.count);  // nobody reads what was there
      } else {
        ptx::store_release(counters + next.tile, next.count);
      }
    };

    // p and ds of the row tile `rows`, into place i.
    const auto make_scores = [&](int i) {
      const int32_t last_token = rows.last_token();
      const Range keys = d.keys_seen(rows.token, last_token);
      // Quotients of unsigned numbers, which are shifts.
      const int32_t first_tile = static_cast<uint32_t>(keys.first) / kKeys;
      const int32_t last_tile = static_cast<uint32_t>(keys.end - 1) / kKeys;
      const uint32_t first_seen = keys.first <= first_key ? 0 : keys.first - first_key;
      const uint32_t end_seen = (keys.end >= end_key ? end_key : keys.end) - first_key;
      const Range blocks{static_cast<int32_t>(first_seen / 16), static_cast<int32_t>((end_seen + 15) / 16)};
      const Met met(rows.valid, blocks.first, blocks.end,
                    turn_at(sum_place, args.plan.sum_ring, down ? entry.tile - first_tile : last_tile - entry.tile),
                    entry.tile == (down ? last_tile : first_tile), last_tile == 0);
      // As met.sees, but from what is not packed yet: the first product waits for this.
      const bool low = key_block >= blocks.first && key_block < blocks.end;
      const bool high = key_block + Unit::kApart >= blocks.first && key_block + Unit::kApart < blocks.end;
      const int first_row = part * Shape::kScoreRows;
      if (first_row < rows.valid && (low || high)) {
        const int tile_key = 16 * (low ? key_block : key_block + Unit::kApart);
        const int last_key = 16 * (high ? key_block + Unit::kApart : key_block) + 15;
        const bool masked = !d.all_seen(rows.token, last_token, first_key + tile_key, first_key + last_key);
        if (low && high) {
          u.template scores<2>(shared, args, d, rows, i, first_row, first_key, tile_key, masked);
        } else {
          u.template scores<1>(shared, args, d, rows, i, first_row, first_key, tile_key, masked);
        }
      }
      return met;
    };
    // One thread waits for the turn of a row tile, which has mostly come.
    const auto wait_for_turn = [&](const Met& met) {
      if (met.alone()) return;
      while (static_cast<uint32_t>(ptx::load_acquire(counters + met.turn.tile)) != met.turn.count) {
      }
    };
    // dk, dv and dq from place i; the row tile starts `back` rows from `rows`.
    const auto add_sums = [&](const Met& met, int i, int back) {
      u.add_keys(dk, dv, met, i, key_block, part);
      tell_of_turn();  // late, so that the sums of the step before have long arrived
      if (Unit::query_row() < met.rows()) {
        typename Unit::Queries dq;
        u.queries(dq, met, i);
        float* at = args.dq_sum + static_cast<int64_t>(met.turn.tile) * Unit::kSumsInTile;
        if (!met.last()) {
          Unit::leave_sums(at, dq, met.turn.first(args.plan.sum_ring));
        } else {
          if (!met.turn.first(args.plan.sum_ring)) Unit::take_sums(at, dq);
          Unit::store_queries(args, rows.moved(back, kRows), dq);
        }
      }
      next = met.alone() ? Turn() : met.last() ? met.turn.next_lap(args.plan.sum_ring) : met.turn.next();
    };

    int place = 0;
    if constexpr (Shape::kAhead) {
      const bool late = warp >= Shape::kWarps / 2;  // sums first
      const auto barrier = [&] {
        ptx::copy_wait<0>();
        ptx::sync_block<Shape::kThreads>();
      };
      Met before;
      int place_before = 0;
      if (steps > 0 && late) barrier();
      for (int32_t i = 0; i < steps + (steps > 0 && !late); ++i) {
        if (!late) {
          barrier();
          if (i + 1 < steps) u.load_rows(args, rows.moved(stride, kRows), Unit::next_place(place));
        }
        Met met;
        if (i < steps) {
          met = make_scores(place);
          if (threadIdx.x == kTurnThread) wait_for_turn(met);
        }
        rows = rows.moved(stride, kRows);
        sum_place += forth;
        place = Unit::next_place(place);
        if (late) {
          barrier();
          before = met;
        }
        if (late || i > 0) {
          add_sums(before, place_before, (late ? -kRows : -2 * kRows) * forth);
          place_before = Unit::next_place(place_before);
        }
        before = met;
      }
    } else {
      for (int32_t i = 0; i < steps; ++i) {
        ptx::copy_wait<0>();
        __syncthreads();
        if (Shape::kStages > 1 && i + 1 < steps) {
          u.load_rows(args, rows.moved(stride, kRows), Unit::next_place(place));
        }
        const Met met = make_scores(place);
        if (threadIdx.x == kTurnThread) wait_for_turn(met);
        __syncthreads();
        add_sums(met, place, 0);
        rows = rows.moved(stride, kRows);
        sum_place += forth;
        place = Unit::next_place(place);
        if constexpr (Shape::kStages == 1) {
          __syncthreads();  // these rows have been read
          if (i + 1 < steps) u.load_rows(args, rows, place);
        }
      }
    }
    // Not earlier: a unit that is claimed long before it starts would keep others of its document waiting.
    int32_t claimed = 0;
    if (threadIdx.x == 0) claimed = atomicAdd(claim, 1);
    ptx::copy_wait<0>();
    __syncthreads();  // every tile has been read, every sum stored
    tell_of_turn();
    u.store_keys(args, d, kv_head, first_key, end_key, key_block, part, dk, dv);
    if (threadIdx.x == 0) *next_unit = claimed;
    __syncthreads();
  }
}

template <class T, int kDim, bool kTransform, Room kRoom>
void run_backward(const Args& args, cudaStream_t stream) {
  using Shape = SeveralTilesShape<kDim, kRoom>;
  static PersistentKernel kernel{reinterpret_cast<const void*>(attention_backward_kernel<T, kDim, kTransform, kRoom>),
                                 Shape::kThreads, Shape::kShared, "attention_backward_kernel"};
  launch_persistent(kernel, &args, args.plan.backward_capacity() * args.num_kv_heads, stream);
}

}  // namespace packing_ops::attention::sm80
