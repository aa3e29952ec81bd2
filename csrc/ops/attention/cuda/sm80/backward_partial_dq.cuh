// Partial dq of a row tile in global memory, in fragment order, so that a warp's access is coalesced.
#pragma once

#include "ops/attention/cuda/sm80/backward_unit.cuh"

namespace packing_ops::attention::sm80 {

template <class Unit, class F>
__device__ __forceinline__ void for_each_partial_dq(float* sums, typename Unit::Queries& dq, const F& f) {
  float4* at = reinterpret_cast<float4*>(sums) + threadIdx.x / 32 * (Unit::kQueryTiles * Unit::kQueryBlocks * 32) +
               (threadIdx.x & 31);
#pragma unroll
  for (int m = 0; m < Unit::kQueryTiles; ++m)
#pragma unroll
    for (int n = 0; n < Unit::kQueryBlocks; ++n) f(at + (m * Unit::kQueryBlocks + n) * 32, dq[m][n]);
}

// Adds dq to the partial dq of the key tiles before, or stores it if it is the first.
template <class Unit>
__device__ __forceinline__ void accumulate_partial_dq(float* sums, typename Unit::Queries& dq, bool first) {
  const auto vector = [](const float (&x)[4]) { return make_float4(x[0], x[1], x[2], x[3]); };
  if (first) {
    for_each_partial_dq<Unit>(sums, dq, [&](float4* to, float (&x)[4]) { *to = vector(x); });
  } else {
    for_each_partial_dq<Unit>(sums, dq, [&](float4* to, float (&x)[4]) { ptx::red_add_4(to, vector(x)); });
  }
}

template <class Unit>
__device__ __forceinline__ void load_partial_dq(float* sums, typename Unit::Queries& dq) {
  for_each_partial_dq<Unit>(sums, dq, [&](const float4* from, float (&x)[4]) {
    const float4 sum = __ldcg(from);
    x[0] += sum.x;
    x[1] += sum.y;
    x[2] += sum.z;
    x[3] += sum.w;
  });
}

}  // namespace packing_ops::attention::sm80
