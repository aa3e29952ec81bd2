// Boundaries: check -> allocate -> fill the params -> launch.
#include <tuple>

#include "host/launch.h"
#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/boundaries/boundaries.h"

namespace packing_ops {

namespace {

void check_index_vector(const Tensor& t, const char* name) {
  check_dtype(t, name, {DType::kInt32, DType::kInt64});
  check_rank(t, name, 1);
}

SlotParams slot_params(Tensor& cu_seqlens, int64_t total) {
  check_total(total, "total");
  take_cu_seqlens(cu_seqlens, "cu_seqlens", total, cu_seqlens, "cu_seqlens");
  SlotParams p;
  p.documents = documents_view(cu_seqlens, total);
  return p;
}

// [total], or with a batch of 1 before it.
LabelsParams labels_params(const Tensor& labels, Tensor& cu_seqlens, int64_t ignore_index) {
  check_dtype(labels, "labels", {DType::kInt64, DType::kInt32});
  if (labels.dim() != 1 && (labels.dim() != 2 || labels.size(0) != 1)) {
    fail("labels: expected [total] or [1, total], got ", describe(labels));
  }
  check_total(labels.numel(), "labels");
  take_cu_seqlens(cu_seqlens, "cu_seqlens", labels.numel(), labels, "labels");
  check_fits(ignore_index, "ignore_index", labels, "labels");
  LabelsParams p;
  p.documents = documents_view(cu_seqlens, labels.numel());
  p.labels = index_view(labels);
  p.ignore_index = ignore_index;
  return p;
}

// What cub::DeviceSelect and the sort of uids need.
std::optional<Tensor> runs_scratch(const Tensor& values, RunsParams& p) {
  std::optional<Tensor> memory = cuda_scratch(values, PACKING_OPS_CUDA(runs_scratch_cuda), p.size);
  p.scratch = data_or_null(memory);
  p.scratch_bytes = memory ? memory->numel() : 0;
  return memory;
}

}  // namespace

Tensor cu_seqlens_from_lengths(const Tensor& lengths) {
  check_index_vector(lengths, "lengths");
  const Tensor values = dense(lengths);
  Tensor cu_seqlens = empty({lengths.numel() + 1}, DType::kInt32, lengths);
  CuSeqlensFromLengthsParams p;
  p.lengths = index_view(values);
  p.num_documents = lengths.numel();
  p.cu_seqlens = static_cast<int32_t*>(cu_seqlens.data_ptr());
  launch(lengths, p, launch_cu_seqlens_from_lengths_cpu, PACKING_OPS_CUDA(launch_cu_seqlens_from_lengths_cuda));
  return cu_seqlens;
}

Tensor position_ids_from_cu_seqlens(Tensor cu_seqlens, int64_t total) {
  SlotParams p = slot_params(cu_seqlens, total);
  Tensor position_ids = empty({total}, DType::kInt64, cu_seqlens);
  p.position_ids = static_cast<int64_t*>(position_ids.data_ptr());
  launch(cu_seqlens, p, launch_position_ids_cpu, PACKING_OPS_CUDA(launch_position_ids_cuda));
  return position_ids;
}

Tensor seq_idx_from_cu_seqlens(Tensor cu_seqlens, int64_t total) {
  SlotParams p = slot_params(cu_seqlens, total);
  Tensor seq_idx = empty({total}, DType::kInt32, cu_seqlens);
  p.seq_idx = static_cast<int32_t*>(seq_idx.data_ptr());
  launch(cu_seqlens, p, launch_seq_idx_cpu, PACKING_OPS_CUDA(launch_seq_idx_cuda));
  return seq_idx;
}

std::tuple<Tensor, Tensor> cu_seqlens_from_position_ids(const Tensor& position_ids) {
  check_index_vector(position_ids, "position_ids");
  check_total(position_ids.numel(), "position_ids");
  const Tensor values = dense(position_ids);
  Tensor cu_seqlens = empty({position_ids.numel() + 1}, DType::kInt32, position_ids);
  Tensor count = empty({1}, DType::kInt64, position_ids);
  RunsParams p;
  p.values = index_view(values);
  p.size = position_ids.numel();
  p.cu_seqlens = static_cast<int32_t*>(cu_seqlens.data_ptr());
  p.count = static_cast<int64_t*>(count.data_ptr());
  const std::optional<Tensor> memory = runs_scratch(position_ids, p);
  launch(position_ids, p, launch_cu_seqlens_from_position_ids_cpu,
         PACKING_OPS_CUDA(launch_cu_seqlens_from_position_ids_cuda));
  return {cu_seqlens, count};
}

std::tuple<Tensor, Tensor> prompt_end_indices(const Tensor& uids) {
  check_index_vector(uids, "uids");
  const Tensor values = dense(uids);
  Tensor ends = empty({uids.numel()}, DType::kInt64, uids);
  Tensor count = empty({1}, DType::kInt64, uids);
  RunsParams p;
  p.values = index_view(values);
  p.size = uids.numel();
  p.ends = static_cast<int64_t*>(ends.data_ptr());
  p.count = static_cast<int64_t*>(count.data_ptr());
  const std::optional<Tensor> memory = runs_scratch(uids, p);
  launch(uids, p, launch_prompt_end_indices_cpu, PACKING_OPS_CUDA(launch_prompt_end_indices_cuda));
  return {ends, count};
}

Tensor mask_boundary_labels(const Tensor& labels, Tensor cu_seqlens, int64_t ignore_index) {
  const Tensor values = dense(labels);
  LabelsParams p = labels_params(values, cu_seqlens, ignore_index);
  Tensor out = empty_as(sizes_of(labels), labels);
  p.out = mutable_index_view(out);
  launch(labels, p, launch_mask_boundary_labels_cpu, PACKING_OPS_CUDA(launch_mask_boundary_labels_cuda));
  return out;
}

void mask_boundary_labels_shifted_(Tensor labels, Tensor cu_seqlens, int64_t ignore_index) {
  LabelsParams p = labels_params(labels, cu_seqlens, ignore_index);
  if (!labels.is_contiguous()) {
    fail("labels: expected contiguous (it is changed in place), got ", describe(labels), " with other strides");
  }
  p.out = mutable_index_view(labels);
  launch(labels, p, launch_mask_boundary_labels_shifted_cpu,
         PACKING_OPS_CUDA(launch_mask_boundary_labels_shifted_cuda));
}

Tensor shift_labels(const Tensor& labels, Tensor cu_seqlens, int64_t ignore_index) {
  const Tensor values = dense(labels);
  LabelsParams p = labels_params(values, cu_seqlens, ignore_index);
  Tensor out = empty_as(sizes_of(labels), labels);
  p.out = mutable_index_view(out);
  launch(labels, p, launch_shift_labels_cpu, PACKING_OPS_CUDA(launch_shift_labels_cuda));
  return out;
}

Tensor count_target_tokens(const Tensor& labels, Tensor cu_seqlens, int64_t ignore_index) {
  const Tensor values = dense(labels);
  LabelsParams p = labels_params(values, cu_seqlens, ignore_index);
  Tensor count = empty({}, DType::kInt64, labels);
  p.count = static_cast<int64_t*>(count.data_ptr());
  launch(labels, p, launch_count_target_tokens_cpu, PACKING_OPS_CUDA(launch_count_target_tokens_cuda));
  return count;
}

Tensor block_causal_mask(Tensor cu_seqlens, int64_t total, torch::headeronly::ScalarType dtype, int64_t window) {
  const SlotParams slots = slot_params(cu_seqlens, total);
  check(window >= 0, "window: expected 0 (all) or the number of visible keys, got ", window);
  BlockCausalMaskParams p;
  p.documents = slots.documents;
  p.window = window;
  p.dtype = dtype_of(dtype);
  check(p.dtype != DType::kOther, "dtype: expected bool, float32, float64, bfloat16 or float16, got ",
        dtype_name(dtype));
  Tensor mask = empty({total, total}, p.dtype, cu_seqlens);
  p.mask = mask.data_ptr();
  launch(cu_seqlens, p, launch_block_causal_mask_cpu, PACKING_OPS_CUDA(launch_block_causal_mask_cuda));
  return mask;
}

PACKING_OPS_REGISTER(m) {
  m.impl("cu_seqlens_from_lengths", TORCH_BOX(&cu_seqlens_from_lengths));
  m.impl("position_ids_from_cu_seqlens", TORCH_BOX(&position_ids_from_cu_seqlens));
  m.impl("seq_idx_from_cu_seqlens", TORCH_BOX(&seq_idx_from_cu_seqlens));
  m.impl("cu_seqlens_from_position_ids", TORCH_BOX(&cu_seqlens_from_position_ids));
  m.impl("prompt_end_indices", TORCH_BOX(&prompt_end_indices));
  m.impl("mask_boundary_labels", TORCH_BOX(&mask_boundary_labels));
  m.impl("mask_boundary_labels_shifted_", TORCH_BOX(&mask_boundary_labels_shifted_));
  m.impl("shift_labels", TORCH_BOX(&shift_labels));
  m.impl("count_target_tokens", TORCH_BOX(&count_target_tokens));
  m.impl("block_causal_mask", TORCH_BOX(&block_causal_mask));
}

}  // namespace packing_ops
