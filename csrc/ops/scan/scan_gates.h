// What a token and a head do to a state, for both ops and both devices: they forget by exp(g) and learn by beta.
#pragma once

#include <cmath>

#include "core/macros.h"
#include "ops/scan/scan.h"

namespace packing_ops {

template <class Real>
struct Gates {
  Real g, beta;
  Real slope = 1;  // d beta / d dt
};

// What mamba2_scan's z makes of an output: silu(z), and its slope.
template <class Real>
struct OutputGate {
  Real silu, slope;
  PACKING_OPS_HOST_DEVICE explicit OutputGate(Real z) {
    const Real sigmoid = Real(1) / (Real(1) + std::exp(-z));
    silu = z * sigmoid;
    slope = sigmoid * (Real(1) + z * (Real(1) - sigmoid));
  }
};

constexpr int kSoftplusLinear = 20;  // above it softplus(x) is x, as torch has it

// beta of mamba2_scan, without g.
template <class Real>
PACKING_OPS_HOST_DEVICE Gates<Real> step_of(const ScanParams& p, Real x) {
  Gates<Real> gates{Real(0), x};
  if (p.softplus && x <= Real(kSoftplusLinear)) {
    const Real grown = std::exp(x);
    gates.beta = std::log1p(grown);
    gates.slope = grown / (Real(1) + grown);
  }
  const Real low = static_cast<Real>(p.dt_min), high = static_cast<Real>(p.dt_max);
  if (gates.beta < low || gates.beta > high) {  // not NaN
    gates.beta = gates.beta < low ? low : high;
    gates.slope = 0;
  }
  return gates;
}

// Of token and head `at` = token * num_v_heads + head. `corrects` is p's, a constant in kernels.
template <class Real>
PACKING_OPS_HOST_DEVICE Gates<Real> gates_of(const ScanParams& p, bool corrects, int64_t at, int64_t head) {
  const Real beta = static_cast<const Real*>(p.beta)[at];
  if (corrects) return {static_cast<const Real*>(p.g)[at], beta};
  Gates<Real> gates = step_of(p, p.dt_bias ? beta + static_cast<const Real*>(p.dt_bias)[head] : beta);
  gates.g = static_cast<const Real*>(p.a)[head] * gates.beta;
  return gates;
}

// From the gradients of g and beta those of dt, and what a token adds to the gradient of a.
template <class Real>
PACKING_OPS_HOST_DEVICE Gates<Real> gradients_of_step(const ScanParams& p, const Gates<Real>& gates, int64_t head,
                                                      Real dg, Real dbeta) {
  const Real a = static_cast<const Real*>(p.a)[head];
  // A step at its limit has no gradient, whatever it is multiplied with.
  return {dg * gates.beta, gates.slope == Real(0) ? Real(0) : gates.slope * (dbeta + a * dg)};
}

}  // namespace packing_ops
