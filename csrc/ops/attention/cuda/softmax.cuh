// Scores before the softmax, and the lse after it.
#pragma once

#include "ops/attention/cuda/args.cuh"

namespace packing_ops::attention {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// What the softmax sees of a dot product.
__device__ __forceinline__ float capped(float dot, float softmax_scale, float softcap, float* tanh_out) {
  const float t = tanhf(dot * softmax_scale / softcap);
  *tanh_out = t;
  return softcap * t;
}

__device__ __forceinline__ float transform_score(float dot, const Args& args) {
  float t;
  return args.softcap > 0.f ? capped(dot, args.softmax_scale, args.softcap, &t) : dot * args.softmax_scale;
}

// log(sum_j exp(unit * s_j)) from the largest s and the sum of 2^(s scale - largest scale), scale = unit * log2(e):
// what rounding scale and the product left out is put back.
__device__ __forceinline__ float log_of_sum(float most, float scale, double unit, float sum) {
  const float left_out = most == -INFINITY ? 0.f : fmaf(most, scale, -(most * scale));
  return static_cast<float>(most * unit + (logf(sum) - kLn2 * left_out));
}

}  // namespace packing_ops::attention
