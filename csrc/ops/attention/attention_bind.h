// Shared by the attention family's bind files.
#pragma once

#include <optional>

#include "host/tensor_view.h"
#include "ops/attention/attention.h"

namespace packing_ops {

// The work-list of p; empty on the CPU, whose kernels do not need it.
Tensor made_plan(AttentionPlanParams p, const Tensor& anchor);

// Heads, head_dims and window, checked.
AttentionPlanParams plan_geometry(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                  std::optional<int64_t> head_dim_v, bool causal, int64_t window_left,
                                  int64_t window_right);

Tensor attention_plan(Tensor cu_seqlens_q, Tensor cu_seqlens_k, int64_t total_q, int64_t total_k, int64_t num_heads,
                      int64_t num_kv_heads, int64_t head_dim, bool causal, int64_t window_left, int64_t window_right,
                      std::optional<int64_t> head_dim_v, std::optional<Tensor> visible_end);

// visible_end, contiguous; keep it until the launch. Its values are checked on the CPU; on a GPU the plan checks them.
std::optional<Tensor> taken_visible_end(const std::optional<Tensor>& visible_end, const Documents& documents_q,
                                        const Documents& documents_k, bool causal, int64_t window_left,
                                        int64_t window_right, const Tensor& anchor, const char* anchor_name);

}  // namespace packing_ops
