// causal_conv1d and its gradient: check -> allocate -> fill the params -> launch.
#include <tuple>
#include <vector>

#include "host/launch.h"
#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/conv/conv.h"

namespace packing_ops {

namespace {

void check_conv_dtype(const Tensor& x) {
  if (x.is_cpu()) {
    check_dtype(x, "x", {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64});
  } else {
    check_dtype(x, "x", {DType::kFloat32, DType::kBFloat16, DType::kFloat16});
  }
}

void check_like_x(const Tensor& t, const char* name, const Tensor& x, const std::vector<int64_t>& shape,
                  const char* wanted) {
  check_same_device(t, name, x, "x");
  check_same_dtype(t, name, x, "x");
  check_shape(t, name, shape, wanted);
}

std::vector<int64_t> conv_state_shape(const CausalConvParams& p) {
  return {p.documents.num_documents, p.channels, p.width - 1};
}

// Channels next to each other; any distance from a row to the next.
Tensor conv_rows(const Tensor& t) {
  return t.numel() == 0 || t.size(1) <= 1 || t.stride(1) == 1 ? t : dense(t);
}

// Dense copies where params point into them.
struct ConvInputs {
  Tensor x, weight;
  std::optional<Tensor> bias, initial_state;
};

ConvInputs conv_inputs(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, Tensor& cu_seqlens,
                       const std::optional<Tensor>& initial_state, CausalConvParams& p) {
  check_conv_dtype(x);
  check_rank(x, "x", 2);
  check_total(x.size(0), "x");
  take_cu_seqlens(cu_seqlens, "cu_seqlens", x.size(0), x, "x");
  check_rank(weight, "weight", 2);
  p.documents = documents_view(cu_seqlens, x.size(0));
  p.dtype = dtype_of(x);
  p.channels = x.size(1);
  p.width = weight.size(1);
  if (p.width < 1 || p.width > kMaxConvWidth) {
    fail("weight: expected [channels, width] with a width from 1 to ", kMaxConvWidth, ", got ", describe(weight));
  }
  check_like_x(weight, "weight", x, {p.channels, p.width}, "[channels, width] for the channels of x");
  if (bias) check_like_x(*bias, "bias", x, {p.channels}, "[channels]");
  if (initial_state) {
    check_like_x(*initial_state, "initial_state", x, conv_state_shape(p), "[num_documents, channels, width - 1]");
  }
  ConvInputs inputs{conv_rows(x), dense(weight), dense(bias), dense(initial_state)};
  p.x = inputs.x.data_ptr();
  p.x_row = inputs.x.stride(0);
  p.weight = inputs.weight.data_ptr();
  p.bias = data_or_null(inputs.bias);
  p.initial_state = data_or_null(inputs.initial_state);
  return inputs;
}

}  // namespace

// Without output_final_state the second result is empty.
std::tuple<Tensor, Tensor> causal_conv1d(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias,
                                         Tensor cu_seqlens, std::optional<Tensor> initial_state, bool silu,
                                         bool output_final_state) {
  CausalConvParams p;
  const ConvInputs inputs = conv_inputs(x, weight, bias, cu_seqlens, initial_state, p);
  Tensor out = empty({p.documents.total, p.channels}, p.dtype, x);
  Tensor final_state = empty(output_final_state ? conv_state_shape(p) : std::vector<int64_t>{0}, p.dtype, x);
  p.silu = silu;
  p.out = out.data_ptr();
  if (output_final_state && final_state.numel() > 0) p.final_state = final_state.data_ptr();
  launch(x, p, launch_causal_conv1d_cpu, PACKING_OPS_CUDA(launch_causal_conv1d_cuda));
  return {out, final_state};
}

// dbias and dinitial_state are empty without bias and initial_state.
std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward(const Tensor& dout,
                                                                  std::optional<Tensor> dfinal_state, const Tensor& x,
                                                                  const Tensor& weight, std::optional<Tensor> bias,
                                                                  Tensor cu_seqlens,
                                                                  std::optional<Tensor> initial_state, bool silu) {
  CausalConvBackwardParams p;
  const ConvInputs inputs = conv_inputs(x, weight, bias, cu_seqlens, initial_state, p);
  check_like_x(dout, "dout", x, sizes_of(x), "[total, channels] like x");
  if (dfinal_state) {
    check_like_x(*dfinal_state, "dfinal_state", x, conv_state_shape(p), "[num_documents, channels, width - 1]");
  }
  const Tensor rows_of_dout = conv_rows(dout);
  const std::optional<Tensor> dense_dfinal = dense(dfinal_state);
  Tensor dx = empty(sizes_of(x), p.dtype, x);
  Tensor dweight = empty(sizes_of(weight), p.dtype, x);
  Tensor dbias = empty({bias ? p.channels : 0}, p.dtype, x);
  Tensor dinitial = empty(initial_state ? conv_state_shape(p) : std::vector<int64_t>{0}, p.dtype, x);
  std::optional<Tensor> partial;
  if (!x.is_cpu()) {
    partial = empty({causal_conv1d_partial_sums(p.documents.total) * (p.width + 1) * p.channels}, DType::kFloat32, x);
    p.partial = static_cast<float*>(partial->data_ptr());
  }
  p.silu = silu;
  p.dout = rows_of_dout.data_ptr();
  p.dout_row = rows_of_dout.stride(0);
  p.dfinal_state = data_or_null(dense_dfinal);
  p.dx = dx.data_ptr();
  p.dweight = dweight.data_ptr();
  if (bias) p.dbias = dbias.data_ptr();
  if (initial_state) p.dinitial_state = dinitial.data_ptr();
  launch(x, p, launch_causal_conv1d_backward_cpu, PACKING_OPS_CUDA(launch_causal_conv1d_backward_cuda));
  return {dx, dweight, dbias, dinitial};
}

PACKING_OPS_REGISTER(m) {
  m.impl("causal_conv1d", TORCH_BOX(&causal_conv1d));
  m.impl("causal_conv1d_backward", TORCH_BOX(&causal_conv1d_backward));
}

}  // namespace packing_ops
