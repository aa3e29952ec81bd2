// exp for the loops of CPU kernels: it is inlined, so that they are vectorised.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/macros.h"

namespace packing_ops {

template <class To, class From>
PACKING_OPS_INLINE To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// exp to 1 ulp for x <= 88, NaN for NaN. 2^n * exp(r) with r in +-ln(2)/2 and a minimax polynomial for exp(r).
PACKING_OPS_INLINE float fast_exp(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  constexpr float kSmallest = -87.0f;
  const float clamped = x < kSmallest ? kSmallest : (x > 88.0f ? 88.0f : x);
  const float shifted = clamped * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float q = 0.0013941209f;
  q = q * r + 0.0083632348f;
  q = q * r + 0.0416663736f;
  q = q * r + 0.1666657627f;
  q = q * r + 0.5f;
  const float power = bits_as<float>((bits_as<uint32_t>(shifted) << 23) + (127u << 23));
  const float result = (q * (r * r) + r + 1.0f) * power;
  return x < kSmallest ? 0.0f : result;
}

PACKING_OPS_INLINE double fast_exp(double x) {
  return std::exp(x);
}

}  // namespace packing_ops
