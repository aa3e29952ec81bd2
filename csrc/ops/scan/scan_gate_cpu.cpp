// The specification of mamba2_gate and its gradient.
#include "core/accumulate.h"
#include "host/parallel.h"
#include "host/scalar.h"
#include "ops/scan/scan.h"
#include "ops/scan/scan_gates.h"

namespace packing_ops {

namespace {

template <class T>
accumulate_t<T> number(const HeadRows& rows, int64_t token, int64_t head, int64_t i) {
  return static_cast<accumulate_t<T>>(static_cast<const T*>(rows.data)[token * rows.token + head * rows.head + i]);
}

// f(token, head, column, its place in a contiguous tensor, whether the token is of a document)
template <class F>
void for_each_number(const GateParams& p, const F& f) {
  const int64_t end = p.documents.end(), row = p.num_heads * p.head_dim;
  parallel_for(0, p.documents.total, 16, [&](int64_t first, int64_t last) {
    for (int64_t i = first * row; i < last * row; ++i) {
      const int64_t token = i / row;
      f(token, i % row / p.head_dim, i % p.head_dim, i, token < end);
    }
  });
}

}  // namespace

void launch_gate_cpu(const GateParams& p) {
  dispatch_float(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    for_each_number(p, [&](int64_t token, int64_t head, int64_t column, int64_t at, bool inside) {
      const OutputGate gate(number<T>(p.z, token, head, column));
      static_cast<T*>(p.out)[at] = inside ? static_cast<T>(number<T>(p.x, token, head, column) * gate.silu) : T(0);
    });
  });
}

void launch_gate_backward_cpu(const GateBackwardParams& p) {
  dispatch_float(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    for_each_number(p, [&](int64_t token, int64_t head, int64_t column, int64_t at, bool inside) {
      const OutputGate gate(number<T>(p.z, token, head, column));
      const auto dout = number<T>(p.dout, token, head, column);
      const auto x = number<T>(p.x, token, head, column);
      static_cast<T*>(p.dx)[at] = inside ? static_cast<T>(dout * gate.silu) : T(0);
      static_cast<T*>(p.dz)[at] = inside ? static_cast<T>(dout * x * gate.slope) : T(0);
    });
  });
}

}  // namespace packing_ops
