// exp and log for the loops of CPU kernels: they are inlined, so that the loops are vectorised.
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

// log to 2 ulp for x from the smallest normal number on, which it takes smaller ones for; NaN for NaN. x = 2^n * f with
// f in sqrt(1/2) .. sqrt(2), and log(f) = 2 * atanh(s) as a series in s = (f - 1) / (f + 1).
PACKING_OPS_INLINE float fast_log(float x) {
  constexpr float kSmallest = 1.17549435e-38f;
  constexpr uint32_t kRoot = 0x3f3504f3;  // sqrt(1/2)
  const float taken = x < kSmallest ? kSmallest : x;
  const uint32_t above = std::bit_cast<uint32_t>(taken) - kRoot;
  const float n = static_cast<float>(static_cast<int32_t>(above) >> 23);
  const float f = std::bit_cast<float>((above & 0x007fffffu) + kRoot);
  const float s = (f - 1.0f) / (f + 1.0f);
  const float t = s * s;
  const float series = t * (0.66666667f + t * (0.4f + t * (0.28571429f + t * 0.22222222f)));
  const float result = n * 0.693359375f + ((s * series - n * 2.12194440e-4f) + 2.0f * s);
  return x == x ? result : x;
}

PACKING_OPS_INLINE double fast_log(double x) {
  return std::log(x);
}

}  // namespace packing_ops
