// exp for the loops of CPU kernels: it is inlined, so that they are vectorised.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/macros.h"

namespace packing_ops {

constexpr float kSmallestExponent = -87.0f;  // below it exp is 0 here

// exp to 1 ulp for x from kSmallestExponent to 88, NaN for NaN. 2^n * exp(r) with r in +-ln(2)/2 and a minimax
// polynomial for exp(r).
PACKING_OPS_INLINE float exp_in_range(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float q = 0.0013941209f;
  q = q * r + 0.0083632348f;
  q = q * r + 0.0416663736f;
  q = q * r + 0.1666657627f;
  q = q * r + 0.5f;
  const float power = std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) << 23) + (127u << 23));
  return (q * (r * r) + r + 1.0f) * power;
}

PACKING_OPS_INLINE float fast_exp(float x) {
  const float result = exp_in_range(x < kSmallestExponent ? kSmallestExponent : (x > 88.0f ? 88.0f : x));
  return x < kSmallestExponent ? 0.0f : result;
}

PACKING_OPS_INLINE double fast_exp(double x) {
  return std::exp(x);
}

// out = fast_exp(x) for many x, at most 88. Of one loop GCC makes branches and no vectors.
PACKING_OPS_INLINE void fast_exp(const float* __restrict x, int64_t count, float* __restrict out) {
  for (int64_t i = 0; i < count; ++i) out[i] = x[i] < kSmallestExponent ? kSmallestExponent : x[i];
  for (int64_t i = 0; i < count; ++i) out[i] = exp_in_range(out[i]);
  for (int64_t i = 0; i < count; ++i) out[i] = x[i] < kSmallestExponent ? 0.0f : out[i];
}

PACKING_OPS_INLINE void fast_exp(const double* __restrict x, int64_t count, double* __restrict out) {
  for (int64_t i = 0; i < count; ++i) out[i] = std::exp(x[i]);
}

}  // namespace packing_ops
