#include <algorithm>
#include <cmath>
#include <limits>

#include "host/launch.h"
#include "host/tensor_check.h"
#include "ops/attention/attention_params.h"

namespace packing_ops {

namespace {

constexpr int64_t kLongestDocument = std::numeric_limits<int32_t>::max();  // cu_seqlens are int32
constexpr auto kFloats = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

void check_head_dim(const Tensor& t, const char* name) {
  const int64_t head_dim = t.size(t.dim() - 1);
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

// The dimensions of k and v: pages, or in the order of those of q.
const char* kv_layout(const Tensor& q, bool pages) {
  if (pages) return "[num_pages, page_size, num_kv_heads, head_dim]";
  return q.dim() == 4 ? "[1, num_kv_heads, total_k, head_dim]" : "[total_k, num_kv_heads, head_dim]";
}

void check_kv(const Tensor& t, const char* name, const Tensor& q, bool pages) {
  if (t.dim() != (pages ? 4 : q.dim()) || (!pages && t.dim() == 4 && t.size(0) != 1)) {
    fail(name, ": expected ", kv_layout(q, pages), pages ? "" : " like q", ", got ", describe(t));
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

}  // namespace

DType lse_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

void check_qkv(const Tensor& q, const Tensor& k, const Tensor& v, Rows (*rows_of_keys)(const Tensor&)) {
  const bool pages = rows_of_keys == rows_of_pages;
  check_q(q);
  check_kv(k, "k", q, pages);
  check_kv(v, "v", q, pages);
  check_head_dim(v, "v");
  const Rows shape_q = input_rows(q), shape_k = rows_of_keys(k), shape_v = rows_of_keys(v);
  if (shape_k.head_dim != shape_q.head_dim) {
    fail("k: expected head_dim ", shape_q.head_dim, " like q, got ", describe(k));
  }
  if (shape_k.num_heads < 1 || shape_q.num_heads < 1 || shape_q.num_heads % shape_k.num_heads != 0) {
    fail("k: expected a number of heads that divides the ", shape_q.num_heads, " heads of q, got ", describe(k));
  }
  // A total of pages counts what is between them: strides, which may differ.
  const bool same_rows = pages ? v.size(0) == k.size(0) && v.size(1) == k.size(1) : shape_v.total == shape_k.total;
  if (!same_rows || shape_v.num_heads != shape_k.num_heads) {
    fail("v: expected ", kv_layout(q, pages), pages ? " with the pages" : " with the rows", " and heads of k (",
         describe(k), "), got ", describe(v));
  }
}

void set_call(VarlenAttentionParams& p, const Tensor& q, const Rows& k, const Rows& v,
              const std::optional<Tensor>& sinks, const AttentionCallOptions& options) {
  check(options.window_left >= -1 && options.window_right >= -1,
        "window_size: expected -1 (open) or the number of keys to each side, got (", options.window_left, ", ",
        options.window_right, ")");
  check(!options.causal || options.window_right <= 0, "window_size: expected nothing to the right with causal=True, ",
        "got (", options.window_left, ", ", options.window_right, ")");
  const Rows shape_q = input_rows(q);
  p.dtype = dtype_of(q);
  p.num_q_heads = shape_q.num_heads;
  p.num_kv_heads = k.num_heads;
  p.head_dim = shape_q.head_dim;
  p.head_dim_v = v.head_dim;
  p.softmax_scale = options.softmax_scale.value_or(1 / std::sqrt(static_cast<double>(p.head_dim)));
  const bool finite =
      p.dtype == DType::kFloat64 ? std::isfinite(p.softmax_scale) : std::isfinite(static_cast<float>(p.softmax_scale));
  check(finite, "softmax_scale: expected a finite number, got ", p.softmax_scale);
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
}

void check_cuda_case(const VarlenAttentionParams& p, const Tensor& q, const Tensor& v) {
  if (!q.is_cuda()) return;
  check_dtype(q, "q", {DType::kBFloat16, DType::kFloat16, DType::kFloat32});
  for (const auto& [t, name] : {std::pair(&q, "q"), std::pair(&v, "v")}) {
    if (p.dtype != DType::kFloat32 && t->size(t->dim() - 1) % 8 != 0) {
      fail(name, ": expected a head_dim of 8 to ", kMaxHeadDim, " in multiples of 8 (any up to ", kMaxHeadDim,
           " in float32), got ", describe(*t));
    }
  }
  const int64_t group = p.num_q_heads / p.num_kv_heads;
  check(group <= kMaxGroup, "k: expected at most ", kMaxGroup, " heads of q for each of its heads, got ", group);
}

Tensor plan_of(const std::optional<Tensor>& plan, const VarlenAttentionParams& p, const Tensor& q) {
  if (!plan) return made_plan(plan_params(p), q);
  check_dtype(*plan, "plan", {DType::kInt32});
  check_same_device(*plan, "plan", q, "q");
  check_shape(*plan, "plan", {q.is_cuda() ? attention_plan_size(plan_params(p)) : 0},
              "what attention_plan made for these totals and heads");
  return dense(*plan);
}

std::tuple<Tensor, Tensor> run_forward(VarlenAttentionParams& p, const Tensor& q, const std::optional<Tensor>& sinks,
                                       const std::optional<Tensor>& plan) {
  const Tensor list = plan_of(plan, p, q);
  p.plan = static_cast<int32_t*>(list.data_ptr());
  const std::optional<Tensor> dense_sinks = dense(sinks);
  Tensor out = empty(output_sizes(q, p.head_dim_v), p.dtype, q);
  Tensor lse = empty({p.num_q_heads, p.documents_q.total}, lse_dtype(p.dtype), q);
  const std::optional<Tensor> memory = cuda_scratch(q, PACKING_OPS_CUDA(attention_scratch_cuda), p);
  p.scratch = data_or_null(memory);
  p.sinks = data_or_null(dense_sinks);
  p.out = output_rows(out).memory;
  p.lse = lse.data_ptr();
  launch<VarlenAttentionParams>(q, p, launch_varlen_attention_cpu, PACKING_OPS_CUDA(launch_varlen_attention_cuda));
  return {out, lse};
}

}  // namespace packing_ops
