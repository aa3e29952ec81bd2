// What the backward's consumer warpgroups do: 64 keys each of the unit's 128. The second one's scores follow the
// first one's, so that products of one overlap the softmax of the other. A step:
//
//   s^T = k q^T, dp^T = v dout^T   keys are rows, so that p^T and ds^T are operands as they are
//   dv += p^T dout
//   dq = ds k                      half of it by each warpgroup, from ds of both; it leaves while dk is summed
//   dk += ds^T q
#pragma once

#include "ops/attention/cuda/sm90/backward_math.cuh"

namespace packing_ops::attention::sm90 {

template <class T, class Shape, bool kTransform>
__device__ __forceinline__ void attend_to_keys(const BackwardArgs& args, BackwardBarriers<Shape>& shared, uint32_t base,
                                               int w) {
  using Math = BackwardMath<T, Shape>;
  const int lane = threadIdx.x & 31;
  const bool first_thread = threadIdx.x % kWarpgroupThreads == 0;
  const ScoreTransform<kTransform> transform{args.common.scores};
  const float scale = transform.unit() * kLog2e;
  const int row_part = Shape::kTiles == 2 ? w : 0;  // of dq: this warpgroup's
  const int column_part = Shape::kTiles == 2 ? 0 : w;

  uint32_t unit_idx = 0;
  uint32_t step_idx = 0;
  RowsOfStep<Shape> rows;

  typename Math::KeySums dk;
  typename Math::KeySums dv;
  typename Math::Scores p;
  typename Math::Scores ds;
  typename Math::Weights p_half;
  typename Math::Weights ds_half;
  typename Math::Queries dq;

  const auto arrive = [&](uint64_t* barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };
  const auto tile_k = [&] { return Shape::tile_k(base, stage_of(unit_idx, kKvStages)); };
  const auto tile_v = [&] { return Shape::tile_v(base, stage_of(unit_idx, kKvStages)); };
  // Issue scores
  const auto start_scores = [&] {
    const int stage = stage_of(step_idx, kRowStages);
    if (w == 1) ptx::mbarrier_wait(&shared.scores_issued, parity_of(step_idx, 1));
    ptx::wgmma_fence();
    Math::multiply(p, tile_k() + w * 64 * 128, Shape::tile_q(base, stage));
    ptx::wgmma_commit_group();
    Math::multiply(ds, tile_v() + w * 64 * 128, Shape::tile_dout(base, stage));
    ptx::wgmma_commit_group();
    if (w == 0) arrive(&shared.scores_issued);
  };
  // P and mask
  const auto end_scores = [&](const typename Math::Pairs& lse, uint32_t masked) {
    Math::weights(p, lse, scale);
    if (masked >> w & 1) {
      Math::mask(args, p, shared.units[stage_of(unit_idx, kUnitStages)], shared.steps[stage_of(step_idx, kStepStages)],
                 shared.first_tokens, 64 * w, 0);
    }
  };
  const auto end_dp = [&] {
    const typename Math::Pairs row_sum(shared.row_sum[stage_of(step_idx, kRowStages)]);
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(ds);
    Math::subtract_row_sums(ds, row_sum, transform, p);
  };
  // dS to shared memory
  const auto share_ds = [&] {
    const int stage = stage_of(step_idx, 2);
    Math::score_gradients(ds, p);
    Math::round(p_half, p);
    Math::round(ds_half, ds);
    Math::stage_scores(ds_half, Shape::tile_ds(base, stage), 64 * w, 0);
  };
  // Issue dV, publish dS meanwhile, issue dQ, dK
  const auto start_sums = [&](bool add) {
    const int row_stage = stage_of(step_idx, kRowStages);
    ptx::wgmma_fence();
    Math::add_keys(dv, p_half, Shape::tile_dout(base, row_stage), add);
    ptx::wgmma_commit_group();
    const int stage = stage_of(step_idx, 2);
    ptx::fence_proxy_async();
    __syncwarp();
    arrive(&shared.ds_full[stage]);
    ptx::mbarrier_wait(&shared.ds_full[stage], parity_of(step_idx, 2));  // the other warpgroup's too
    ptx::wgmma_fence();
    Math::multiply_queries(dq, Shape::tile_ds(base, stage) + row_part * Shape::kPanelDs,
                           tile_k() + column_part * Shape::kPanelK);
    ptx::wgmma_commit_group();
    Math::add_keys(dk, ds_half, Shape::tile_q(base, row_stage), add);
    ptx::wgmma_commit_group();
  };
  // dQ to the ring or to memory
  const auto end_queries = [&](DqAction action) {
    const int stage = stage_of(step_idx, Shape::kDqStages);
    ptx::fence_operands(dq);
    ptx::mbarrier_wait(&shared.dq_empty[stage], parity_of(step_idx, Shape::kDqStages) ^ 1);
    if (action == DqAction::kAdd || action == DqAction::kPut) {
      Math::stage_queries(dq, Shape::tile_dq(base, stage) + row_part * Shape::kRingFloats * 4, column_part);
      ptx::fence_proxy_async();
    } else if (action != DqAction::kNone) {
      const int slot = stage_of(step_idx, kStepStages);
      ptx::mbarrier_wait(&shared.dq_ticket_ready[slot], parity_of(step_idx, kStepStages));
      Math::finish_queries(args, dq, shared.steps[slot].tiles[row_part], shared.steps[slot], column_part);
    }
    __syncwarp();
    arrive(&shared.dq_full[stage_of(step_idx, kDqSenders)]);
  };
  // Release Q and dO
  const auto end_sums = [&] {
    ptx::fence_operands(dv);
    ptx::fence_operands(dk);
    __syncwarp();
    arrive(&shared.q_empty[stage_of(step_idx, kRowStages)]);
    ++step_idx;
  };

  while (true) {
    // Wait unit
    ptx::mbarrier_wait(&shared.kv_full[stage_of(unit_idx, kKvStages)], parity_of(unit_idx, kKvStages));
    const int32_t steps = warp_uniform(shared.units[stage_of(unit_idx, kUnitStages)].steps);
    if (steps < 0) break;
    // Main loop over steps: wait Q and dO
#pragma unroll 1
    for (int32_t i = 0; i < steps; ++i) {
      rows.wait(shared, step_idx);
      // lse is loaded before products are issued: behind them a load waits. With a transform it is loaded where it is
      // used.
      const uint32_t masked = shared.steps[stage_of(step_idx, kStepStages)].masked;
      const float* lse = shared.lse[stage_of(step_idx, kRowStages)];
      if constexpr (kTransform) {
        start_scores();
        ptx::wgmma_wait_group<1>();
        ptx::fence_operands(p);
        transform.apply(p);
        end_dp();  // p overwrites what it needs
        end_scores(typename Math::Pairs(lse), masked);
      } else {
        const typename Math::Pairs loaded(lse);
        start_scores();
        ptx::wgmma_wait_group<1>();
        ptx::fence_operands(p);
        end_scores(loaded, masked);
        end_dp();
      }
      share_ds();
      start_sums(i > 0);
      const DqAction action = shared.steps[stage_of(step_idx, kStepStages)].tiles[row_part].action;
      ptx::wgmma_wait_group<1>();  // dk's products are still under way
      end_queries(action);
      rows.look_for(shared, step_idx + 1);
      ptx::wgmma_wait_group<0>();
      end_sums();
    }
    // Keys without queries: zeros
    if (steps == 0) {
#pragma unroll
      for (int i = 0; i < Shape::kDim / 2; ++i) dk[i] = dv[i] = 0.f;
    }
    // Epilogue: dK and dV over K and V, then to memory
    __syncwarp();
    arrive(&shared.keys_read);
    ptx::mbarrier_wait(&shared.keys_read, parity_of(unit_idx, 1));
    Math::stage_keys(dv, tile_v(), 64 * w, 1.f);
    Math::stage_keys(dk, tile_k(), 64 * w, args.common.scores.softmax_scale);
    ptx::fence_proxy_async();
    __syncwarp();
    arrive(&shared.staged[w]);
    if (first_thread) {
      ptx::mbarrier_wait(&shared.staged[w], parity_of(unit_idx, 1));
      const BackwardUnit& unit = shared.units[stage_of(unit_idx, kUnitStages)];
      Math::store_keys(args, unit, tile_k(), tile_v(), 64 * w, 0);
      ptx::mbarrier_arrive(&shared.kv_empty[stage_of(unit_idx, kKvStages)]);
    }
    ++unit_idx;
  }
}

}  // namespace packing_ops::attention::sm90
