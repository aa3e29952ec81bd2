// The plan: check -> allocate -> fill the params -> launch. And which kernels serve a call.
#include <string>

#include "host/launch.h"
#include "host/tensor_check.h"
#include "ops/attention/attention_bind.h"
#include "ops/attention/attention_kernels.h"

namespace packing_ops {

Tensor made_plan(AttentionPlanParams p, const Tensor& anchor) {
  Tensor plan = empty({anchor.is_cuda() ? attention_plan_size(p) : 0}, DType::kInt32, anchor);
  if (!anchor.is_cuda()) return plan;
#ifdef PACKING_OPS_WITH_CUDA
  p.plan = static_cast<int32_t*>(plan.data_ptr());
  p.device = anchor.get_device_index();
  CudaScope scope(anchor);
  launch_attention_plan_cuda(p, scope.launch());
  scope.finish();
#endif
  return plan;
}

AttentionPlanParams plan_geometry(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                  std::optional<int64_t> head_dim_v, bool causal, int64_t window_left,
                                  int64_t window_right) {
  check(num_kv_heads >= 1 && num_heads >= 1 && num_heads % num_kv_heads == 0,
        "num_kv_heads: expected a number that divides num_heads (", num_heads, "), got ", num_kv_heads);
  check(head_dim >= 1 && head_dim <= kMaxHeadDim, "head_dim: expected 1 to ", kMaxHeadDim, ", got ", head_dim);
  const int64_t of_v = head_dim_v.value_or(head_dim);
  check(of_v >= 1 && of_v <= kMaxHeadDim, "head_dim_v: expected 1 to ", kMaxHeadDim, ", got ", of_v);
  check(!causal || window_right <= 0, "window_size: expected nothing to the right with causal=True, got (", window_left,
        ", ", window_right, ")");
  AttentionPlanParams p;
  p.num_q_heads = num_heads;
  p.num_kv_heads = num_kv_heads;
  p.head_dim = head_dim;
  p.head_dim_v = of_v;
  p.window_left = window_left;
  p.window_right = causal ? 0 : window_right;
  return p;
}

// Options as in varlen_attention; good for every call with these lengths, heads, head_dims, window and visible_end.
Tensor attention_plan(Tensor cu_seqlens_q, Tensor cu_seqlens_k, int64_t total_q, int64_t total_k, int64_t num_heads,
                      int64_t num_kv_heads, int64_t head_dim, bool causal, int64_t window_left, int64_t window_right,
                      std::optional<int64_t> head_dim_v, std::optional<Tensor> visible_end) {
  check(total_q >= 0 && total_k >= 0, "total_q, total_k: expected 0 or more, got ", total_q, " and ", total_k);
  take_cu_seqlens(cu_seqlens_q, "cu_seqlens_q", total_q, cu_seqlens_q, "cu_seqlens_q");
  take_cu_seqlens(cu_seqlens_k, "cu_seqlens_k", total_k, cu_seqlens_q, "cu_seqlens_q");
  check(cu_seqlens_q.numel() == cu_seqlens_k.numel(), "cu_seqlens_k: expected as many documents as cu_seqlens_q (",
        cu_seqlens_q.numel() - 1, "), got ", cu_seqlens_k.numel() - 1);
  AttentionPlanParams p =
      plan_geometry(num_heads, num_kv_heads, head_dim, head_dim_v, causal, window_left, window_right);
  p.documents_q = documents_view(cu_seqlens_q, total_q);
  p.documents_k = documents_view(cu_seqlens_k, total_k);
  const std::optional<Tensor> ends = taken_visible_end(visible_end, p.documents_q, p.documents_k, causal, window_left,
                                                       window_right, cu_seqlens_q, "cu_seqlens_q");
  p.visible_end = static_cast<const int32_t*>(data_or_null(ends));
  return made_plan(p, cu_seqlens_q);
}

// "forward kernels, backward kernels" of a call; device -1 is the CPU.
std::string attention_kernels(bool half, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t device,
                              std::optional<int64_t> head_dim_v) {
  check(num_kv_heads >= 1 && num_heads >= 1 && num_heads % num_kv_heads == 0,
        "num_kv_heads: expected a number that divides num_heads (", num_heads, "), got ", num_kv_heads);
  if (device < 0) return "cpu, cpu";
#ifdef PACKING_OPS_WITH_CUDA
  VarlenAttentionParams p;
  p.dtype = half ? DType::kBFloat16 : DType::kFloat32;
  p.num_q_heads = num_heads;
  p.num_kv_heads = num_kv_heads;
  p.head_dim = head_dim;
  p.head_dim_v = head_dim_v.value_or(head_dim);
  p.device = static_cast<int32_t>(device);
  return std::string(attention_forward_kernels_cuda(p)) + ", " + attention_backward_kernels_cuda(p);
#else
  fail("device: expected -1 (the CPU) without CUDA kernels, got ", device);
#endif
}

STABLE_TORCH_LIBRARY_IMPL(packing_ops, CompositeExplicitAutograd, m) {
  m.impl("attention_kernels", TORCH_BOX(&attention_kernels));
}

}  // namespace packing_ops
