// Checks of values: check -> fill the params -> launch.
#include <string>
#include <tuple>

#include "host/launch.h"
#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/boundaries/boundaries.h"

namespace packing_ops {

namespace {

void check_index_vector(const Tensor& t, const char* name, const Tensor& other) {
  check_dtype(t, name, {DType::kInt32, DType::kInt64});
  check_rank(t, name, 1);
  check_same_device(t, name, other, "cu_seq_lens_q");
  if (t.numel() < 1) fail(name, ": expected [num_documents + 1] with at least one entry, got ", describe(t));
}

// What a difference means, by the words of the schema.
Fault fault_of(const std::string& wanted) {
  if (wanted == "as it was") return Fault::kValuesChanged;
  if (wanted == "depths") return Fault::kNoDepth;
  check(wanted == "segments", "wanted: expected 'as it was', 'depths' or 'segments', got ", wanted);
  return Fault::kPathsOfOtherTree;
}

}  // namespace

// mask bool [batch, seqlen], position_ids int32 or int64 [batch or 1, seqlen]. ValueError: on the CPU in this call, on
// CUDA in a later one.
void check_documents(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, std::optional<Tensor> mask,
                     std::optional<Tensor> position_ids, int64_t batch, int64_t seqlen) {
  check(batch >= 0 && seqlen >= 0, "batch, seqlen: expected 0 or more, got ", batch, " and ", seqlen);
  check_index_vector(cu_seqlens_q, "cu_seq_lens_q", cu_seqlens_q);
  check_index_vector(cu_seqlens_k, "cu_seq_lens_k", cu_seqlens_q);
  check(cu_seqlens_q.numel() == cu_seqlens_k.numel(), "cu_seq_lens_k: expected as many documents as cu_seq_lens_q (",
        cu_seqlens_q.numel() - 1, "), got ", cu_seqlens_k.numel() - 1);
  if (mask) {
    check_dtype(*mask, "attention_mask", {DType::kBool});
    check_shape(*mask, "attention_mask", {batch, seqlen}, "[batch, seqlen]");
    check_same_device(*mask, "attention_mask", cu_seqlens_q, "cu_seq_lens_q");
  }
  if (position_ids) {
    check_dtype(*position_ids, "position_ids", {DType::kInt32, DType::kInt64});
    check_shape(*position_ids, "position_ids",
                {position_ids->dim() == 2 && position_ids->size(0) == 1 ? 1 : batch, seqlen}, "[batch or 1, seqlen]");
    check_same_device(*position_ids, "position_ids", cu_seqlens_q, "cu_seq_lens_q");
  }
  const Tensor dense_q = dense(cu_seqlens_q), dense_k = dense(cu_seqlens_k);
  const std::optional<Tensor> dense_mask = dense(mask), dense_positions = dense(position_ids);
  CheckDocumentsParams p;
  p.cu_seqlens_q = index_view(dense_q);
  p.cu_seqlens_k = index_view(dense_k);
  p.same = dense_q.data_ptr() == dense_k.data_ptr();
  p.num_documents = cu_seqlens_q.numel() - 1;
  p.mask = static_cast<const bool*>(data_or_null(dense_mask));
  p.batch = batch;
  p.seqlen = seqlen;
  if (dense_positions && dense_positions->numel() > 0) {
    p.positions = dense_positions->data_ptr();
    p.position_ids = index_view(*dense_positions);
    p.num_positions = dense_positions->numel();
  }
  launch(cu_seqlens_q, p, launch_check_documents_cpu, PACKING_OPS_CUDA(launch_check_documents_cuda));
}

// check_documents in a trace, which drops what gives nothing: copies of cu_seqlens_q and of the positions.
std::tuple<Tensor, Tensor> checked_documents(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                             std::optional<Tensor> mask, std::optional<Tensor> position_ids,
                                             int64_t batch, int64_t seqlen) {
  check_documents(cu_seqlens_q, cu_seqlens_k, mask, position_ids, batch, seqlen);
  return {copy_of(cu_seqlens_q), position_ids ? copy_of(*position_ids) : empty({0}, DType::kInt64, cu_seqlens_q)};
}

void check_unchanged(const Tensor& values, const Tensor& expected, std::string wanted) {
  check_same_device(expected, "expected", values, "values");
  const Fault fault = fault_of(wanted);
  if (sizes_of(values) != sizes_of(expected) || values.element_size() != expected.element_size()) {
    const FaultText text = fault_text(fault);
    fail(text.argument, ": expected ", text.wanted, ", got ", describe(values), " where ", describe(expected), " was");
  }
  const Tensor dense_values = dense(values), dense_expected = dense(expected);
  CheckUnchangedParams p;
  p.fault = fault;
  p.values = dense_values.data_ptr();
  p.expected = dense_expected.data_ptr();
  p.element_size = static_cast<int64_t>(values.element_size());
  p.bytes = values.numel() * p.element_size;
  launch(values, p, launch_check_unchanged_cpu, PACKING_OPS_CUDA(launch_check_unchanged_cuda));
}

PACKING_OPS_REGISTER(m) {
  m.impl("check_documents", TORCH_BOX(&check_documents));
  m.impl("checked_documents", TORCH_BOX(&checked_documents));
  m.impl("check_unchanged", TORCH_BOX(&check_unchanged));
}

}  // namespace packing_ops
