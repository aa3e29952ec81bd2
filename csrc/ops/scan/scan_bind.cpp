// gated_delta_rule and its gradient: check -> allocate -> fill the params -> launch.
#include <tuple>
#include <vector>

#include "host/launch.h"
#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/scan/scan_inputs.h"

namespace packing_ops {

namespace {

// Tensors that params point into: the caller's, or copies.
struct ScanInputs {
  Tensor q, k, v, g, beta;
  std::optional<Tensor> initial_state;
};

std::vector<int64_t> scan_state_shape(const ScanParams& p) {
  return {p.documents.num_documents, p.num_v_heads, p.head_dim, p.head_dim_v};
}

constexpr const char* kScanStateShape = "[num_documents, num_v_heads, head_dim, head_dim_v]";

void set_scan_shapes(const Tensor& q, const Tensor& k, const Tensor& v, ScanParams& p) {
  check_scan_rows(q, "q");
  check_like_first(k, "k", q, "q");
  check_shape(k, "k", sizes_of(q), "[total, num_heads, head_dim] like q");
  check_like_first(v, "v", q, "q");
  set_scan_dims(q, v, p);
  if (v.size(0) != q.size(0) || p.num_k_heads < 1 || p.num_v_heads < 1 || p.num_v_heads % p.num_k_heads != 0) {
    fail("v: expected [total=", q.size(0), ", a multiple of the ", p.num_k_heads, " heads of q, head_dim_v], got ",
         describe(v));
  }
  check_head_dim(q, "q");
  check_head_dim(v, "v");
}

ScanInputs scan_inputs(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                       Tensor& cu_seqlens, const std::optional<Tensor>& initial_state, ScanParams& p) {
  set_scan_shapes(q, k, v, p);
  take_cu_seqlens(cu_seqlens, "cu_seqlens", q.size(0), q, "q");
  p.documents = documents_view(cu_seqlens, q.size(0));
  check_scan_sums(g, "g", q, "q", {q.size(0), p.num_v_heads}, "[total, num_v_heads]");
  check_scan_sums(beta, "beta", q, "q", {q.size(0), p.num_v_heads}, "[total, num_v_heads]");
  if (initial_state) check_scan_sums(*initial_state, "initial_state", q, "q", scan_state_shape(p), kScanStateShape);
  ScanInputs inputs{scan_rows(q), scan_rows(k), scan_rows(v), dense(g), dense(beta), dense(initial_state)};
  p.q = scan_rows_view(inputs.q);
  p.k = scan_rows_view(inputs.k);
  p.v = scan_rows_view(inputs.v);
  p.g = inputs.g.data_ptr();
  p.beta = inputs.beta.data_ptr();
  p.initial_state = data_or_null(inputs.initial_state);
  return inputs;
}

}  // namespace

// Without output_final_state the second result is empty.
std::tuple<Tensor, Tensor> gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                            const Tensor& beta, Tensor cu_seqlens, std::optional<Tensor> initial_state,
                                            double scale, bool use_qk_l2norm, bool output_final_state) {
  ScanParams p;
  const ScanInputs inputs = scan_inputs(q, k, v, g, beta, cu_seqlens, initial_state, p);
  const DType sums = scan_sums_dtype(p.dtype);
  Tensor out = empty(sizes_of(v), p.dtype, q);
  Tensor final_state = empty(output_final_state ? scan_state_shape(p) : std::vector<int64_t>{0}, sums, q);
  const auto scratch = cuda_scratch(q, PACKING_OPS_CUDA(scan_scratch_bytes), p);
  p.scale = scale;
  p.l2norm = use_qk_l2norm;
  p.out = out.data_ptr();
  p.final_state = output_final_state ? final_state.data_ptr() : nullptr;
  p.scratch = data_or_null(scratch);
  launch(q, p, launch_scan_cpu, PACKING_OPS_CUDA(launch_scan_cuda));
  return {out, final_state};
}

// dinitial_state is empty without initial_state.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gated_delta_rule_backward(
    const Tensor& dout, std::optional<Tensor> dfinal_state, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& g, const Tensor& beta, Tensor cu_seqlens, std::optional<Tensor> initial_state, double scale,
    bool use_qk_l2norm) {
  ScanBackwardParams p;
  const ScanInputs inputs = scan_inputs(q, k, v, g, beta, cu_seqlens, initial_state, p);
  const DType sums = scan_sums_dtype(p.dtype);
  check_like_first(dout, "dout", q, "q");
  check_shape(dout, "dout", sizes_of(v), "[total, num_v_heads, head_dim_v] like v");
  if (dfinal_state) check_scan_sums(*dfinal_state, "dfinal_state", q, "q", scan_state_shape(p), kScanStateShape);
  const Tensor rows_of_dout = scan_rows(dout);
  const std::optional<Tensor> dense_dfinal = dense(dfinal_state);
  Tensor dq = empty(sizes_of(q), p.dtype, q);
  Tensor dk = empty(sizes_of(k), p.dtype, q);
  Tensor dv = empty(sizes_of(v), p.dtype, q);
  Tensor dg = empty(sizes_of(g), sums, q);
  Tensor dbeta = empty(sizes_of(g), sums, q);
  Tensor dinitial = empty(initial_state ? scan_state_shape(p) : std::vector<int64_t>{0}, sums, q);
  const auto scratch = cuda_scratch(q, PACKING_OPS_CUDA(scan_backward_scratch_bytes), p);
  p.scale = scale;
  p.l2norm = use_qk_l2norm;
  p.dout = scan_rows_view(rows_of_dout);
  p.dfinal_state = data_or_null(dense_dfinal);
  p.dq = dq.data_ptr();
  p.dk = dk.data_ptr();
  p.dv = dv.data_ptr();
  p.dg = dg.data_ptr();
  p.dbeta = dbeta.data_ptr();
  p.dinitial_state = initial_state ? dinitial.data_ptr() : nullptr;
  p.scratch = data_or_null(scratch);
  launch(q, p, launch_scan_backward_cpu, PACKING_OPS_CUDA(launch_scan_backward_cuda));
  return {dq, dk, dv, dg, dbeta, dinitial};
}

PACKING_OPS_REGISTER(m) {
  m.impl("gated_delta_rule", TORCH_BOX(&gated_delta_rule));
  m.impl("gated_delta_rule_backward", TORCH_BOX(&gated_delta_rule_backward));
}

}  // namespace packing_ops
