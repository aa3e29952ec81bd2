// The arguments that every attention call has: checked, and in the params.
#pragma once

#include <optional>
#include <tuple>

#include "ops/attention/attention_bind.h"
#include "ops/attention/attention_layout.h"

namespace packing_ops {

// Of lse, delta and sinks.
DType lse_dtype(DType dtype);

// rows_of_keys: input_rows, or rows_of_pages for k and v in pages.
void check_qkv(const Tensor& q, const Tensor& k, const Tensor& v, Rows (*rows_of_keys)(const Tensor&));

// What p holds of q, of the rows of k and v, of sinks and of the options, except pointers.
void set_call(VarlenAttentionParams& p, const Tensor& q, const Rows& k, const Rows& v,
              const std::optional<Tensor>& sinks, const AttentionCallOptions& options);

// What the CUDA kernels ask for beyond that.
void check_cuda_case(const VarlenAttentionParams& p, const Tensor& q, const Tensor& v);

// The caller's plan, checked as far as its size tells, or one made for this call.
Tensor plan_of(const std::optional<Tensor>& plan, const VarlenAttentionParams& p, const Tensor& q);

// (out, lse) of params that hold all but plan, sinks, out and lse.
std::tuple<Tensor, Tensor> run_forward(VarlenAttentionParams& p, const Tensor& q, const std::optional<Tensor>& sinks,
                                       const std::optional<Tensor>& plan);

}  // namespace packing_ops
