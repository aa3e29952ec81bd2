// Attention: check -> allocate -> fill the params -> launch.
#include "ops/attention/attention_bind.h"

#include <tuple>

#include "host/launch.h"
#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/attention/attention_params.h"

namespace packing_ops {

namespace {

// Of the paths of a prefix tree: each key's row of k. On the CPU the values are checked too.
void take_row_of_key(VarlenAttentionParams& p, Tensor& row_of_key, int64_t rows, const Tensor& q) {
  check_dtype(row_of_key, "row_of_key", {DType::kInt32});
  check_same_device(row_of_key, "row_of_key", q, "q");
  check(rows >= kForkAlignment, "row_of_key: expected None beside a k of fewer than ", kForkAlignment, " rows, got ",
        rows);
  row_of_key = dense(row_of_key);
  p.pages.row_of_key = static_cast<const int32_t*>(row_of_key.data_ptr());
  p.pages.num_rows = rows;
  for (int64_t i = 0; q.is_cpu() && i < p.documents_k.num_documents; ++i) {
    const Interval<int64_t> keys = p.documents_k[i];
    for (int64_t key = keys.begin; key < keys.end; ++key) {
      const int64_t row = p.pages.row_of_key[key], in_block = (key - keys.begin) % kForkAlignment;
      const bool follows = in_block == 0 || row == p.pages.row_of_key[key - 1] + 1;
      check(row >= 0 && row < rows && follows, "row_of_key: expected rows of k that follow each other in every ",
            kForkAlignment, " keys of a path, at index ", key, ", got ", row);
    }
  }
}

template <class Params>
Params attention_params(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& cu_seqlens_q, Tensor& cu_seqlens_k,
                        const std::optional<Tensor>& sinks, const AttentionCallOptions& options,
                        std::optional<Tensor>& row_of_key) {
  check_qkv(q, k, v, input_rows);
  if (row_of_key) check_rank(*row_of_key, "row_of_key", 1);
  const int64_t total_q = input_rows(q).total, rows_k = input_rows(k).total;
  const int64_t total_k = row_of_key ? row_of_key->numel() : rows_k;
  take_cu_seqlens(cu_seqlens_q, "cu_seqlens_q", total_q, q, "q");
  take_cu_seqlens(cu_seqlens_k, "cu_seqlens_k", total_k, q, "q");
  check(cu_seqlens_q.numel() == cu_seqlens_k.numel(), "cu_seqlens_k: expected as many documents as cu_seqlens_q (",
        cu_seqlens_q.numel() - 1, "), got ", cu_seqlens_k.numel() - 1);
  Params p;
  p.documents_q = documents_view(cu_seqlens_q, total_q);
  p.documents_k = documents_view(cu_seqlens_k, total_k);
  if (row_of_key) take_row_of_key(p, *row_of_key, rows_k, q);
  set_call(p, q, input_rows(k), input_rows(v), sinks, options);
  check_cuda_case(p, q, v);
  return p;
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
                                            std::optional<Tensor> visible_end, std::optional<Tensor> row_of_key) {
  auto p =
      attention_params<VarlenAttentionParams>(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks,
                                              {causal, softmax_scale, window_left, window_right, softcap}, row_of_key);
  const std::optional<Tensor> ends =
      taken_visible_end(visible_end, p.documents_q, p.documents_k, causal, window_left, window_right, q, "q");
  p.visible_end = static_cast<const int32_t*>(data_or_null(ends));
  const Tensor rows_q = aligned_rows(q), rows_k = aligned_rows(k), rows_v = aligned_rows(v);
  p.q = input_rows(rows_q).memory;
  p.k = input_rows(rows_k).memory;
  p.v = input_rows(rows_v).memory;
  return run_forward(p, q, sinks, plan);
}

// dk and dv have a row for each key, also with row_of_key. The gradient of sinks is empty without sinks.
std::tuple<Tensor, Tensor, Tensor, Tensor> varlen_attention_backward(
    const Tensor& dout, std::optional<Tensor> dlse, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, std::optional<Tensor> sinks,
    bool causal, std::optional<double> softmax_scale, int64_t window_left, int64_t window_right, double softcap,
    std::optional<Tensor> plan, std::optional<Tensor> visible_end, std::optional<Tensor> row_of_key) {
  auto p = attention_params<VarlenAttentionBackwardParams>(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks,
                                                           {causal, softmax_scale, window_left, window_right, softcap},
                                                           row_of_key);
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
  Tensor dq = empty_input_rows(q, p.documents_q.total);
  Tensor dk = empty_input_rows(k, p.documents_k.total), dv = empty_input_rows(v, p.documents_k.total);
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
