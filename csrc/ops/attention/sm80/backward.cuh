// Backward on mma.sync. A unit is (document, tile of keys, kv head): it goes once over the packed rows that see its
// keys and keeps dk and dv in registers through the whole group. A step takes 64 rows: s = q k^T and dp = dout v^T with
// rows across and keys along the warps, p and ds through shared memory, then dv += p^T dout, dk += ds^T q and dq = ds
// k. dq of a row tile adds up over the key tiles that it sees, in an order that the document's length decides
// (start_at_last_row): the first in turn stores, the last one writes dq, and a counter for each row tile says whose
// turn it is. Units are claimed in the plan's order, where key tiles have the same order, so the one that is waited for
// is always under way.
#pragma once

#include "core/launch.cuh"
#include "ops/attention/sm80/backward_unit.cuh"
#include "ops/attention/sm80/persistent.h"

namespace packing_ops::sm80 {

template <int kDim, bool kLean>
using SeveralTilesShape = BackwardShape<kDim, kLean ? lean_backward_keys(kDim) : backward_keys(kDim), false, kLean>;

template <class T, int kDim, bool kTransform, bool kLean>
__global__ void __launch_bounds__(SeveralTilesShape<kDim, kLean>::kThreads)
    attention_backward_kernel(__grid_constant__ const Args args) {
  using Shape = SeveralTilesShape<kDim, kLean>;
  using Unit = BackwardUnit<T, Shape, kTransform>;
  constexpr int kRows = Shape::kRows;
  constexpr int kKeys = Shape::kKeys;
  extern __shared__ __align__(128) uint8_t shared[];
  const Unit u(ptx::shared_address(shared));
  // At p, which nobody needs between units.
  auto* next_unit = reinterpret_cast<volatile int32_t*>(shared + (u.tile_p().base - u.base));

  const int warp = threadIdx.x / 32;
  const int key_block = warp % Shape::kKeyWarps;  // and the one kApart further
  const int part = warp / Shape::kKeyWarps;
  const int64_t units = static_cast<int64_t>(args.plan.data[PlanView::kBackward]) * args.num_kv_heads;
  const PlanEntry* entries = args.plan.entries[PlanView::kBackward];
  int32_t* claim = args.order;

  ptx::let_next_kernel_start();  // the documents of one key tile need nothing from here
  if (threadIdx.x == 0) *next_unit = atomicAdd(claim, 1);
  __syncthreads();
  for (int32_t unit = *next_unit; unit < units; unit = *next_unit) {
    const PlanEntry entry = entries[unit / args.num_kv_heads];
    const int32_t kv_head = unit % args.num_kv_heads;
    const DocumentView d = document_view(entry, args.plan.window);
    const int32_t first_key = entry.tile * kKeys;
    const int32_t end_key = first_key + kKeys < d.keys ? first_key + kKeys : d.keys;
    const Range seeing = d.tokens_seeing(first_key, end_key - 1);
    const int32_t first_step = static_cast<int32_t>(static_cast<int64_t>(seeing.first) * args.group / kRows);
    const int32_t end_step =
        seeing.empty() ? first_step
                       : static_cast<int32_t>((static_cast<int64_t>(seeing.end) * args.group - 1) / kRows + 1);
    const int64_t first_row_tile = d.start_q * args.group / kRows;
    int32_t* counters = args.order + Args::kClaims + (first_row_tile + entry.document) * args.num_kv_heads + kv_head;
    float* sums =
        args.dq_sum +
        (args.sum_tile(first_row_tile, entry.document, d.start_k) * args.num_kv_heads + kv_head) * Unit::kSumsInTile;

    load_rows<Shape::kThreads, kKeys>(u.tile_k(), 0, threadIdx.x, args.head_dim, args.k.data,
                                      key_rows(args.k, d, kv_head, first_key));
    load_rows<Shape::kThreads, kKeys>(u.tile_v(), 0, threadIdx.x, args.head_dim, args.v.data,
                                      key_rows(args.v, d, kv_head, first_key));
    ptx::copy_commit();
    const bool down = args.plan.tiles.start_at_last_row(d.tokens);
    const int32_t steps = end_step - first_step;
    int32_t step = down && steps > 0 ? end_step - 1 : first_step;
    GroupRows rows(args, d, kv_head, static_cast<int64_t>(step) * kRows, kRows);
    if (steps > 0) u.load_rows(args, rows, 0);

    typename Unit::Sums dk;
    typename Unit::Sums dv;
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int n = 0; n < Shape::kColumns / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) dk[c][n][i] = dv[c][n][i] = 0.f;
    int32_t claimed = 0;
    int32_t finished = 0;  // what the counter of the step before becomes once its sums are stored, 0: it stays

    for (int32_t i = 0; i < steps; ++i) {
      const int32_t last_token = rows.last_token();
      const Range keys = d.keys_seen(rows.token, last_token);
      const int32_t first_tile = keys.first / kKeys;
      const int32_t last_tile = (keys.end - 1) / kKeys;
      const Turn turn{counters + static_cast<int64_t>(step) * args.num_kv_heads,
                      down ? entry.tile - first_tile : last_tile - entry.tile, last_tile - first_tile};
      const int seen_first = keys.first <= first_key ? 0 : (keys.first - first_key) / 16;
      const int seen_end = keys.end >= end_key ? (end_key - first_key + 15) / 16 : (keys.end - first_key + 15) / 16;

      ptx::copy_wait<0>();
      __syncthreads();
      if (i + 1 < steps) {
        if constexpr (Shape::kStages > 1) u.load_rows(args, rows.next(kRows, down), i + 1);
      } else if (threadIdx.x == 0) {
        // Not earlier: a unit that is claimed long before it starts would keep others of its document waiting.
        claimed = atomicAdd(claim, 1);
      }
      const bool low = key_block >= seen_first && key_block < seen_end;
      const bool high = key_block + Unit::kApart >= seen_first && key_block + Unit::kApart < seen_end;
      const int first_row = part * Shape::kScoreRows;
      const int row_blocks = (rows.valid + 15) / 16;
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
      // One thread waits for this tile's turn, which has mostly come.
      if (threadIdx.x == 32 && turn.mine > 0) {
        while (ptx::load_acquire(turn.counter) != turn.mine) {
        }
      }
      __syncthreads();
      const int first_column = part * Shape::kColumns;
      if (low && high && row_blocks == kRows / 16) {
        u.template accumulate_both<0, 2, true>(dk, dv, i, key_block, first_column, row_blocks);
      } else if (low && high) {
        u.template accumulate_both<0, 2, false>(dk, dv, i, key_block, first_column, row_blocks);
      } else if (low) {
        u.template accumulate_both<0, 1, false>(dk, dv, i, key_block, first_column, row_blocks);
      } else if (high) {
        u.template accumulate_both<1, 1, false>(dk, dv, i, key_block, first_column, row_blocks);
      }
      // Late, so that the sums of the step before have long arrived.
      if (threadIdx.x == 0 && finished > 0) {
        ptx::store_release(turn.counter + (down ? args.num_kv_heads : -args.num_kv_heads), finished);
      }
      u.add_queries(args, rows, turn, sums + static_cast<int64_t>(step) * args.num_kv_heads * Unit::kSumsInTile,
                    seen_first, seen_end);
      finished = turn.mine < turn.last ? turn.mine + 1 : 0;
      rows = rows.next(kRows, down);
      step += down ? -1 : 1;
      if constexpr (Shape::kStages == 1) {
        __syncthreads();  // these rows have been read
        if (i + 1 < steps) u.load_rows(args, rows, i + 1);
      }
    }
    if (steps == 0 && threadIdx.x == 0) claimed = atomicAdd(claim, 1);
    ptx::copy_wait<0>();
    __syncthreads();  // every tile has been read, every sum stored
    if (threadIdx.x == 0) {
      const int32_t last_step = down ? first_step : end_step - 1;
      if (finished > 0) ptx::store_release(counters + static_cast<int64_t>(last_step) * args.num_kv_heads, finished);
      *next_unit = claimed;
    }
    u.store_keys(args, d, kv_head, first_key, end_key, key_block, part, dk, dv);
    __syncthreads();
  }
}

template <class T, int kDim, bool kTransform, bool kLean>
void run_backward(const Args& args, cudaStream_t stream) {
  using Shape = SeveralTilesShape<kDim, kLean>;
  static PersistentKernel kernel{reinterpret_cast<const void*>(attention_backward_kernel<T, kDim, kTransform, kLean>),
                                 Shape::kThreads, Shape::kShared, "attention_backward_kernel"};
  launch_persistent(kernel, args, args.plan.backward_capacity() * args.num_kv_heads, stream);
}

}  // namespace packing_ops::sm80
