// Scores before the softmax, and the lse after it. On a GPU, what an option does to scores is only here.
#pragma once

#include <algorithm>

#include "core/ptx/mma.cuh"
#include "ops/attention/attention.h"

namespace packing_ops::attention {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float k2Log2e = 2.885390082f;
// exponential_tanh's absolute error, times the cap, is in the scores.
constexpr float kMaxExponentialSoftcap = 1024.f;

// What ScoreTransform and score_of read.
struct ScoreArgs {
  float softmax_scale = 0;
  float softcap = 0;
  float unit = 0;              // of ScoreTransform: softcap or 1
  float inner = 0;             // softmax_scale over it; for exponential_tanh times 2 log2(e)
  bool large_softcap = false;  // too large for exponential_tanh

  ScoreArgs() = default;
  explicit ScoreArgs(const VarlenAttentionParams& p)
      : softmax_scale(static_cast<float>(p.softmax_scale)), softcap(static_cast<float>(p.softcap)) {
    // Within bounds that no score reaches: unit * log2(e) stays finite, and 0 * inner 0.
    unit = softcap > 0 ? std::min(softcap, 0x1p100f) : 1.f;
    inner = std::clamp(softmax_scale / unit, -0x1p100f, 0x1p100f);
    large_softcap = softcap > kMaxExponentialSoftcap;
    if (softcap > 0 && !large_softcap) inner *= k2Log2e;
  }
};

// Whether a call needs ScoreTransform<true>: with softcap, or with a scale that is not positive, which would turn the
// order of the online softmax around.
inline bool transforms_scores(const VarlenAttentionParams& p) {
  return p.softcap > 0 || !(p.softmax_scale > 0);
}

// x P(x^2) / Q(x^2), fitted to -8 .. 8, beyond which tanh is 1. Its relative error is at most 5e-7, also near 0: a
// softcap far above the scores leaves them as they are. It takes fewer clocks than tanhf.
__device__ __forceinline__ float rational_tanh(float x) {
  x = ptx::clamp(x, 8.f);
  const float square = x * x;
  float p = 1.142843848e-05f;
  p = fmaf(p, square, 2.951025264e-03f);
  p = fmaf(p, square, 1.292566508e-01f);
  p = fmaf(p, square, 9.999998808e-01f);
  float q = 2.459215409e-07f;
  q = fmaf(q, square, 2.386693814e-04f);
  q = fmaf(q, square, 2.381556109e-02f);
  q = fmaf(q, square, 4.625887871e-01f);
  q = fmaf(q, square, 1.f);
  return x * p * ptx::rcp_approx(q);
}

// 1 - 2 / (1 + e^2x), of x = y / k2Log2e. Its absolute error is at most 3e-7; nothing of a small x is left.
__device__ __forceinline__ float exponential_tanh(float y) {
  return fmaf(-2.f, ptx::rcp_approx(ptx::exp2_approx(y) + 1.f), 1.f);
}

// Dot products of q and k before the softmax, whose scores are unit() times what apply() leaves. kTransform:
// transforms_scores.
template <bool kTransform>
struct ScoreTransform {
  const ScoreArgs& args;

  __device__ __forceinline__ float unit() const { return kTransform ? args.unit : args.softmax_scale; }
  __device__ __forceinline__ bool capped() const { return kTransform && args.softcap > 0.f; }

  template <int kCount>
  __device__ __forceinline__ void apply(float (&dots)[kCount]) const {
    if constexpr (kTransform) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) dots[i] *= args.inner;
      if (args.large_softcap) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) dots[i] = rational_tanh(dots[i]);
      } else if (capped()) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) dots[i] = exponential_tanh(dots[i]);
      }
    }
  }

  // The derivative of a score by its dot product, over softmax_scale, from what apply() left.
  __device__ __forceinline__ float slope(float applied) const { return capped() ? fmaf(-applied, applied, 1.f) : 1.f; }
};

// In float32: the score and its derivative by the dot product.
__device__ __forceinline__ float score_of(float product, const ScoreArgs& args, float* slope) {
  *slope = args.softmax_scale;
  if (!(args.softcap > 0.f)) return product * args.softmax_scale;
  const float t = tanhf(product * args.softmax_scale / args.softcap);
  *slope *= 1.f - t * t;
  return args.softcap * t;
}

// lse = log(sum_j exp(unit * s_j)) from row_max = max_j s_j and sum = sum_j 2^(s_j scale - row_max scale), where scale
// = unit * log2(e). Adds back the rounding error of scale and of the product.
__device__ __forceinline__ float log_of_sum(float row_max, float scale, double unit, float sum) {
  const float rounding = row_max == -INFINITY ? 0.f : fmaf(row_max, scale, -(row_max * scale));
  return static_cast<float>(row_max * unit + (logf(sum) - kLn2 * rounding));
}

}  // namespace packing_ops::attention
