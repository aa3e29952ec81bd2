// What the backward's consumer warpgroups do with 256 columns, where dk and dv of 64 keys fill the registers of both:
// half of a step's rows each for scores, then half of the columns each for sums. A step:
//
//   s^T = k q^T, dp^T = v dout^T   of 32 rows; p^T and ds^T go to shared memory, where sums need those of both
//   dv += p^T dout, dk += ds^T q, dq = ds k
//   dq overwrites the step's q and dout, once both warpgroups have read them, and leaves from there
#pragma once

#include "ops/attention/cuda/sm90/backward_shared_scores.cuh"

namespace packing_ops::attention::sm90 {

template <class T, class Shape, bool kTransform>
struct BackwardColumns : SharedScores<T, Shape, kTransform> {
  using Math = BackwardMath<T, Shape>;
  using Base = SharedScores<T, Shape, kTransform>;
  using Base::args, Base::shared, Base::base, Base::w, Base::transform, Base::scale, Base::unit_idx, Base::step_idx,
      Base::rows;
  using Base::Base;
  using Base::dk, Base::dv, Base::tile_k, Base::tile_v, Base::tile_p, Base::tile_ds, Base::arrive;

  __device__ __forceinline__ int first_row() const { return w * Shape::kScoreColumns; }
  __device__ __forceinline__ int first_panel() const { return w * (Shape::kPanels / 2); }

  // p and ds of this warpgroup's rows to shared memory, and those of the other.
  __device__ __forceinline__ void share_scores() {
    const int stage = stage_of(step_idx, kRowStages);
    const BackwardStep<Shape>& step = shared.steps[stage_of(step_idx, kStepStages)];
    typename Math::Scores p;
    typename Math::Scores ds;
    typename Math::Weights rounded;
    // Wait Q and dO, issue scores
    rows.wait(shared, step_idx);
    // Loaded before products are issued: behind them a load waits.
    const uint32_t masked = step.masked;
    const typename Math::Pairs lse(shared.lse[stage] + first_row());
    const typename Math::Pairs row_sum(shared.row_sum[stage] + first_row());
    ptx::wgmma_fence();
    Math::multiply(p, tile_k(), Shape::tile_q(base, stage) + first_row() * 128);
    ptx::wgmma_commit_group();
    Math::multiply(ds, tile_v(), Shape::tile_dout(base, stage) + first_row() * 128);
    ptx::wgmma_commit_group();
    const auto end_dp = [&] {
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(ds);
      Math::subtract_row_sums(ds, row_sum, transform, p);
    };
    // P to shared memory
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(p);
    if constexpr (kTransform) {
      transform.apply(p);
      end_dp();  // p overwrites what it needs
    }
    Math::weights(p, lse, scale);
    if (masked != 0) {
      Math::mask(args, p, shared.units[stage_of(unit_idx, kUnitStages)], step, shared.first_tokens, 0, first_row());
    }
    Math::round(rounded, p);
    Math::stage_scores(rounded, tile_p(), 0, first_row());
    // dS to shared memory
    if constexpr (!kTransform) end_dp();
    Math::score_gradients(ds, p);
    Math::round(rounded, ds);
    Math::stage_scores(rounded, tile_ds(), 0, first_row());
    ptx::fence_proxy_async();
    arrive(&shared.ds_full[0]);
    ptx::mbarrier_wait(&shared.ds_full[0], parity_of(step_idx, 1));
  }

  __device__ __forceinline__ void add_sums(bool add) {
    const int stage = stage_of(step_idx, kRowStages);
    typename Math::Queries dq;
    // Issue dV, dK, dQ
    ptx::wgmma_fence();
    Math::add_keys(dv, tile_p(), Shape::tile_dout(base, stage) + first_panel() * Shape::kPanelQ, add);
    Math::add_keys(dk, tile_ds(), Shape::tile_q(base, stage) + first_panel() * Shape::kPanelQ, add);
    Math::multiply_queries(dq, tile_ds(), tile_k() + first_panel() * Shape::kPanelK);
    ptx::wgmma_commit_group();
    // Wait sums
    const int slot = stage_of(step_idx, kStepStages);
    const DqAction action = shared.steps[slot].tiles[0].action;
    rows.look_for(shared, step_idx + 1);
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(dv);
    ptx::fence_operands(dk);
    ptx::fence_operands(dq);
    arrive(&shared.rows_read);
    ptx::mbarrier_wait(&shared.rows_read, parity_of(step_idx, 1));  // by both warpgroups, and p and ds
    // dQ to the ring or to memory
    if (action == DqAction::kAdd || action == DqAction::kPut) {
      Math::stage_queries(dq, Shape::tile_dq(base, stage), first_panel());
      ptx::fence_proxy_async();
    } else {
      ptx::mbarrier_wait(&shared.dq_ticket_ready[slot], parity_of(step_idx, kStepStages));
      Math::finish_queries(args, dq, shared.steps[slot].tiles[0], shared.steps[slot], first_panel());
    }
    arrive(&shared.dq_full[stage_of(step_idx, kDqSenders)]);
    ++step_idx;
  }

  // dk and dv, over k and v, to memory.
  __device__ __forceinline__ void finish_keys() {
    arrive(&shared.keys_read);
    ptx::mbarrier_wait(&shared.keys_read, parity_of(unit_idx, 1));
    Math::stage_keys(dv, tile_v() + first_panel() * Shape::kPanelK, 0, 1.f);
    Math::stage_keys(dk, tile_k() + first_panel() * Shape::kPanelK, 0, args.common.scores.softmax_scale);
    ptx::fence_proxy_async();
    arrive(&shared.staged[w]);
    if (threadIdx.x % kWarpgroupThreads == 0) {
      ptx::mbarrier_wait(&shared.staged[w], parity_of(unit_idx, 1));
      Math::store_keys(args, shared.units[stage_of(unit_idx, kUnitStages)], tile_k(), tile_v(), 0, first_panel());
      ptx::mbarrier_arrive(&shared.kv_empty[0]);
    }
    ++unit_idx;
  }
};

}  // namespace packing_ops::attention::sm90
