// Backward of documents whose keys fit one tile, in one pass: as in backward.cuh, but a block has all of p and dp of
// its rows, so rowsum(dout * out) is the sum of p * dp, out is never read, and dq is complete at once. Nobody waits for
// another unit, nor for run_backward's kernel: this one starts where that one's blocks have nothing left to do.
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
  Scores t;
  Scores ds;
  float sums[Unit::kRowTiles][2] = {};

  // p to where the others read it; dp stays here.
  template <int kCount>
  __device__ __forceinline__ void products(const float2* stats, const Args& args, const DocumentView& d,
                                           const GroupRows& rows, int i, int first_row, int first_key) {
    const int last_key = first_key + 16 * Shape::kScoreApart * (kCount - 1) + 15;
    const bool masked = !d.all_seen(rows.token, rows.last_token(), first_key, last_key);
    u.template product<kCount>(p, u.tile_q(i), first_row, u.tile_k(), first_key);
    Unit::template weights<kCount>(p, t, stats, args, d, rows, first_row, first_key, masked);
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
        ds, p, t, [&](int m, int half) { return sums[m][half] - stats[Unit::lane_row(first_row, m, half)].y; });
    Unit::template store<kCount>(u.tile_ds(0), ds, first_row, first_key);
  }
};

template <class T, int kDim, int kKeys, bool kTransform, Room kRoom>
__global__ void __launch_bounds__(BackwardShape<kDim, kKeys, true, kRoom>::kThreads,
                                  kKeys == backward_small_keys(kDim, kRoom) ? 2 : 1)
    attention_backward_single_kernel(__grid_constant__ const Args args) {
  using Shape = BackwardShape<kDim, kKeys, true, kRoom>;
  using Unit = BackwardUnit<T, Shape, kTransform>;
  constexpr int kRows = Shape::kRows;
  constexpr bool kSmall = kKeys == backward_small_keys(kDim, kRoom);
  constexpr int kList = kSmall ? PlanView::kSmall : PlanView::kSingle;
  extern __shared__ __align__(128) uint8_t shared[];
  const Unit u(ptx::shared_address(shared));
  // At p, which nobody needs between units.
  auto* next_unit = reinterpret_cast<volatile int32_t*>(shared + (u.tile_p(0).base - u.base));
  auto* row_sums = reinterpret_cast<float*>(shared + Shape::kTiles);  // [key warps, rows], unless kWholeRows

  const int warp = threadIdx.x / 32;
  const int key_block = warp % Shape::kKeyWarps;  // and the one kApart further
  const int part = warp / Shape::kKeyWarps;
  const int first_row = Shape::kWholeRows ? 16 * warp : part * Shape::kScoreRows;
  const int64_t units = static_cast<int64_t>(args.plan.data[kList]) * args.num_kv_heads;
  const PlanEntry* entries = args.plan.entries[kList];
  int32_t* claim = args.order + (kList - PlanView::kBackward);

  ptx::let_next_kernel_start();
  if (threadIdx.x == 0) *next_unit = atomicAdd(claim, 1);
  __syncthreads();
  for (int32_t unit = *next_unit; unit < units; unit = *next_unit) {
    const PlanEntry entry = entries[unit / args.num_kv_heads];
    const int32_t kv_head = unit % args.num_kv_heads;
    const DocumentView d = document_view(entry, args.plan.window);
    const Range tiles = row_tiles(d.tokens_seeing(0, d.keys - 1), args.group, kRows);
    const int32_t steps = tiles.end - tiles.first;

    load_keys<Shape::kThreads>(u.tile_k(), args.k, d, kv_head, 0, args.head_dim, threadIdx.x);
    load_keys<Shape::kThreads>(u.tile_v(), args.v, d, kv_head, 0, args.head_dim, threadIdx.x);
    ptx::copy_commit();
    GroupRows rows(args, d, kv_head, static_cast<int64_t>(tiles.first) * kRows, kRows);
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
    int place = 0;

    for (int32_t i = 0; i < steps; ++i) {
      const Range keys = d.keys_seen(rows.token, rows.last_token());
      const Met met(rows.valid, keys.first / 16, (keys.end + 15) / 16, Turn(), true, true);
      const bool low = met.sees(key_block);
      const bool high = met.sees(key_block + Unit::kApart);
      const auto* stats = reinterpret_cast<const float2*>(shared + (u.stats(place) - u.base));

      ptx::copy_wait<0>();
      __syncthreads();
      if (i + 1 < steps) {
        if constexpr (Shape::kStages > 1) u.load_rows(args, rows.moved(kRows, kRows), Unit::next_place(place));
      } else if (threadIdx.x == 0) {
        claimed = atomicAdd(claim, 1);
      }
      SingleScores<T, Shape, kTransform> scores{u};
      if constexpr (Shape::kWholeRows) {
        if (first_row < rows.valid && met.end_block() <= Shape::kScoreBlocks / 2) {
          scores.template products<Shape::kScoreBlocks / 2>(stats, args, d, rows, place, first_row, 0);
          scores.template gradients<Shape::kScoreBlocks / 2>(stats, first_row, 0);
        } else if (first_row < rows.valid) {
          scores.template products<Shape::kScoreBlocks>(stats, args, d, rows, place, first_row, 0);
          scores.template gradients<Shape::kScoreBlocks>(stats, first_row, 0);
        }
      } else {
        const bool any = first_row < rows.valid && (low || high);
        const int tile_key = 16 * (low ? key_block : key_block + Unit::kApart);
        if (any && low && high) {
          scores.template products<2>(stats, args, d, rows, place, first_row, tile_key);
        } else if (any) {
          scores.template products<1>(stats, args, d, rows, place, first_row, tile_key);
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
        if (any && low && high) {
          scores.template gradients<2>(stats, first_row, tile_key);
        } else if (any) {
          scores.template gradients<1>(stats, first_row, tile_key);
        }
      }
      __syncthreads();
      u.add_keys(dk, dv, met, place, key_block, part);
      if (Unit::query_row() < rows.valid) {
        typename Unit::Queries dq;
        u.queries(dq, met, place);
        Unit::store_queries(args, rows, dq);
      }
      rows = rows.moved(kRows, kRows);
      place = Unit::next_place(place);
      if constexpr (Shape::kStages == 1) {
        __syncthreads();  // these rows have been read
        if (i + 1 < steps) u.load_rows(args, rows, place);
      }
    }
    if (steps == 0 && threadIdx.x == 0) claimed = atomicAdd(claim, 1);
    ptx::copy_wait<0>();
    __syncthreads();  // every tile has been read
    if (threadIdx.x == 0) *next_unit = claimed;
    u.store_keys(args, d, kv_head, 0, d.keys, key_block, part, dk, dv);
    __syncthreads();
  }
  ptx::wait_for_kernel_before();  // so that what comes after the last of these kernels comes after all of them
}

template <class T, int kDim, int kKeys, bool kTransform, Room kRoom>
void run_backward_single(const Args& args, cudaStream_t stream) {
  using Shape = BackwardShape<kDim, kKeys, true, kRoom>;
  static PersistentKernel kernel{
      reinterpret_cast<const void*>(attention_backward_single_kernel<T, kDim, kKeys, kTransform, kRoom>),
      Shape::kThreads, Shape::kShared, "attention_backward_single_kernel", true};
  launch_persistent(kernel, &args, args.plan.num_documents * args.num_kv_heads, stream);
}

}  // namespace packing_ops::attention::sm80
