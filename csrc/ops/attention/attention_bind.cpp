// Attention: check -> allocate -> fill the params -> launch.
#include "ops/attention/attention_bind.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "host/launch.h"
#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/attention/attention_layout.h"

namespace packing_ops {

namespace {

constexpr int64_t kLongestDocument = std::numeric_limits<int32_t>::max();  // cu_seqlens are int32
constexpr auto kFloats = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

// lse, delta and sinks.
DType lse_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

void check_head_dim(const Tensor& t, const char* name) {
  const int64_t head_dim = input_rows(t).head_dim;
  if (head_dim < 1 || head_dim > kMaxHeadDim) {
    fail(name, ": expected a head_dim of 1 to ", kMaxHeadDim, ", got ", describe(t));
  }
}

void check_q(const Tensor& q) {
  check_dtype(q, "q", kFloats);
  if (q.dim() != 3 && (q.dim() != 4 || q.size(0) != 1)) {
    fail("q: expected [total_q, num_q_heads, head_dim] or [1, num_q_heads, total_q, head_dim], got ", describe(q));
  }
  check_last_dim_contiguous(q, "q");
  check_head_dim(q, "q");
}

// The dimensions of k and v, in the order of those of q.
const char* kv_layout(const Tensor& q) {
  return q.dim() == 4 ? "[1, num_kv_heads, total_k, head_dim]" : "[total_k, num_kv_heads, head_dim]";
}

void check_kv(const Tensor& t, const char* name, const Tensor& q) {
  if (t.dim() != q.dim() || (t.dim() == 4 && t.size(0) != 1)) {
    fail(name, ": expected ", kv_layout(q), " like q, got ", describe(t));
  }
  check_same_device(t, name, q, "q");
  check_same_dtype(t, name, q, "q");
  check_last_dim_contiguous(t, name);
}

// Checked in the type of the scores; a softcap beyond its range is off.
double softcap_of(double softcap, DType dtype) {
  const bool wide = dtype == DType::kFloat64;
  const double min_softcap = wide ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
  const double max_softcap = wide ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  check(softcap == 0 || softcap >= min_softcap, "softcap: expected 0 (off) or a bound of the scores of at least ",
        min_softcap, ", got ", softcap);
  return softcap > max_softcap ? 0 : softcap;
}

struct Options {
  bool causal;
  std::optional<double> softmax_scale;  // 1 / sqrt(head_dim) without it
  int64_t window_left;
  int64_t window_right;
  double softcap;
};

template <class Params>
Params attention_params(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& cu_seqlens_q, Tensor& cu_seqlens_k,
                        const std::optional<Tensor>& sinks, const Options& options) {
  check_q(q);
  check_kv(k, "k", q);
  check_kv(v, "v", q);
  check_head_dim(v, "v");
  const Rows shape_q = input_rows(q), shape_k = input_rows(k), shape_v = input_rows(v);
  if (shape_k.head_dim != shape_q.head_dim) {
    fail("k: expected head_dim ", shape_q.head_dim, " like q, got ", describe(k));
  }
  if (shape_k.num_heads < 1 || shape_q.num_heads < 1 || shape_q.num_heads % shape_k.num_heads != 0) {
    fail("k: expected a number of heads that divides the ", shape_q.num_heads, " heads of q, got ", describe(k));
  }
  if (shape_v.total != shape_k.total || shape_v.num_heads != shape_k.num_heads) {
    fail("v: expected ", kv_layout(q), " with the rows and heads of k (", describe(k), "), got ", describe(v));
  }
  take_cu_seqlens(cu_seqlens_q, "cu_seqlens_q", shape_q.total, q, "q");
  take_cu_seqlens(cu_seqlens_k, "cu_seqlens_k", shape_k.total, q, "q");
  check(cu_seqlens_q.numel() == cu_seqlens_k.numel(), "cu_seqlens_k: expected as many documents as cu_seqlens_q (",
        cu_seqlens_q.numel() - 1, "), got ", cu_seqlens_k.numel() - 1);
  check(options.window_left >= -1 && options.window_right >= -1,
        "window_size: expected -1 (open) or the number of keys to each side, got (", options.window_left, ", ",
        options.window_right, ")");
  check(!options.causal || options.window_right <= 0, "window_size: expected nothing to the right with causal=True, ",
        "got (", options.window_left, ", ", options.window_right, ")");

  Params p;
  p.documents_q = documents_view(cu_seqlens_q, shape_q.total);
  p.documents_k = documents_view(cu_seqlens_k, shape_k.total);
  p.dtype = dtype_of(q);
  p.num_q_heads = shape_q.num_heads;
  p.num_kv_heads = shape_k.num_heads;
  p.head_dim = shape_q.head_dim;
  p.head_dim_v = shape_v.head_dim;
  p.softmax_scale = options.softmax_scale.value_or(1 / std::sqrt(static_cast<double>(p.head_dim)));
  p.softcap = softcap_of(options.softcap, p.dtype);
  // A longer window than any document is one of the longest, and the kernels can reckon with it.
  p.window_left = std::min<int64_t>(options.window_left, kLongestDocument);
  p.window_right = options.causal ? 0 : std::min<int64_t>(options.window_right, kLongestDocument);
  p.device = q.get_device_index();
  if (sinks) {
    check_same_device(*sinks, "sinks", q, "q");
    check_dtype(*sinks, "sinks", {lse_dtype(p.dtype)});
    check_shape(*sinks, "sinks", {p.num_q_heads}, "[num_q_heads]");
  }
  return p;
}

// What the CUDA kernels ask for beyond that.
void check_cuda_case(const VarlenAttentionParams& p, const Tensor& q, const Tensor& v) {
  if (!q.is_cuda()) return;
  check_dtype(q, "q", {DType::kBFloat16, DType::kFloat16, DType::kFloat32});
  for (const auto& [t, name] : {std::pair(&q, "q"), std::pair(&v, "v")}) {
    if (p.dtype != DType::kFloat32 && input_rows(*t).head_dim % 8 != 0) {
      fail(name, ": expected a head_dim of 8 to ", kMaxHeadDim, " in multiples of 8 (any up to ", kMaxHeadDim,
           " in float32), got ", describe(*t));
    }
  }
  const int64_t group = p.num_q_heads / p.num_kv_heads;
  check(group <= kMaxGroup, "k: expected at most ", kMaxGroup, " heads of q for each of its heads, got ", group);
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
  return empty({p.num_q_heads, p.documents_q.total}, lse_dtype(p.dtype), q);
}

}  // namespace

std::tuple<Tensor, Tensor> varlen_attention(const Tensor& q, const Tensor& k, const Tensor& v, Tensor cu_seqlens_q,
                                            Tensor cu_seqlens_k, std::optional<Tensor> sinks, bool causal,
                                            std::optional<double> softmax_scale, int64_t window_left,
                                            int64_t window_right, double softcap, std::optional<Tensor> plan,
                                            std::optional<Tensor> visible_end) {
  auto p = attention_params<VarlenAttentionParams>(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks,
                                                   {causal, softmax_scale, window_left, window_right, softcap});
  check_cuda_case(p, q, v);
  const std::optional<Tensor> ends =
      taken_visible_end(visible_end, p.documents_q, p.documents_k, causal, window_left, window_right, q, "q");
  p.visible_end = static_cast<const int32_t*>(data_or_null(ends));
  const Tensor rows_q = aligned_rows(q), rows_k = aligned_rows(k), rows_v = aligned_rows(v);
  p.q = input_rows(rows_q).memory;
  p.k = input_rows(rows_k).memory;
  p.v = input_rows(rows_v).memory;
  const Tensor list = plan_of(plan, p, q);
  p.plan = static_cast<int32_t*>(list.data_ptr());
  const std::optional<Tensor> dense_sinks = dense(sinks);
  Tensor out = empty(output_sizes(q, p.head_dim_v), p.dtype, q);
  Tensor lse = empty({p.num_q_heads, p.documents_q.total}, lse_dtype(p.dtype), q);
  p.sinks = data_or_null(dense_sinks);
  p.out = output_rows(out).memory;
  p.lse = lse.data_ptr();
  launch<VarlenAttentionParams>(q, p, launch_varlen_attention_cpu, PACKING_OPS_CUDA(launch_varlen_attention_cuda));
  return {out, lse};
}

// The gradient of sinks is empty where there are none.
std::tuple<Tensor, Tensor, Tensor, Tensor> varlen_attention_backward(
    const Tensor& dout, std::optional<Tensor> dlse, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, std::optional<Tensor> sinks,
    bool causal, std::optional<double> softmax_scale, int64_t window_left, int64_t window_right, double softcap,
    std::optional<Tensor> plan, std::optional<Tensor> visible_end) {
  auto p = attention_params<VarlenAttentionBackwardParams>(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks,
                                                           {causal, softmax_scale, window_left, window_right, softcap});
  check_cuda_case(p, q, v);
  const std::optional<Tensor> ends =
      taken_visible_end(visible_end, p.documents_q, p.documents_k, causal, window_left, window_right, q, "q");
  p.visible_end = static_cast<const int32_t*>(data_or_null(ends));
  const Tensor rows_q = aligned_rows(q), rows_k = aligned_rows(k), rows_v = aligned_rows(v);
  p.q = input_rows(rows_q).memory;
  p.k = input_rows(rows_k).memory;
  p.v = input_rows(rows_v).memory;
  const Tensor list = plan_of(plan, p, q);
  p.plan = static_cast<int32_t*>(list.data_ptr());
  const std::vector<int64_t> rows = {p.num_q_heads, p.documents_q.total};
  const char* tokens_first =
      q.dim() == 4 ? "[1, total_q, num_q_heads, head_dim of v]" : "[total_q, num_q_heads, head_dim of v]";
  for (const auto& [t, name] : {std::pair(&dout, "dout"), std::pair(&out, "out")}) {
    check_same_device(*t, name, q, "q");
    check_same_dtype(*t, name, q, "q");
    check_shape(*t, name, output_sizes(q, p.head_dim_v), tokens_first);
  }
  for (const auto& [t, name] : {std::pair(&lse, "lse"), std::pair(dlse ? &*dlse : &lse, "dlse")}) {
    check_same_device(*t, name, q, "q");
    check_dtype(*t, name, {lse_dtype(p.dtype)});
    check_shape(*t, name, rows, "[num_q_heads, total_q]");
  }
  const Tensor rows_dout = dense_rows(dout), rows_out = dense_rows(out), dense_lse = dense(lse);
  const std::optional<Tensor> dense_dlse = dense(dlse), dense_sinks = dense(sinks);
  const Tensor memory = backward_scratch(p, q);
  Tensor dq = empty_input_rows(q), dk = empty_input_rows(k), dv = empty_input_rows(v);
  Tensor dsinks = empty({sinks ? p.num_q_heads : 0}, lse_dtype(p.dtype), q);
  p.sinks = data_or_null(dense_sinks);
  p.out = output_rows(rows_out).memory;
  p.lse = dense_lse.data_ptr();
  p.dout = output_rows(rows_dout).memory;
  p.dlse = data_or_null(dense_dlse);
  (q.is_cuda() ? p.scratch : p.delta) = memory.data_ptr();
  p.dq = input_rows(dq).memory;
  p.dk = input_rows(dk).memory;
  p.dv = input_rows(dv).memory;
  p.dsinks = sinks ? dsinks.data_ptr() : nullptr;
  launch<VarlenAttentionBackwardParams>(q, p, launch_varlen_attention_backward_cpu,
                                        PACKING_OPS_CUDA(launch_varlen_attention_backward_cuda));
  return {dq, dk, dv, dsinks};
}

PACKING_OPS_REGISTER(m) {
  m.impl("attention_plan", TORCH_BOX(&attention_plan));
  m.impl("varlen_attention", TORCH_BOX(&varlen_attention));
  m.impl("varlen_attention_backward", TORCH_BOX(&varlen_attention_backward));
}

}  // namespace packing_ops
