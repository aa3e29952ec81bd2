// Backward of documents of one key tile, in one pass: as backward.cuh, but a block has p and dp of all keys of its
// rows, so rowsum(dout * out) = rowsum(p * dp), out is never read and dq is complete at once. No unit waits for
// another, nor for run_backward's kernel: this one starts (programmatic dependent launch) as that one's blocks run out
// of work.
#pragma once

#include "core/launch.cuh"
#include "ops/attention/cuda/persistent.cuh"
#include "ops/attention/cuda/sm80/backward_unit.cuh"

namespace packing_ops::attention::sm80 {

// p and ds of a step, by way of rowsum(p * dp).
template <class T, class Shape, bool kTransform>
struct SingleScores {
  using Unit = BackwardUnit<T, Shape, kTransform>;
  using Scores = typename Unit::Scores;

  const Unit& u;
  Scores p;
  Scores slope;
  Scores ds;
  float sums[Unit::kRowTiles][2] = {};

  // p to shared memory; dp stays in registers.
  template <int kCount>
  __device__ __forceinline__ void products(const float2* stats, const Args& args, const DocumentWithEnds& d,
                                           const PackedRows& rows, int i, int first_row, int first_key) {
    const int last_key = first_key + 16 * Shape::kScoreBlockStride * (kCount - 1) + 15;
    const bool masked = !d.all_visible(d.end_of(rows.begin_token()), rows.last_token(), first_key, last_key);
    u.template product<kCount>(p, u.tile_q(i), first_row, u.tile_k(), first_key);
    Unit::template weights<kCount>(p, slope, stats, args, d, rows, {first_row, 0, first_key, masked});
    Unit::template store<kCount>(u.tile_p(0), p, first_row, first_key);
    u.template product<kCount>(ds, u.tile_do(i), first_row, u.tile_v(), first_key);
    Unit::for_each_row([&](int m, int half) {
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < 2 * kCount; ++n) {
        sum = fmaf(p[m][n][2 * half], ds[m][n][2 * half], sum);
        sum = fmaf(p[m][n][2 * half + 1], ds[m][n][2 * half + 1], sum);
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sums[m][half] = sum + __shfl_xor_sync(0xffffffffu, sum, 2);
    });
  }

  template <int kCount>
  __device__ __forceinline__ void gradients(const float2* stats, int first_row, int first_key) {
    Unit::template score_gradients<kCount>(
        ds, p, slope, [&](int m, int half) { return sums[m][half] - stats[Unit::lane_row(first_row, m, half)].y; });
    Unit::template store<kCount>(u.tile_ds(0), ds, first_row, first_key);
  }
};

template <class T, int kDim, int kKeys, bool kTransform, SmemTier kTier, int kDimV>
__global__ void __launch_bounds__(BackwardShape<kDim, kKeys, true, kTier, kDimV>::kThreads,
                                  kKeys == backward_small_keys(kDim, kTier) ? 2 : 1)
    attention_backward_single_kernel(__grid_constant__ const Args args) {
  using Shape = BackwardShape<kDim, kKeys, true, kTier, kDimV>;
  using Unit = BackwardUnit<T, Shape, kTransform>;
  constexpr int kRows = Shape::kRows;
  constexpr bool kSmall = kKeys == backward_small_keys(kDim, kTier);
  constexpr int kList = kSmall ? PlanView::kBackwardSmall : PlanView::kBackwardSingle;
  extern __shared__ __align__(128) uint8_t shared[];
  const Unit u(ptx::shared_address(shared));
  // In p's shared memory, which is free between units.
  auto* next_unit = reinterpret_cast<volatile int32_t*>(shared + (u.tile_p(0).base - u.base));
  auto* row_sums = reinterpret_cast<float*>(shared + Shape::kTiles);  // [key warps, rows], unless kWarpOwnsRow

  const int warp = threadIdx.x / 32;
  const int key_block = warp % Shape::kKeyWarps;  // and the one kKeyBlockStride on
  const int column_part = warp / Shape::kKeyWarps;
  const int first_row = Shape::kWarpOwnsRow ? 16 * warp : column_part * Shape::kScoreRows;
  const int64_t units = static_cast<int64_t>(args.plan.data[kList]) * args.num_kv_heads;
  const PlanEntry* entries = args.plan.entries[kList];
  int32_t* work_counter = args.counters + (kList - PlanView::kBackward);

  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) *next_unit = atomicAdd(work_counter, 1);
  __syncthreads();
  for (int32_t unit = *next_unit; unit < units; unit = *next_unit) {
    const PlanEntry entry = entries[unit / args.num_kv_heads];
    const int32_t kv_head = unit % args.num_kv_heads;
    const DocumentWithEnds d = document_with_ends(entry, args.plan);
    const Interval<int32_t> tiles = row_tiles(d, d.tokens_attending_to(0, d.keys - 1), args.group, kRows);
    const int32_t steps = tiles.end - tiles.begin;

    // Prologue: k and v, q and dout of the first row tile
    const KeySpan keys = {row_without_pages(args, d, 0), d.keys};
    load_keys<Shape::kThreads>(u.tile_k(), args.k, keys, kv_head, args.head_dim, threadIdx.x);
    load_keys<Shape::kThreads>(u.tile_v(), args.v, keys, kv_head, args.head_dim_v, threadIdx.x);
    ptx::cp_async_commit();
    PackedRows rows(args, d, kv_head, tiles.begin, kRows);
    if (steps > 0) u.load_rows(args, rows, 0);

    typename Unit::SumsK dk;
    typename Unit::SumsV dv;
    clear(dk);
    clear(dv);
    int32_t next_claimed = 0;
    int slot = 0;

    // Main loop over row tiles
    for (int32_t i = 0; i < steps; ++i) {
      const Interval<int32_t> keys = d.visible_keys(rows.begin_token(), rows.last_token());
      const RowTileVisit visit(rows.valid, keys.begin / 16, (keys.end + 15) / 16, DqTicket(), true, true);
      const bool attends_first_block = visit.attends_to(key_block);
      const bool attends_second_block = visit.attends_to(key_block + Unit::kKeyBlockStride);
      const auto* stats = reinterpret_cast<const float2*>(shared + (u.stats(slot) - u.base));

      ptx::cp_async_wait<0>();
      __syncthreads();
      if (i + 1 < steps) {
        if constexpr (Shape::kStages > 1) u.load_rows(args, rows.moved(kRows, kRows), Unit::next_slot(slot));
      } else if (threadIdx.x == 0) {
        next_claimed = atomicAdd(work_counter, 1);
      }
      SingleScores<T, Shape, kTransform> scores{u};
      if constexpr (Shape::kWarpOwnsRow) {
        if (first_row < rows.valid && visit.end_block() <= Shape::kScoreBlocks / 2) {
          scores.template products<Shape::kScoreBlocks / 2>(stats, args, d, rows, slot, first_row, 0);
          scores.template gradients<Shape::kScoreBlocks / 2>(stats, first_row, 0);
        } else if (first_row < rows.valid) {
          scores.template products<Shape::kScoreBlocks>(stats, args, d, rows, slot, first_row, 0);
          scores.template gradients<Shape::kScoreBlocks>(stats, first_row, 0);
        }
      } else {
        const bool any = first_row < rows.valid && (attends_first_block || attends_second_block);
        const int tile_key = 16 * (attends_first_block ? key_block : key_block + Unit::kKeyBlockStride);
        if (any && attends_first_block && attends_second_block) {
          scores.template products<2>(stats, args, d, rows, slot, first_row, tile_key);
        } else if (any) {
          scores.template products<1>(stats, args, d, rows, slot, first_row, tile_key);
        }
        Unit::for_each_row([&](int m, int half) {
          if ((threadIdx.x & 3) == 0 && first_row < kRows) {
            row_sums[key_block * kRows + Unit::lane_row(first_row, m, half)] = scores.sums[m][half];
          }
        });
        __syncthreads();
        Unit::for_each_row([&](int m, int half) {
          if (first_row >= kRows) return;
          const float* sums = row_sums + Unit::lane_row(first_row, m, half);
          scores.sums[m][half] = sums[0];
#pragma unroll
          for (int w = 1; w < Shape::kKeyWarps; ++w) scores.sums[m][half] += sums[w * kRows];
        });
        if (any && attends_first_block && attends_second_block) {
          scores.template gradients<2>(stats, first_row, tile_key);
        } else if (any) {
          scores.template gradients<1>(stats, first_row, tile_key);
        }
      }
      __syncthreads();
      u.add_keys(dk, dv, visit, slot, key_block, column_part);
      if (Unit::query_row() < rows.valid) {
        typename Unit::Queries dq;
        u.queries(dq, visit, slot);
        Unit::store_queries(args, rows, dq);
      }
      rows = rows.moved(kRows, kRows);
      slot = Unit::next_slot(slot);
      if constexpr (Shape::kStages == 1) {
        __syncthreads();  // these rows have been read
        if (i + 1 < steps) u.load_rows(args, rows, slot);
      }
    }
    // Epilogue: dk and dv
    if (steps == 0 && threadIdx.x == 0) next_claimed = atomicAdd(work_counter, 1);
    ptx::cp_async_wait<0>();
    __syncthreads();  // every tile has been read
    if (threadIdx.x == 0) *next_unit = next_claimed;
    u.store_keys(args, d, kv_head, {0, d.keys}, key_block, column_part, dk, dv);
    __syncthreads();
  }
  ptx::griddepcontrol_wait();  // so that this kernel's end implies the end of the ones before
}

template <class T, int kDim, int kKeys, bool kTransform, SmemTier kTier, int kDimV>
void run_backward_single(const Args& args, cudaStream_t stream) {
  using Shape = BackwardShape<kDim, kKeys, true, kTier, kDimV>;
  static PersistentKernel kernel{
      reinterpret_cast<const void*>(attention_backward_single_kernel<T, kDim, kKeys, kTransform, kTier, kDimV>),
      Shape::kThreads, Shape::kShared, "attention_backward_single_kernel"};
  launch_persistent(kernel, &args, args.plan.num_documents * args.num_kv_heads, stream, true);
}

}  // namespace packing_ops::attention::sm80
