// Prefix trees: check -> plan the trie and its bins -> allocate -> write the rows.
#include <algorithm>
#include <limits>
#include <tuple>

#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/packing/packing_bind.h"
#include "ops/packing/packing_tree_plan.h"

namespace packing_ops {

namespace {

// On the CPU, dense; `p` points into them.
struct PrefixTreeInputs {
  Tensor tokens;
  Tensor cu_seqlens;
  std::optional<Tensor> groups;
};

PrefixTreeInputs take_prefix_tree_inputs(const Tensor& tokens, const Tensor& cu_seqlens,
                                         const std::optional<Tensor>& groups, PrefixTreeParams& p) {
  check_dtype(tokens, "tokens", {DType::kInt32, DType::kInt64});
  check_rank(tokens, "tokens", 1);
  check_total(tokens.numel(), "tokens");
  check_dtype(cu_seqlens, "cu_seqlens", {DType::kInt32, DType::kInt64});
  PrefixTreeInputs on_cpu{dense(on_host(tokens)), dense(on_host(cu_seqlens)), std::nullopt};
  take_cu_seqlens(on_cpu.cu_seqlens, "cu_seqlens", tokens.numel(), on_cpu.tokens, "tokens");
  p.tokens = index_view(on_cpu.tokens);
  p.cu_seqlens = static_cast<const int32_t*>(on_cpu.cu_seqlens.data_ptr());
  p.num_samples = cu_seqlens.numel() - 1;
  check(p.cu_seqlens[p.num_samples] == tokens.numel(), "cu_seqlens: expected to end at total=", tokens.numel(),
        " like tokens, got ", p.cu_seqlens[p.num_samples]);
  if (!groups) return on_cpu;
  check_dtype(*groups, "groups", {DType::kInt32, DType::kInt64});
  check_shape(*groups, "groups", {p.num_samples}, "[samples] like cu_seqlens");
  on_cpu.groups = dense(on_host(*groups));
  p.groups = index_view(*on_cpu.groups);
  return on_cpu;
}

}  // namespace

// (rows, segments, parents, position_ids, row_of_token, copies, bin_offsets, sample_bins, repeated)
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> pack_prefix_tree(
    const Tensor& tokens, const Tensor& cu_seqlens, std::optional<Tensor> groups, std::optional<int64_t> capacity,
    int64_t min_shared) {
  check(!capacity || *capacity >= 1, "capacity: expected at least 1, got ", capacity.value_or(1));
  check(min_shared >= 1, "min_shared: expected at least 1, got ", min_shared);
  PrefixTreePlan plan;
  PrefixTreeParams p;
  const PrefixTreeInputs inputs = take_prefix_tree_inputs(tokens, cu_seqlens, groups, p);
  p.capacity = capacity.value_or(std::numeric_limits<int64_t>::max());
  p.min_shared = std::min<int64_t>(min_shared, std::numeric_limits<int32_t>::max());
  p.plan = &plan;
  launch_plan_prefix_tree_cpu(p);

  const int64_t num_segments = static_cast<int64_t>(plan.segments.size());
  Tensor rows = empty({plan.num_rows}, DType::kInt64, inputs.tokens);
  Tensor segments = empty({num_segments + 1}, DType::kInt32, inputs.tokens);
  Tensor parents = empty({num_segments}, DType::kInt32, inputs.tokens);
  Tensor position_ids = empty({plan.num_rows}, DType::kInt64, inputs.tokens);
  Tensor row_of_token = empty({tokens.numel()}, DType::kInt64, inputs.tokens);
  Tensor copies = empty({plan.num_rows}, DType::kInt64, inputs.tokens);
  Tensor bin_offsets = empty({static_cast<int64_t>(plan.bin_offsets.size())}, DType::kInt64, inputs.tokens);
  Tensor sample_bins = empty({p.num_samples}, DType::kInt64, inputs.tokens);
  Tensor repeated = empty({2}, DType::kInt64, inputs.tokens);
  p.rows = outputs(rows);
  p.segments = static_cast<int32_t*>(segments.data_ptr());
  p.parents = static_cast<int32_t*>(parents.data_ptr());
  p.position_ids = outputs(position_ids);
  p.row_of_token = outputs(row_of_token);
  p.copies = outputs(copies);
  p.bin_offsets = outputs(bin_offsets);
  p.sample_bins = outputs(sample_bins);
  p.repeated = outputs(repeated);
  launch_write_prefix_tree_cpu(p);
  return {rows, segments, parents, position_ids, row_of_token, copies, bin_offsets, sample_bins, repeated};
}

PACKING_OPS_REGISTER(m) {
  m.impl("pack_prefix_tree", TORCH_BOX(&pack_prefix_tree));
}

}  // namespace packing_ops
