// What the kernels of a divergence share: one block per row, both heads' logits read in 16-byte vectors.
#pragma once

#include <limits>

#include "ops/logps/logps_kl.h"
#include "ops/logps/logps_softmax.cuh"

namespace packing_ops {

enum class Kind { kForward, kReverse, kMixed };  // beta 0, 1, between

// Half types: as power_of, a logarithm whose error is far below their rounding.
template <class T>
__device__ accumulate_t<T> log_of(accumulate_t<T> x) {
  if constexpr (kBinary<T>) {
    return __log2f(x) / kLogE<T>;
  } else if constexpr (sizeof(T) == 4) {
    return logf(x);
  } else {
    return log(x);
  }
}

// As in logps_kl_cpu.cpp.
template <class T>
__device__ accumulate_t<T> log_mixture(accumulate_t<T> p, accumulate_t<T> q, accumulate_t<T> beta) {
  using Real = accumulate_t<T>;
  constexpr Real kSmallest = std::numeric_limits<Real>::min();
  const Real mixture = beta * q + (Real(1) - beta) * p;
  return log_of<T>(mixture < kSmallest ? kSmallest : mixture);
}

template <class T>
struct Head {
  using Real = accumulate_t<T>;
  const T* logits;  // of this row
  const Real* bias;
  Real inv_temperature;

  __device__ Head(const KlHead& head, int64_t row)
      : logits(static_cast<const T*>(head.logits) + row * head.row_stride),
        bias(static_cast<const Real*>(head.bias)),
        inv_temperature(static_cast<Real>(head.inv_temperature)) {}

  // What load_grain takes: the temperature is left to the exponents.
  template <int kCount>
  __device__ void alter(Real (&values)[kCount], int column) const {
    if (bias) add_bias(bias + column, values);
  }
  template <int kCount>
  __device__ uint32_t allowed(int) const {
    return ~0u;
  }
  __device__ Real scaled(Real logit, int column) const { return altered(*this, logit, column) * inv_temperature; }
};

// p * (logp - of), 0 without weight, whatever its logarithm.
template <class Real>
__device__ Real term(Real p, Real logp, Real of) {
  return p == Real(0) ? Real(0) : p * (logp - of);
}

// f(element type, kind) as constants.
template <class F>
void dispatch_kl(const KlParams& p, F&& f) {
  dispatch_logits(p.dtype, [&](auto element) {
    if (p.beta == 0) return f(element, std::integral_constant<Kind, Kind::kForward>{});
    if (p.beta == 1) return f(element, std::integral_constant<Kind, Kind::kReverse>{});
    f(element, std::integral_constant<Kind, Kind::kMixed>{});
  });
}

}  // namespace packing_ops
