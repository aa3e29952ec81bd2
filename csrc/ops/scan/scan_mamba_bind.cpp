// mamba2_scan and its gradient: check -> allocate -> fill the params -> launch.
#include <tuple>
#include <vector>

#include "host/launch.h"
#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/scan/scan_inputs.h"

namespace packing_ops {

namespace {

// Tensors as the ops' schemas have them; params point into what `dense` makes of them.
struct MambaInputs {
  Tensor x, dt, a, b, c;
  std::optional<Tensor> skip, dt_bias, initial_state;
};

struct MambaOptions {
  bool softplus;
  double dt_min, dt_max;
};

std::vector<int64_t> mamba_state_shape(const ScanParams& p) {
  return {p.documents.num_documents, p.num_v_heads, p.head_dim_v, p.head_dim};
}

constexpr const char* kMambaStateShape = "[num_documents, num_heads, head_dim, state_dim]";

void set_mamba_shapes(const MambaInputs& t, ScanParams& p) {
  check_scan_rows(t.x, "x");
  check_like_first(t.b, "B", t.x, "x");
  set_scan_dims(t.b, t.x, p);
  if (t.b.size(0) != t.x.size(0) || p.num_k_heads < 1 || p.num_v_heads % p.num_k_heads != 0) {
    fail("B: expected [total=", t.x.size(0), ", groups that divide the ", p.num_v_heads,
         " heads of x, state_dim], got ", describe(t.b));
  }
  check_like_first(t.c, "C", t.x, "x");
  check_shape(t.c, "C", sizes_of(t.b), "[total, num_groups, state_dim] like B");
  check_head_dim(t.x, "x");
  check_head_dim(t.b, "B");
}

void check_mamba_gates(const MambaInputs& t, const ScanParams& p, const MambaOptions& options) {
  const auto of_heads = [&](const Tensor& gate, const char* name, const std::vector<int64_t>& shape,
                            const char* wanted) { check_scan_sums(gate, name, t.x, "x", shape, wanted); };
  of_heads(t.dt, "dt", {t.x.size(0), p.num_v_heads}, "[total, num_heads] for the heads of x");
  of_heads(t.a, "A", {p.num_v_heads}, "[num_heads] for the heads of x");
  if (t.skip) of_heads(*t.skip, "D", {p.num_v_heads}, "[num_heads] for the heads of x");
  if (t.dt_bias) of_heads(*t.dt_bias, "dt_bias", {p.num_v_heads}, "[num_heads] for the heads of x");
  if (t.initial_state) of_heads(*t.initial_state, "initial_state", mamba_state_shape(p), kMambaStateShape);
  if (!(options.dt_min <= options.dt_max)) {
    fail("dt_limit: expected (min, max) with min <= max, got (", options.dt_min, ", ", options.dt_max, ")");
  }
}

MambaInputs mamba_inputs(const MambaInputs& t, Tensor& cu_seqlens, const MambaOptions& options, ScanParams& p) {
  set_mamba_shapes(t, p);
  take_cu_seqlens(cu_seqlens, "cu_seqlens", t.x.size(0), t.x, "x");
  p.documents = documents_view(cu_seqlens, t.x.size(0));
  check_mamba_gates(t, p, options);
  MambaInputs inputs{scan_rows(t.x), dense(t.dt),   dense(t.a),       scan_rows(t.b),
                     scan_rows(t.c), dense(t.skip), dense(t.dt_bias), dense(t.initial_state)};
  p.corrects = false;
  p.q = scan_rows_view(inputs.c);
  p.k = scan_rows_view(inputs.b);
  p.v = scan_rows_view(inputs.x);
  p.beta = inputs.dt.data_ptr();
  p.a = inputs.a.data_ptr();
  p.skip = data_or_null(inputs.skip);
  p.dt_bias = data_or_null(inputs.dt_bias);
  p.initial_state = data_or_null(inputs.initial_state);
  p.softplus = options.softplus;
  p.dt_min = options.dt_min;
  p.dt_max = options.dt_max;
  return inputs;
}

}  // namespace

// Without output_final_state the second result is empty.
std::tuple<Tensor, Tensor> mamba2_scan(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                                       const Tensor& C, std::optional<Tensor> D, std::optional<Tensor> dt_bias,
                                       Tensor cu_seqlens, std::optional<Tensor> initial_state, bool dt_softplus,
                                       double dt_min, double dt_max, bool output_final_state) {
  ScanParams p;
  const MambaOptions options{dt_softplus, dt_min, dt_max};
  const MambaInputs inputs = mamba_inputs({x, dt, A, B, C, D, dt_bias, initial_state}, cu_seqlens, options, p);
  Tensor out = empty(sizes_of(x), p.dtype, x);
  Tensor final_state =
      empty(output_final_state ? mamba_state_shape(p) : std::vector<int64_t>{0}, scan_sums_dtype(p.dtype), x);
  const auto scratch = cuda_scratch(x, PACKING_OPS_CUDA(scan_scratch_bytes), p);
  p.out = out.data_ptr();
  p.final_state = output_final_state ? final_state.data_ptr() : nullptr;
  p.scratch = data_or_null(scratch);
  launch(x, p, launch_scan_cpu, PACKING_OPS_CUDA(launch_scan_cuda));
  return {out, final_state};
}

// (dx, ddt, what each token adds to dA, dB, dC, what each adds to dD, dinitial_state). The last is empty without
// initial_state.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> mamba2_scan_backward(
    const Tensor& dout, std::optional<Tensor> dfinal_state, const Tensor& x, const Tensor& dt, const Tensor& A,
    const Tensor& B, const Tensor& C, std::optional<Tensor> D, std::optional<Tensor> dt_bias, Tensor cu_seqlens,
    std::optional<Tensor> initial_state, bool dt_softplus, double dt_min, double dt_max) {
  ScanBackwardParams p;
  const MambaOptions options{dt_softplus, dt_min, dt_max};
  const MambaInputs inputs = mamba_inputs({x, dt, A, B, C, D, dt_bias, initial_state}, cu_seqlens, options, p);
  const DType sums = scan_sums_dtype(p.dtype);
  check_like_first(dout, "dout", x, "x");
  check_shape(dout, "dout", sizes_of(x), "[total, num_heads, head_dim] like x");
  if (dfinal_state) {
    check_scan_sums(*dfinal_state, "dfinal_state", x, "x", mamba_state_shape(p), kMambaStateShape);
  }
  const Tensor rows_of_dout = scan_rows(dout);
  const std::optional<Tensor> dense_dfinal = dense(dfinal_state);
  Tensor dx = empty(sizes_of(x), p.dtype, x);
  Tensor db = empty(sizes_of(B), p.dtype, x);
  Tensor dc = empty(sizes_of(C), p.dtype, x);
  Tensor ddt = empty(sizes_of(dt), sums, x);
  Tensor da = empty(sizes_of(dt), sums, x);
  Tensor dskip = empty(sizes_of(dt), sums, x);
  Tensor dinitial = empty(initial_state ? mamba_state_shape(p) : std::vector<int64_t>{0}, sums, x);
  const auto scratch = cuda_scratch(x, PACKING_OPS_CUDA(scan_backward_scratch_bytes), p);
  p.dout = scan_rows_view(rows_of_dout);
  p.dfinal_state = data_or_null(dense_dfinal);
  p.dq = dc.data_ptr();
  p.dk = db.data_ptr();
  p.dv = dx.data_ptr();
  p.dg = da.data_ptr();
  p.dbeta = ddt.data_ptr();
  p.dskip = dskip.data_ptr();
  p.dinitial_state = initial_state ? dinitial.data_ptr() : nullptr;
  p.scratch = data_or_null(scratch);
  launch(x, p, launch_scan_backward_cpu, PACKING_OPS_CUDA(launch_scan_backward_cuda));
  return {dx, ddt, da, db, dc, dskip, dinitial};
}

PACKING_OPS_REGISTER(m) {
  m.impl("mamba2_scan", TORCH_BOX(&mamba2_scan));
  m.impl("mamba2_scan_backward", TORCH_BOX(&mamba2_scan_backward));
}

}  // namespace packing_ops
