// Scores before the softmax, and the lse after it.
#pragma once

#include "ops/attention/cuda/args.cuh"

namespace packing_ops::attention {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// softcap * tanh(softmax_scale * dot / softcap)
__device__ __forceinline__ float capped(float dot, float softmax_scale, float softcap, float* tanh_out) {
  const float t = tanhf(dot * softmax_scale / softcap);
  *tanh_out = t;
  return softcap * t;
}

__device__ __forceinline__ float transform_score(float dot, const Args& args) {
  float t;
  return args.softcap > 0.f ? capped(dot, args.softmax_scale, args.softcap, &t) : dot * args.softmax_scale;
}

// lse = log(sum_j exp(unit * s_j)) from row_max = max_j s_j and sum = sum_j 2^(s_j scale - row_max scale), where scale
// = unit * log2(e). Adds back the rounding error of scale and of the product.
__device__ __forceinline__ float log_of_sum(float row_max, float scale, double unit, float sum) {
  const float rounding = row_max == -INFINITY ? 0.f : fmaf(row_max, scale, -(row_max * scale));
  return static_cast<float>(row_max * unit + (logf(sum) - kLn2 * rounding));
}

}  // namespace packing_ops::attention
