// gated_delta_rule and its gradient: check -> allocate -> fill the params -> launch.
#include <tuple>
#include <vector>

#include "host/launch.h"
#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/scan/scan.h"

namespace packing_ops {

namespace {

DType scan_sums_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// Tensors that params point into: the caller's, or copies.
struct ScanInputs {
  Tensor q, k, v, g, beta;
  std::optional<Tensor> initial_state;
};

// Kernels read rows in pieces of 16 bytes on CUDA.
Tensor scan_rows(const Tensor& t) {
  const int64_t piece = t.is_cpu() ? 1 : dtype_of(t) == DType::kFloat32 ? 4 : 8;
  const bool aligned = t.is_cpu() || reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
  const bool whole = t.size(2) <= 1 || t.stride(2) == 1;
  return t.numel() == 0 || (whole && aligned && t.stride(0) % piece == 0 && t.stride(1) % piece == 0) ? t : dense(t);
}

HeadRows scan_rows_view(const Tensor& t) {
  return {t.data_ptr(), t.stride(0), t.stride(1)};
}

void check_like_q(const Tensor& t, const char* name, const Tensor& q) {
  check_rank(t, name, 3);
  check_same_device(t, name, q, "q");
  check_same_dtype(t, name, q, "q");
}

void check_scan_sums(const Tensor& t, const char* name, const Tensor& q, const std::vector<int64_t>& shape,
                     const char* wanted) {
  check_dtype(t, name, {scan_sums_dtype(dtype_of(q))});
  check_same_device(t, name, q, "q");
  check_shape(t, name, shape, wanted);
}

std::vector<int64_t> scan_state_shape(const GatedDeltaParams& p) {
  return {p.documents.num_documents, p.num_v_heads, p.head_dim, p.head_dim_v};
}

constexpr const char* kScanStateShape = "[num_documents, num_v_heads, head_dim, head_dim_v]";

void check_scan_dims(const GatedDeltaParams& p, const Tensor& q, const Tensor& v) {
  if (q.is_cpu()) return;
  const auto served = [](int64_t dim) { return dim == 64 || dim == 128 || dim == 256; };
  if (!served(p.head_dim)) fail("q: expected a head_dim of 64, 128 or 256 on CUDA, got ", describe(q));
  if (!served(p.head_dim_v)) fail("v: expected a head_dim of 64, 128 or 256 on CUDA, got ", describe(v));
}

void set_scan_shapes(const Tensor& q, const Tensor& k, const Tensor& v, GatedDeltaParams& p) {
  if (q.is_cpu()) {
    check_dtype(q, "q", {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64});
  } else {
    check_dtype(q, "q", {DType::kFloat32, DType::kBFloat16, DType::kFloat16});
  }
  check_rank(q, "q", 3);
  check_total(q.size(0), "q");
  check_like_q(k, "k", q);
  check_shape(k, "k", sizes_of(q), "[total, num_heads, head_dim] like q");
  check_like_q(v, "v", q);
  p.dtype = dtype_of(q);
  p.num_k_heads = q.size(1);
  p.head_dim = q.size(2);
  p.num_v_heads = v.size(1);
  p.head_dim_v = v.size(2);
  if (v.size(0) != q.size(0) || p.num_k_heads < 1 || p.num_v_heads < 1 || p.num_v_heads % p.num_k_heads != 0) {
    fail("v: expected [total=", q.size(0), ", a multiple of the ", p.num_k_heads, " heads of q, head_dim_v], got ",
         describe(v));
  }
  check_scan_dims(p, q, v);
}

ScanInputs scan_inputs(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                       Tensor& cu_seqlens, const std::optional<Tensor>& initial_state, GatedDeltaParams& p) {
  set_scan_shapes(q, k, v, p);
  take_cu_seqlens(cu_seqlens, "cu_seqlens", q.size(0), q, "q");
  p.documents = documents_view(cu_seqlens, q.size(0));
  check_scan_sums(g, "g", q, {q.size(0), p.num_v_heads}, "[total, num_v_heads]");
  check_scan_sums(beta, "beta", q, {q.size(0), p.num_v_heads}, "[total, num_v_heads]");
  if (initial_state) check_scan_sums(*initial_state, "initial_state", q, scan_state_shape(p), kScanStateShape);
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
  GatedDeltaParams p;
  const ScanInputs inputs = scan_inputs(q, k, v, g, beta, cu_seqlens, initial_state, p);
  const DType sums = scan_sums_dtype(p.dtype);
  Tensor out = empty(sizes_of(v), p.dtype, q);
  Tensor final_state = empty(output_final_state ? scan_state_shape(p) : std::vector<int64_t>{0}, sums, q);
  const auto scratch = cuda_scratch(q, PACKING_OPS_CUDA(gated_delta_rule_scratch_bytes), p);
  p.scale = scale;
  p.l2norm = use_qk_l2norm;
  p.out = out.data_ptr();
  p.final_state = output_final_state ? final_state.data_ptr() : nullptr;
  p.scratch = data_or_null(scratch);
  launch(q, p, launch_gated_delta_rule_cpu, PACKING_OPS_CUDA(launch_gated_delta_rule_cuda));
  return {out, final_state};
}

// dinitial_state is empty without initial_state.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gated_delta_rule_backward(
    const Tensor& dout, std::optional<Tensor> dfinal_state, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& g, const Tensor& beta, Tensor cu_seqlens, std::optional<Tensor> initial_state, double scale,
    bool use_qk_l2norm) {
  GatedDeltaBackwardParams p;
  const ScanInputs inputs = scan_inputs(q, k, v, g, beta, cu_seqlens, initial_state, p);
  const DType sums = scan_sums_dtype(p.dtype);
  check_like_q(dout, "dout", q);
  check_shape(dout, "dout", sizes_of(v), "[total, num_v_heads, head_dim_v] like v");
  if (dfinal_state) check_scan_sums(*dfinal_state, "dfinal_state", q, scan_state_shape(p), kScanStateShape);
  const Tensor rows_of_dout = scan_rows(dout);
  const std::optional<Tensor> dense_dfinal = dense(dfinal_state);
  Tensor dq = empty(sizes_of(q), p.dtype, q);
  Tensor dk = empty(sizes_of(k), p.dtype, q);
  Tensor dv = empty(sizes_of(v), p.dtype, q);
  Tensor dg = empty(sizes_of(g), sums, q);
  Tensor dbeta = empty(sizes_of(g), sums, q);
  Tensor dinitial = empty(initial_state ? scan_state_shape(p) : std::vector<int64_t>{0}, sums, q);
  const auto scratch = cuda_scratch(q, PACKING_OPS_CUDA(gated_delta_rule_backward_scratch_bytes), p);
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
  launch(q, p, launch_gated_delta_rule_backward_cpu, PACKING_OPS_CUDA(launch_gated_delta_rule_backward_cuda));
  return {dq, dk, dv, dg, dbeta, dinitial};
}

PACKING_OPS_REGISTER(m) {
  m.impl("gated_delta_rule", TORCH_BOX(&gated_delta_rule));
  m.impl("gated_delta_rule_backward", TORCH_BOX(&gated_delta_rule_backward));
}

}  // namespace packing_ops
