// Backward on mma.sync. A unit is (document, tile of keys, kv head): it goes once over the packed rows that see its
// keys and keeps dk and dv in registers through the whole group. Keys are the rows of its products (s^T = k q^T), so
// that p^T and ds^T are operands of dv += p^T dout and dk += ds^T q straight from registers. dq = ds k of a row tile
// adds up over the key tiles that it sees, from the last to the first: the first in turn stores, the last one writes
// dq, and a counter for each row tile says whose turn it is. Units are claimed in the plan's order, where a document's
// key tiles descend too, so the one that is waited for is always under way, and with causal attention always some steps
// ahead.
#pragma once

#include "core/launch.cuh"
#include "ops/attention/sm80/backward_unit.cuh"
#include "ops/attention/sm80/persistent.h"

namespace packing_ops::sm80 {

template <class T, int kDim, int kKeys, bool kTransform>
__global__ void __launch_bounds__(BackwardShape<kDim, kKeys>::kThreads, kKeys == 64 && kDim <= 128 ? 2 : 1)
    attention_backward_kernel(__grid_constant__ const Args args) {
  using Unit = BackwardUnit<T, kDim, kKeys, kTransform>;
  using Shape = typename Unit::Shape;
  constexpr int kRows = Shape::kRows;
  constexpr int kList = kKeys == backward_keys(kDim) ? PlanView::kBackward : PlanView::kSmall;
  extern __shared__ uint8_t shared[];
  __shared__ int32_t next_unit;
  const uint32_t start = ptx::shared_address(shared);
  const Unit u{(start + 127) & ~127u};
  const uint8_t* generic = shared + (u.base - start);

  const int warp = threadIdx.x / 32;
  const int g = (threadIdx.x & 31) >> 2;
  const int first_key_in_tile = (warp % (kKeys / 16)) * 16;
  const int part = warp / (kKeys / 16);
  const int64_t units = static_cast<int64_t>(args.plan.data[kList]) * args.num_kv_heads;
  const PlanEntry* entries = args.plan.entries(kList);
  int32_t* claim = args.order + (kList == PlanView::kBackward ? 0 : 1);

  if (threadIdx.x == 0) next_unit = atomicAdd(claim, 1);
  __syncthreads();
  while (next_unit < units) {
    const int32_t unit = next_unit;
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
    int32_t* counters =
        args.order + 2 + (d.start_q * args.group / kRows + entry.document) * args.num_kv_heads + kv_head;

    load_tile<Shape::kThreads>(u.tile_k(), args.head_dim, args.k.data, key_rows(args.k, d, kv_head, first_key));
    load_tile<Shape::kThreads>(u.tile_v(), args.head_dim, args.v.data, key_rows(args.v, d, kv_head, first_key));
    ptx::copy_commit();
    GroupRows rows(d, args.group, kv_head, static_cast<int64_t>(first_step) * kRows, kRows);
    if (first_step < end_step) Unit::load_rows(u, args, rows, first_step);

    typename Unit::Sums dk;
    typename Unit::Sums dv;
#pragma unroll
    for (int n = 0; n < Shape::kColumns / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) dk[n][i] = dv[n][i] = 0.f;
    int32_t claimed = 0;
    int32_t* finished = nullptr;  // counter of the step before, once all its sums are stored
    int32_t finished_turn = 0;

    for (int32_t step = first_step; step < end_step; ++step, rows = rows.after(kRows)) {
      const int32_t last_token = rows.last_token();
      const Range keys = d.keys_seen(rows.token, last_token);
      const int32_t last_tile = (keys.end - 1) / kKeys;
      const Turn turn{counters + static_cast<int64_t>(step) * args.num_kv_heads, last_tile - entry.tile,
                      last_tile - keys.first / kKeys};
      const int seen_first = keys.first <= first_key ? 0 : (keys.first - first_key) / 16;
      const int seen_end = keys.end >= end_key ? (end_key - first_key + 15) / 16 : (keys.end - first_key + 15) / 16;

      ptx::copy_wait<0>();
      __syncthreads();
      if (step + 1 < end_step) {
        Unit::load_rows(u, args, rows.after(kRows), step + 1);
      } else if (threadIdx.x == 0) {
        // Not earlier: a unit that is claimed long before it starts would keep others of its document waiting.
        claimed = atomicAdd(claim, 1);
      }
      // One thread waits for this tile's turn (looking early, so that the answer is there when it is needed), one tells
      // that the step before is done (late, so that its sums have long arrived).
      const bool waits = threadIdx.x == 32 && turn.mine > 0;
      int32_t done = 0;
      if (waits) done = ptx::load_relaxed(turn.counter);

      const int block = first_key_in_tile / 16;
      const bool seen = block >= seen_first && block < seen_end;
      const int first_row = part * Shape::kScoreRows;
      typename Unit::Scores p;
      typename Unit::Scores ds;
      if (seen) {
        const int32_t key = first_key + first_key_in_tile;
        const auto* stats = reinterpret_cast<const float2*>(generic + (u.stats(step) - u.base));
        typename Unit::Scores t;
        product<T, Shape>(p, u.tile_k(), first_key_in_tile, u.tile_q(step), first_row);
        Unit::weights(p, t, stats, args, d, rows, key + g, first_row,
                      !d.all_seen(rows.token, last_token, key, key + 15));
        product<T, Shape>(ds, u.tile_v(), first_key_in_tile, u.tile_do(step), first_row);
#pragma unroll
        for (int n = 0; n < Unit::kScoreBlocks; ++n) {
          const float4 two = *reinterpret_cast<const float4*>(stats + first_row + 2 * (threadIdx.x & 3) + 8 * n);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            ds[n][i] = p[n][i] * (ds[n][i] - (i & 1 ? two.w : two.y));
            if constexpr (kTransform) ds[n][i] *= 1.f - t[n][i] * t[n][i];
          }
        }
        Unit::store_transposed(u.tile_ds(), ds, first_key_in_tile, first_row);
        if constexpr (Shape::kSplit == 2) Unit::store_transposed(u.tile_p(), p, first_key_in_tile, first_row);
      }
      if constexpr (Shape::kSplit == 2) __syncthreads();
      if (seen) {
        const LaneView<kRows, kDim> q_view(u.tile_q(step), Lanes::kRowsFirst, 0);
        const LaneView<kRows, kDim> do_view(u.tile_do(step), Lanes::kRowsFirst, 0);
        const int first_column = part * Shape::kColumns / 16;
        if constexpr (Shape::kSplit == 1) {
          const auto from = [](const typename Unit::Scores& x) {
            return [&x](uint32_t (&a)[4], int j) {
              a[0] = pack<T>(x[2 * j][0], x[2 * j][1]);
              a[1] = pack<T>(x[2 * j][2], x[2 * j][3]);
              a[2] = pack<T>(x[2 * j + 1][0], x[2 * j + 1][1]);
              a[3] = pack<T>(x[2 * j + 1][2], x[2 * j + 1][3]);
            };
          };
          multiply<T, kRows / 16>(dv, from(p), do_view, first_column);
          multiply<T, kRows / 16>(dk, from(ds), q_view, first_column);
        } else {
          const auto from = [&](typename Shape::TileS tile) {
            const LaneView<kKeys, kRows> view(tile, Lanes::kRowsFirst, first_key_in_tile);
            return [view](uint32_t (&a)[4], int j) { ptx::ldmatrix(a, view.at(0, j)); };
          };
          multiply<T, kRows / 16>(dv, from(u.tile_p()), do_view, first_column);
          multiply<T, kRows / 16>(dk, from(u.tile_ds()), q_view, first_column);
        }
      }
      if (threadIdx.x == 0 && finished != nullptr) ptx::store_release(finished, finished_turn);
      if (waits) {
        while (done != turn.mine) done = ptx::load_relaxed(turn.counter);
        ptx::fence_gpu();
      }
      __syncthreads();
      Unit::add_queries(u, args, rows, turn, seen_first, seen_end);
      finished = turn.mine < turn.last ? turn.counter : nullptr;
      finished_turn = turn.mine + 1;
    }
    if (first_step == end_step && threadIdx.x == 0) claimed = atomicAdd(claim, 1);
    ptx::copy_wait<0>();
    __syncthreads();  // every tile has been read, every sum stored
    if (threadIdx.x == 0) {
      if (finished != nullptr) ptx::store_release(finished, finished_turn);
      next_unit = claimed;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t key = first_key + first_key_in_tile + g + 8 * half;
      const int64_t row = d.start_k + key;
      const auto place = [&](const AttentionTensor& to) {
        return key < end_key ? static_cast<uint16_t*>(to.data) + row * to.token_stride + kv_head * to.head_stride
                             : nullptr;
      };
      store_row<T>(place(args.dk), part * Shape::kColumns, args.head_dim, dk, half, args.softmax_scale);
      store_row<T>(place(args.dv), part * Shape::kColumns, args.head_dim, dv, half, 1.f);
    }
    __syncthreads();
  }
}

template <class T, int kDim, int kKeys, bool kTransform>
void run_backward(const Args& args, cudaStream_t stream) {
  using Shape = BackwardShape<kDim, kKeys>;
  static PersistentKernel kernel{reinterpret_cast<const void*>(attention_backward_kernel<T, kDim, kKeys, kTransform>),
                                 Shape::kThreads, Shape::kShared, "attention_backward_kernel"};
  const bool small = kKeys != backward_keys(kDim);
  const int64_t entries = small ? args.plan.small_capacity() : args.plan.backward_capacity();
  launch_persistent(kernel, args, entries * args.num_kv_heads, stream);
}

}  // namespace packing_ops::sm80
