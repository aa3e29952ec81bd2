// What the backward's consumer warpgroups do with 192 columns. Three of them have the registers for dk and dv of 96
// keys. Each computes scores of 32 keys, then a panel of 64 columns of dk, of dq and, where v has it, of dv. A step:
//
//   s = q k^T, dp = dout v^T             rows are rows; p^T and ds^T go to shared memory, where sums need all keys
//   dv^T += dout^T p, dk^T += q^T ds     a panel's columns are rows, so that the 96 keys can be columns
//   dq = ds k                            leaves while dk is summed
#pragma once

#include "ops/attention/cuda/sm90/backward_shared_scores.cuh"

namespace packing_ops::attention::sm90 {

template <class T, class Shape>
struct PanelMath : BackwardMath<T, Shape> {
  using typename BackwardMath<T, Shape>::Scores;
  using typename BackwardMath<T, Shape>::KeySums;
  static constexpr int kKeys = Shape::kScoreColumns;

  // scores = rows keys^T, of kColumns columns.
  template <int kColumns>
  static __device__ __forceinline__ void multiply(Scores& scores, uint32_t tile_rows, uint32_t tile_keys) {
    const uint64_t rows = ptx::matrix_descriptor(tile_rows);
    const uint64_t keys = ptx::matrix_descriptor(tile_keys);
#pragma unroll
    for (int d = 0; d < kColumns / 16; ++d) {
      ptx::wgmma<T, false>(scores, ptx::advance_descriptor(rows, d / 4 * Shape::kPanelQ + d % 4 * 32),
                           ptx::advance_descriptor(keys, d / 4 * Shape::kPanelK + d % 4 * 32), d > 0);
    }
  }

  // sums^T = panel^T weights, or sums^T += panel^T weights, of a panel of rows.
  static __device__ __forceinline__ void add_keys(KeySums& sums, uint32_t panel_rows, uint32_t tile_weights, bool add) {
    const uint64_t rows = ptx::matrix_descriptor(panel_rows);
    const uint64_t weights = ptx::matrix_descriptor(tile_weights);
#pragma unroll
    for (int n = 0; n < Shape::kRows / 16; ++n) {
      ptx::wgmma<T, false, true>(sums, ptx::advance_descriptor(rows, n * 16 * 128),
                                 ptx::advance_descriptor(weights, n * 32), add || n > 0);
    }
  }

  // A thread's two rows of an array of rows: lane / 4 and 8 more of the warp's 16.
  struct Pair {
    float of[2];
    __device__ __forceinline__ explicit Pair(const float* rows) : of{rows[lane_row()], rows[lane_row() + 8]} {}
  };
  static __device__ __forceinline__ int lane_row() {
    return static_cast<int>(threadIdx.x / 32 & 3) * 16 + static_cast<int>(threadIdx.x & 31) / 4;
  }

  // p = 2^(s scale - lse). Element 4 n + 2 half + i: row `half` of the thread's, key 8 n + 2 (lane % 4) + i.
  static __device__ __forceinline__ void weights(Scores& s, const Pair& lse, float scale) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) s[i] = ptx::exp2_approx(fmaf(s[i], scale, -lse.of[i / 2 % 2]));
  }

  // dp becomes (dp - rowsum) times the slope of `transform`, which has been applied to the products.
  template <class Transform>
  static __device__ __forceinline__ void subtract_row_sums(Scores& dp, const Pair& row_sum, const Transform& transform,
                                                           const Scores& transformed) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      dp[i] = (dp[i] - row_sum.of[i / 2 % 2]) * transform.slope(transformed[i]);
    }
  }

  // p = 0 where a row does not see a key. `first_tokens`: the unit's. The scores begin at that key of the unit's.
  static __device__ __forceinline__ void mask(const BackwardArgs& args, Scores& p, const BackwardUnit& unit,
                                              const BackwardTile& tile, const int32_t* first_tokens, int unit_key) {
    const auto row_of = [&](int32_t token) {  // of the tile's 64, if the row exists
      return (token < 0 ? 0 : token > kTileRows ? kTileRows : token) * args.common.group - lane_row();
    };
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t tile_key = unit_key + 8 * n + 2 * (static_cast<int32_t>(threadIdx.x) & 3) + i;
        const int32_t key = unit.first_key + tile_key;
        const int32_t first_token = args.common.plan.ends.first_token != nullptr
                                        ? first_tokens[tile_key]
                                        : key - unit.d.shift() - unit.d.window.right;
        const Interval<int32_t> tokens = unit.d.tokens_from(first_token, key);
        const int32_t begin = key < unit.d.keys ? row_of(tokens.begin - tile.token) : kTileRows;
        const int32_t end = row_of(tokens.end - tile.token);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (8 * half < begin || 8 * half >= end) p[4 * n + 2 * half + i] = 0.f;
        }
      }
    }
  }

  // The transpose of [64, kCount / 2 columns]: a column becomes 64 elements of a tile's row.
  template <int kCount>
  static __device__ __forceinline__ void stage_transposed(const float (&from)[kCount], uint32_t tile, float scale) {
    const int lane = static_cast<int>(threadIdx.x & 31);
    const int chunk = 2 * static_cast<int>(threadIdx.x / 32 & 3) + (lane >> 3 & 1);
    const uint32_t lane_tile = tile + ((lane >> 4) * 8 + (lane & 7)) * 128 + ((chunk ^ (lane & 7)) << 4);
#pragma unroll
    for (int n = 0; n < kCount / 8; ++n) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = pack<T>(from[8 * n + 2 * i] * scale, from[8 * n + 2 * i + 1] * scale);
      }
      ptx::stmatrix<true>(lane_tile + n * 16 * 128, words);
    }
  }
};

// kValues: this warpgroup has a panel of dv.
template <class T, class Shape, bool kTransform, bool kValues>
struct BackwardPanel : SharedScores<T, Shape, kTransform> {
  using Math = PanelMath<T, Shape>;
  using Base = SharedScores<T, Shape, kTransform>;
  using Base::args, Base::shared, Base::base, Base::w, Base::transform, Base::scale, Base::unit_idx, Base::step_idx,
      Base::rows;
  using Base::Base;
  using Base::dk, Base::dv, Base::tile_k, Base::tile_v, Base::tile_p, Base::tile_ds, Base::arrive;

  __device__ __forceinline__ int first_key() const { return w * Shape::kScoreColumns; }
  __device__ __forceinline__ uint32_t tile_dout() const { return Shape::tile_dout(base, 0); }

  // p and ds of this warpgroup's keys to shared memory. Ends when those of the others are there.
  __device__ __forceinline__ void share_scores() {
    const int stage = stage_of(step_idx, kRowStages);
    const BackwardStep<Shape>& step = shared.steps[stage_of(step_idx, kStepStages)];
    typename Math::Scores p;
    typename Math::Scores ds;
    // Wait Q, issue scores, wait dO, issue dP
    rows.wait(shared, step_idx);
    // Loaded before products are issued: behind them a load waits.
    const uint32_t masked = step.masked;
    const typename Math::Pair lse(shared.lse[stage]);
    const typename Math::Pair row_sum(shared.row_sum[stage]);
    ptx::wgmma_fence();
    Math::template multiply<Shape::kDim>(p, Shape::tile_q(base, stage), tile_k() + first_key() * 128);
    ptx::wgmma_commit_group();
    ptx::mbarrier_wait(&shared.dout_full, parity_of(step_idx, 1));
    ptx::wgmma_fence();
    Math::template multiply<Shape::kDimV>(ds, tile_dout(), tile_v() + first_key() * 128);
    ptx::wgmma_commit_group();
    const auto end_dp = [&] {
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(ds);
      Math::subtract_row_sums(ds, row_sum, transform, p);
    };
    // P to shared memory, once all have read P of the step before
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(p);
    if constexpr (kTransform) {
      transform.apply(p);
      end_dp();  // p overwrites what it needs
    }
    Math::weights(p, lse, scale);
    if (masked != 0) {
      Math::mask(args, p, shared.units[stage_of(unit_idx, kUnitStages)], step.tiles[0], shared.first_tokens,
                 first_key());
    }
    ptx::mbarrier_wait(&shared.q_empty[stage_of(step_idx - 1, kRowStages)], parity_of(step_idx - 1, kRowStages));
    Math::stage_transposed(p, tile_p() + first_key() * 128, 1.f);
    // dS to shared memory
    if constexpr (!kTransform) end_dp();
    Math::score_gradients(ds, p);
    Math::stage_transposed(ds, tile_ds() + first_key() * 128, 1.f);
    ptx::fence_proxy_async();
    arrive(&shared.ds_full[0]);
    ptx::mbarrier_wait(&shared.ds_full[0], parity_of(step_idx, 1));
  }

  __device__ __forceinline__ void add_sums(bool add) {
    const int stage = stage_of(step_idx, kRowStages);
    const int slot = stage_of(step_idx, kStepStages);
    typename Math::Queries dq;
    // Issue dV, dQ, dK
    ptx::wgmma_fence();
    if constexpr (kValues) {
      Math::add_keys(dv, tile_dout() + w * Shape::kPanelQ, tile_p(), add);
      ptx::wgmma_commit_group();
    }
    Math::multiply_queries(dq, tile_ds(), tile_k() + w * Shape::kPanelK);
    ptx::wgmma_commit_group();
    Math::add_keys(dk, Shape::tile_q(base, stage) + w * Shape::kPanelQ, tile_ds(), add);
    ptx::wgmma_commit_group();
    // Release dO
    const DqAction action = shared.steps[slot].tiles[0].action;
    if constexpr (kValues) ptx::wgmma_wait_group<2>();
    arrive(&shared.dout_empty);
    // dQ to the ring or to memory, while dk is summed
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(dq);
    ptx::mbarrier_wait(&shared.dq_empty[0], parity_of(step_idx, 1) ^ 1);
    if (action == DqAction::kAdd || action == DqAction::kPut) {
      Math::stage_queries(dq, Shape::tile_dq(base, 0), w);
      ptx::fence_proxy_async();
    } else {
      ptx::mbarrier_wait(&shared.dq_ticket_ready[slot], parity_of(step_idx, kStepStages));
      Math::finish_queries(args, dq, shared.steps[slot].tiles[0], shared.steps[slot], w);
    }
    arrive(&shared.dq_full[stage_of(step_idx, kDqSenders)]);
    // Release Q, p and ds
    rows.look_for(shared, step_idx + 1);
    ptx::wgmma_wait_group<0>();
    if constexpr (kValues) ptx::fence_operands(dv);
    ptx::fence_operands(dk);
    arrive(&shared.q_empty[stage]);
    ++step_idx;
  }

  // dk and dv, over k and v, to memory.
  __device__ __forceinline__ void finish_keys() {
    arrive(&shared.keys_read);
    ptx::mbarrier_wait(&shared.keys_read, parity_of(unit_idx, 1));
    if constexpr (kValues) Math::stage_transposed(dv, tile_v() + w * Shape::kPanelK, 1.f);
    Math::stage_transposed(dk, tile_k() + w * Shape::kPanelK, args.common.scores.softmax_scale);
    ptx::fence_proxy_async();
    arrive(&shared.staged[w]);
    if (threadIdx.x % kWarpgroupThreads == 0) {
      ptx::mbarrier_wait(&shared.staged[w], parity_of(unit_idx, 1));
      const BackwardUnit& unit = shared.units[stage_of(unit_idx, kUnitStages)];
      const DocumentTokens tokens(unit.d.start_k, unit.d.keys);
      const ptx::TmaCoords start = {64 * w, tokens.before_end + unit.first_key, unit.kv_head, tokens.to_end,
                                    kMapTokens};
      if constexpr (kValues) ptx::tma_store(args.dv, start, tile_v() + w * Shape::kPanelK);
      ptx::tma_store(args.dk, start, tile_k() + w * Shape::kPanelK);
      ptx::bulk_commit_group();
      ptx::bulk_wait_group_read();
      ptx::mbarrier_arrive(&shared.kv_empty[0]);
    }
    ++unit_idx;
  }
};

}  // namespace packing_ops::attention::sm90
