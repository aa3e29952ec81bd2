// mamba2_gate and its gradient, z of mamba2_scan: check -> allocate -> fill the params -> launch.
#include <tuple>

#include "host/launch.h"
#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/scan/scan_inputs.h"

namespace packing_ops {

namespace {

constexpr const char* kLikeX = "[total, num_heads, head_dim] like x";

// With rows that are whole, for kernels that take any strides of tokens and heads.
Tensor gate_rows(const Tensor& t) {
  return t.size(2) <= 1 || t.stride(2) == 1 ? t : dense(t);
}

struct GateInputs {
  Tensor x, z;
};

GateInputs gate_inputs(const Tensor& x, const Tensor& z, Tensor& cu_seqlens, GateParams& p) {
  check_scan_rows(x, "x");
  check_like_first(z, "z", x, "x");
  check_shape(z, "z", sizes_of(x), kLikeX);
  take_cu_seqlens(cu_seqlens, "cu_seqlens", x.size(0), x, "x");
  p.documents = documents_view(cu_seqlens, x.size(0));
  p.dtype = dtype_of(x);
  p.num_heads = x.size(1);
  p.head_dim = x.size(2);
  GateInputs inputs{gate_rows(x), gate_rows(z)};
  p.x = scan_rows_view(inputs.x);
  p.z = scan_rows_view(inputs.z);
  return inputs;
}

}  // namespace

Tensor mamba2_gate(const Tensor& x, const Tensor& z, Tensor cu_seqlens) {
  GateParams p;
  const GateInputs inputs = gate_inputs(x, z, cu_seqlens, p);
  Tensor out = empty(sizes_of(x), p.dtype, x);
  p.out = out.data_ptr();
  launch(x, p, launch_gate_cpu, PACKING_OPS_CUDA(launch_gate_cuda));
  return out;
}

std::tuple<Tensor, Tensor> mamba2_gate_backward(const Tensor& dout, const Tensor& x, const Tensor& z,
                                                Tensor cu_seqlens) {
  GateBackwardParams p;
  const GateInputs inputs = gate_inputs(x, z, cu_seqlens, p);
  check_like_first(dout, "dout", x, "x");
  check_shape(dout, "dout", sizes_of(x), kLikeX);
  const Tensor rows_of_dout = gate_rows(dout);
  Tensor dx = empty(sizes_of(x), p.dtype, x);
  Tensor dz = empty(sizes_of(x), p.dtype, x);
  p.dout = scan_rows_view(rows_of_dout);
  p.dx = dx.data_ptr();
  p.dz = dz.data_ptr();
  launch(x, p, launch_gate_backward_cpu, PACKING_OPS_CUDA(launch_gate_backward_cuda));
  return {dx, dz};
}

PACKING_OPS_REGISTER(m) {
  m.impl("mamba2_gate", TORCH_BOX(&mamba2_gate));
  m.impl("mamba2_gate_backward", TORCH_BOX(&mamba2_gate_backward));
}

}  // namespace packing_ops
