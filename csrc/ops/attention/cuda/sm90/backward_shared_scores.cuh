// What the backward's consumer warpgroups have in common where p and ds of all go through shared memory: by columns and
// by panels.
#pragma once

#include "ops/attention/cuda/sm90/backward_math.cuh"

namespace packing_ops::attention::sm90 {

// Of a warpgroup.
template <class T, class Shape, bool kTransform>
struct SharedScores {
  static_assert(kKvStages == 1);

  const BackwardArgs& args;
  BackwardBarriers<Shape>& shared;
  const uint32_t base;
  const int w;
  const ScoreTransform<kTransform> transform;
  const float scale;  // of transformed products, times log2(e)
  uint32_t unit_idx = 0;
  uint32_t step_idx = 0;
  RowsOfStep<Shape> rows;
  typename BackwardMath<T, Shape>::KeySums dk;
  typename BackwardMath<T, Shape>::KeySums dv;

  __device__ __forceinline__ SharedScores(const BackwardArgs& args, BackwardBarriers<Shape>& shared, uint32_t base,
                                          int w)
      : args(args), shared(shared), base(base), w(w), transform{args.common.scores}, scale(transform.unit() * kLog2e) {}

  __device__ __forceinline__ uint32_t tile_k() const { return Shape::tile_k(base, 0); }
  __device__ __forceinline__ uint32_t tile_v() const { return Shape::tile_v(base, 0); }
  __device__ __forceinline__ uint32_t tile_p() const { return Shape::tile_p(base); }
  __device__ __forceinline__ uint32_t tile_ds() const { return Shape::tile_ds(base, 0); }

  static __device__ __forceinline__ void arrive(uint64_t* barrier) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) ptx::mbarrier_arrive(barrier);
  }
};

// Every unit of the block. `work`: a SharedScores with share_scores, add_sums and finish_keys.
template <class Shape, class Work>
__device__ __forceinline__ void attend_with_shared_scores(Work&& work) {
  while (true) {
    ptx::mbarrier_wait(&work.shared.kv_full[0], parity_of(work.unit_idx, 1));
    const int32_t steps = warp_uniform(work.shared.units[stage_of(work.unit_idx, kUnitStages)].steps);
    if (steps < 0) return;
#pragma unroll 1
    for (int32_t i = 0; i < steps; ++i) {
      work.share_scores();
      work.add_sums(i > 0);
    }
    if (steps == 0) {
#pragma unroll
      for (int i = 0; i < Shape::kSumColumns / 2; ++i) work.dk[i] = work.dv[i] = 0.f;
    }
    work.finish_keys();
  }
}

}  // namespace packing_ops::attention::sm90
