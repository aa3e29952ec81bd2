// Attention: check -> allocate -> fill the params -> launch.
#include "ops/attention/attention_bind.h"

#include <cmath>
#include <tuple>

#include "host/launch.h"
#include "host/tensor_check.h"

namespace packing_ops {

namespace {

constexpr auto kFloats = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

// lse, delta and sinks.
DType lse_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

AttentionTensor attention_tensor(const Tensor& t) {
  return {t.data_ptr(), t.stride(0), t.stride(1)};
}

void check_kv(const Tensor& t, const char* name, const Tensor& q) {
  check_rank(t, name, 3);
  check_same_device(t, name, q, "q");
  check_same_dtype(t, name, q, "q");
  check_last_dim_contiguous(t, name);
  if (t.size(2) != q.size(2)) fail(name, ": expected head_dim ", q.size(2), " like q, got ", describe(t));
}

struct Options {
  bool causal;
  std::optional<double> softmax_scale;  // 1 / sqrt(head_dim) without it
  int64_t window_left;
  int64_t window_right;
  double softcap;
};

template <class Params>
Params attention_params(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                        const Tensor& cu_seqlens_k, const std::optional<Tensor>& sinks, const Options& options) {
  check_dtype(q, "q", kFloats);
  check_rank(q, "q", 3);
  check_last_dim_contiguous(q, "q");
  if (q.size(2) < 1 || q.size(2) > kMaxHeadDim) {
    fail("q: expected a head_dim of 1 to ", kMaxHeadDim, ", got ", describe(q));
  }
  check_kv(k, "k", q);
  check_kv(v, "v", q);
  if (k.size(1) < 1 || q.size(1) < 1 || q.size(1) % k.size(1) != 0) {
    fail("k: expected a number of heads that divides the ", q.size(1), " heads of q, got ", describe(k));
  }
  check_shape(v, "v", sizes_of(k), "[total_k, num_kv_heads, head_dim] like k");
  check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q", q.size(0), q, "q");
  check_cu_seqlens(cu_seqlens_k, "cu_seqlens_k", k.size(0), q, "q");
  check(cu_seqlens_q.numel() == cu_seqlens_k.numel(), "cu_seqlens_k: expected as many documents as cu_seqlens_q (",
        cu_seqlens_q.numel() - 1, "), got ", cu_seqlens_k.numel() - 1);
  check(options.window_left >= -1 && options.window_right >= -1,
        "window_size: expected -1 (open) or the number of keys to each side, got (", options.window_left, ", ",
        options.window_right, ")");
  check(!options.causal || options.window_right <= 0, "window_size: expected nothing to the right with causal=True, ",
        "got (", options.window_left, ", ", options.window_right, ")");
  check(options.softcap >= 0, "softcap: expected 0 (off) or a positive bound of the scores, got ", options.softcap);

  Params p;
  p.documents_q = documents_view(cu_seqlens_q, q.size(0));
  p.documents_k = documents_view(cu_seqlens_k, k.size(0));
  p.dtype = dtype_of(q);
  p.num_q_heads = q.size(1);
  p.num_kv_heads = k.size(1);
  p.head_dim = q.size(2);
  p.softmax_scale = options.softmax_scale.value_or(1 / std::sqrt(static_cast<double>(p.head_dim)));
  p.softcap = options.softcap;
  p.window_left = options.window_left;
  p.window_right = options.causal ? 0 : options.window_right;
  p.q = attention_tensor(q);
  p.k = attention_tensor(k);
  p.v = attention_tensor(v);
  if (sinks) {
    check_same_device(*sinks, "sinks", q, "q");
    check_dtype(*sinks, "sinks", {lse_dtype(p.dtype)});
    check_shape(*sinks, "sinks", {p.num_q_heads}, "[num_q_heads]");
  }
  return p;
}

// What the CUDA kernels ask for beyond that.
void check_cuda_case(const Tensor& q, const Tensor& k) {
  if (!q.is_cuda()) return;
  check_dtype(q, "q", {DType::kBFloat16, DType::kFloat16, DType::kFloat32});
  if (dtype_of(q) != DType::kFloat32 && q.size(2) % 8 != 0) {
    fail("q: expected a head_dim of 8 to ", kMaxHeadDim, " in multiples of 8 (any up to ", kMaxHeadDim,
         " in float32), got ", describe(q));
  }
  const int64_t group = q.size(1) / k.size(1);
  check(group <= 1024, "k: expected at most 1024 heads of q for each of its heads, got ", group);
}

// 16-byte copies: a view that starts or steps off that grid is copied once.
Tensor aligned_rows(const Tensor& t) {
  if (!t.is_cuda() || dtype_of(t) == DType::kFloat32) return t;
  const auto off = [](int64_t x) { return x % 8 != 0; };
  const bool odd = reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 != 0 || (t.size(0) > 1 && off(t.stride(0))) ||
                   (t.size(1) > 1 && off(t.stride(1)));
  return odd ? torch::stable::clone(t) : t;
}

AttentionPlanParams plan_params(const VarlenAttentionParams& p) {
  AttentionPlanParams plan;
  plan.documents_q = p.documents_q;
  plan.documents_k = p.documents_k;
  plan.num_q_heads = p.num_q_heads;
  plan.num_kv_heads = p.num_kv_heads;
  plan.head_dim = p.head_dim;
  plan.window_left = p.window_left;
  plan.window_right = p.window_right;
  return plan;
}

// The caller's plan, checked as far as its size tells, or one made for this call.
Tensor plan_of(const std::optional<Tensor>& plan, const VarlenAttentionParams& p, const Tensor& q) {
  if (!plan) return made_plan(plan_params(p), q);
  check_dtype(*plan, "plan", {DType::kInt32});
  check_same_device(*plan, "plan", q, "q");
  check_shape(*plan, "plan", {q.is_cuda() ? attention_plan_size(plan_params(p)) : 0},
              "what attention_plan made for these totals and heads");
  return dense(*plan);
}

// delta on the CPU; on a GPU what attention_backward_scratch_cuda counts.
Tensor backward_scratch(const VarlenAttentionBackwardParams& p, const Tensor& q) {
#ifdef PACKING_OPS_WITH_CUDA
  if (q.is_cuda()) return scratch(attention_backward_scratch_cuda(p), q);
#endif
  return empty({q.size(1), q.size(0)}, lse_dtype(p.dtype), q);
}

// out, dout: shaped like q. Autograd gives gradients in any layout; only a strided last dimension costs a copy.
Tensor dense_rows(const Tensor& t) {
  return aligned_rows(t.size(2) <= 1 || t.stride(2) == 1 ? t : dense(t));
}

}  // namespace

std::tuple<Tensor, Tensor> varlen_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                            std::optional<Tensor> sinks, bool causal,
                                            std::optional<double> softmax_scale, int64_t window_left,
                                            int64_t window_right, double softcap, std::optional<Tensor> plan) {
  auto p = attention_params<VarlenAttentionParams>(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks,
                                                   {causal, softmax_scale, window_left, window_right, softcap});
  check_cuda_case(q, k);
  const Tensor rows_q = aligned_rows(q), rows_k = aligned_rows(k), rows_v = aligned_rows(v);
  p.q = attention_tensor(rows_q);
  p.k = attention_tensor(rows_k);
  p.v = attention_tensor(rows_v);
  const Tensor list = plan_of(plan, p, q);
  p.plan = static_cast<int32_t*>(list.data_ptr());
  const std::optional<Tensor> dense_sinks = dense(sinks);
  Tensor out = empty(sizes_of(q), p.dtype, q);
  Tensor lse = empty({q.size(1), q.size(0)}, lse_dtype(p.dtype), q);
  p.sinks = data_or_null(dense_sinks);
  p.out = attention_tensor(out);
  p.lse = lse.data_ptr();
  launch<VarlenAttentionParams>(q, p, launch_varlen_attention_cpu, PACKING_OPS_CUDA(launch_varlen_attention_cuda));
  return {out, lse};
}

// The gradient of sinks is empty where there are none.
std::tuple<Tensor, Tensor, Tensor, Tensor> varlen_attention_backward(
    const Tensor& dout, std::optional<Tensor> dlse, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& lse, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
    std::optional<Tensor> sinks, bool causal, std::optional<double> softmax_scale, int64_t window_left,
    int64_t window_right, double softcap, std::optional<Tensor> plan) {
  auto p = attention_params<VarlenAttentionBackwardParams>(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks,
                                                           {causal, softmax_scale, window_left, window_right, softcap});
  check_cuda_case(q, k);
  const Tensor rows_q = aligned_rows(q), rows_k = aligned_rows(k), rows_v = aligned_rows(v);
  p.q = attention_tensor(rows_q);
  p.k = attention_tensor(rows_k);
  p.v = attention_tensor(rows_v);
  const Tensor list = plan_of(plan, p, q);
  p.plan = static_cast<int32_t*>(list.data_ptr());
  const std::vector<int64_t> rows = {q.size(1), q.size(0)};
  for (const auto& [t, name] : {std::pair(&dout, "dout"), std::pair(&out, "out")}) {
    check_same_device(*t, name, q, "q");
    check_same_dtype(*t, name, q, "q");
    check_shape(*t, name, sizes_of(q), "[total_q, num_q_heads, head_dim] like q");
  }
  for (const auto& [t, name] : {std::pair(&lse, "lse"), std::pair(dlse ? &*dlse : &lse, "dlse")}) {
    check_same_device(*t, name, q, "q");
    check_dtype(*t, name, {lse_dtype(p.dtype)});
    check_shape(*t, name, rows, "[num_q_heads, total_q]");
  }
  const Tensor rows_dout = dense_rows(dout), rows_out = dense_rows(out), dense_lse = dense(lse);
  const std::optional<Tensor> dense_dlse = dense(dlse), dense_sinks = dense(sinks);
  const Tensor memory = backward_scratch(p, q);
  Tensor dq = empty(sizes_of(q), p.dtype, q);
  Tensor dk = empty(sizes_of(k), p.dtype, q);
  Tensor dv = empty(sizes_of(v), p.dtype, q);
  Tensor dsinks = empty({sinks ? q.size(1) : 0}, lse_dtype(p.dtype), q);
  p.sinks = data_or_null(dense_sinks);
  p.out = attention_tensor(rows_out);
  p.lse = dense_lse.data_ptr();
  p.dout = attention_tensor(rows_dout);
  p.dlse = data_or_null(dense_dlse);
  (q.is_cuda() ? p.scratch : p.delta) = memory.data_ptr();
  p.dq = attention_tensor(dq);
  p.dk = attention_tensor(dk);
  p.dv = attention_tensor(dv);
  p.dsinks = sinks ? dsinks.data_ptr() : nullptr;
  launch<VarlenAttentionBackwardParams>(q, p, launch_varlen_attention_backward_cpu,
                                        PACKING_OPS_CUDA(launch_varlen_attention_backward_cuda));
  return {dq, dk, dv, dsinks};
}

namespace {

void register_attention(torch::stable::detail::StableLibrary& m) {
  m.impl("attention_plan", TORCH_BOX(&attention_plan));
  m.impl("varlen_attention", TORCH_BOX(&varlen_attention));
  m.impl("varlen_attention_backward", TORCH_BOX(&varlen_attention_backward));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(packing_ops, CPU, m) {
  register_attention(m);
}
#ifdef PACKING_OPS_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(packing_ops, CUDA, m) {
  register_attention(m);
}
#endif

}  // namespace packing_ops
