// Log-probabilities: check -> allocate -> fill the params -> launch.
#include <array>
#include <limits>

#include "host/launch.h"
#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/logps/logps.h"

namespace packing_ops {

namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // slots, and entries of a vocabulary

DType real_of(const LogpsChunkParams& p) {
  return p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// Of a mask's row.
int64_t words_of(int64_t columns) {
  return (columns + 31) / 32;
}

// float32 or float64, contiguous, a number per row.
const void* per_row(const Tensor& t, const char* name, const LogpsChunkParams& p, const Tensor& logits) {
  check_dtype(t, name, {real_of(p)});
  check_shape(t, name, {p.rows}, "a number per row of logits");
  check_same_device(t, name, logits, "logits");
  check(t.is_contiguous(), name, ": expected contiguous, got stride ", t.stride(0));
  return t.data_ptr();
}

// The rows of a contiguous tensor [fewer or more, rows of logits], the last of them null if there are fewer.
template <int64_t kFewer, int64_t kMore>
std::array<char*, kMore> several_per_row(const Tensor& t, const char* name, const LogpsChunkParams& p,
                                         const Tensor& logits) {
  check_dtype(t, name, {real_of(p)});
  check_rank(t, name, 2);
  const int64_t count = t.size(0) == kMore ? kMore : kFewer;
  check_shape(t, name, {count, p.rows}, kMore == 7 ? "[3 or 7, rows of logits]" : "[2 or 5, rows of logits]");
  check_same_device(t, name, logits, "logits");
  check(t.is_contiguous(), name, ": expected contiguous, got other strides");
  std::array<char*, kMore> rows{};
  for (int64_t i = 0; i < count; ++i) {
    rows[i] = static_cast<char*>(t.data_ptr()) + i * p.rows * (real_of(p) == DType::kFloat64 ? 8 : 4);
  }
  return rows;
}

LogpsChunkParams chunk_params(const Tensor& logits, const std::optional<Tensor>& bias, const Tensor& targets,
                              int64_t first, const Tensor& scales, double inner, const std::optional<Tensor>& mask) {
  check_dtype(logits, "logits", {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64});
  check_rank(logits, "logits", 2);
  check_last_dim_contiguous(logits, "logits");
  LogpsChunkParams p;
  p.dtype = dtype_of(logits);
  p.logits = logits.data_ptr();
  p.rows = logits.size(0);
  p.columns = logits.size(1);
  p.row_stride = logits.stride(0);
  p.first = first;
  p.inner = inner;
  check(p.rows <= kMost && p.columns <= kMost, "logits: expected at most ", kMost, " rows and columns, got ",
        describe(logits));
  check_dtype(targets, "targets", {DType::kInt32});
  check_shape(targets, "targets", {p.rows}, "a target per row of logits");
  check_same_device(targets, "targets", logits, "logits");
  check(targets.is_contiguous(), "targets: expected contiguous, got stride ", targets.stride(0));
  p.targets = static_cast<const int32_t*>(targets.data_ptr());
  p.scales = per_row(scales, "scales", p, logits);
  if (bias) {
    check_dtype(*bias, "bias", {real_of(p)});
    check_shape(*bias, "bias", {p.columns}, "a number per column of logits");
    check_same_device(*bias, "bias", logits, "logits");
    check(bias->is_contiguous(), "bias: expected contiguous, got stride ", bias->stride(0));
    p.bias = bias->data_ptr();
  }
  if (mask) {
    check_dtype(*mask, "mask", {DType::kInt32});
    check_shape(*mask, "mask", {p.rows, words_of(p.columns)}, "[rows of logits, a bit per column]");
    check_same_device(*mask, "mask", logits, "logits");
    check(mask->is_contiguous(), "mask: expected contiguous, got other strides");
    p.mask = static_cast<const uint32_t*>(mask->data_ptr());
  }
  return p;
}

}  // namespace

Tensor logps_targets(const Tensor& labels, Tensor cu_seqlens, int64_t ignore_index, int64_t vocab) {
  const Tensor values = dense(labels);
  check_dtype(labels, "labels", {DType::kInt64, DType::kInt32});
  const int64_t total = labels.numel();
  check(total <= kMost, "labels: expected at most ", kMost, " slots, got ", total);
  take_cu_seqlens(cu_seqlens, "cu_seqlens", total, labels, "labels");
  check_fits(ignore_index, "ignore_index", labels, "labels");
  check(vocab > 0 && vocab <= kMost, "weight: expected 1 to ", kMost, " entries of the vocabulary, got ", vocab);
  Tensor targets = empty({total}, DType::kInt32, labels);
  LogpsTargetsParams p;
  p.documents = documents_view(cu_seqlens, total);
  p.labels = index_view(values);
  p.ignore_index = ignore_index;
  p.vocab = vocab;
  p.targets = static_cast<int32_t*>(targets.data_ptr());
  launch(labels, p, launch_logps_targets_cpu, PACKING_OPS_CUDA(launch_logps_targets_cuda));
  return targets;
}

Tensor logps_rows(const Tensor& targets, int64_t size) {
  check_dtype(targets, "targets", {DType::kInt32});
  check_rank(targets, "targets", 1);
  check(targets.numel() <= kMost, "targets: expected at most ", kMost, " slots, got ", targets.numel());
  check(size >= 0 && size <= kMost, "max_targets: expected 0 to ", kMost, ", got ", size);
  const Tensor values = dense(targets);
  Tensor rows = empty({size}, DType::kInt64, targets);
  LogpsRowsParams p;
  p.targets = static_cast<const int32_t*>(values.data_ptr());
  p.total = targets.numel();
  p.rows = static_cast<int64_t*>(rows.data_ptr());
  p.size = size;
  launch(targets, p, launch_logps_rows_cpu, PACKING_OPS_CUDA(launch_logps_rows_cuda));
  return rows;
}

std::tuple<Tensor, Tensor> logps_allowed(const Tensor& allowed_ids, const Tensor& allowed_offsets,
                                         const Tensor& targets, int64_t vocab, int64_t ahead) {
  check_dtype(targets, "targets", {DType::kInt32});
  check_rank(targets, "targets", 1);
  const int64_t total = targets.numel();
  check_dtype(allowed_ids, "allowed_ids", {DType::kInt64, DType::kInt32});
  check_rank(allowed_ids, "allowed_ids", 1);
  check_same_device(allowed_ids, "allowed_ids", targets, "hidden");
  check_dtype(allowed_offsets, "allowed_offsets", {DType::kInt64, DType::kInt32});
  check_shape(allowed_offsets, "allowed_offsets", {total + 1}, "[labels + 1]");
  check_same_device(allowed_offsets, "allowed_offsets", targets, "hidden");
  check(vocab > 0 && vocab <= kMost, "weight: expected 1 to ", kMost, " entries of the vocabulary, got ", vocab);
  check(ahead >= 0 && ahead <= 1, "ahead: expected 0 or 1, got ", ahead);
  const Tensor given_ids = dense(allowed_ids);
  const Tensor given_offsets = dense(allowed_offsets);
  const Tensor of_rows = dense(targets);
  Tensor ids = empty({allowed_ids.numel()}, DType::kInt32, targets);
  Tensor offsets = empty({total + 1}, DType::kInt64, targets);
  LogpsAllowedParams p;
  p.ids = index_view(given_ids);
  p.size = allowed_ids.numel();
  p.offsets = index_view(given_offsets);
  p.targets = static_cast<const int32_t*>(of_rows.data_ptr());
  p.total = total;
  p.vocab = vocab;
  p.ahead = ahead;
  p.checked_ids = static_cast<int32_t*>(ids.data_ptr());
  p.checked_offsets = static_cast<int64_t*>(offsets.data_ptr());
  launch(targets, p, launch_logps_allowed_cpu, PACKING_OPS_CUDA(launch_logps_allowed_cuda));
  return {ids, offsets};
}

Tensor logps_allowed_mask(const Tensor& ids, const Tensor& offsets, std::optional<Tensor> index, int64_t first,
                          int64_t columns) {
  check_dtype(ids, "ids", {DType::kInt32});
  check_rank(ids, "ids", 1);
  check_dtype(offsets, "offsets", {DType::kInt64});
  check_rank(offsets, "offsets", 1);
  check(offsets.numel() > 0, "offsets: expected [total + 1], got ", describe(offsets));
  check_same_device(offsets, "offsets", ids, "ids");
  check(columns >= 0 && columns <= kMost, "columns: expected 0 to ", kMost, ", got ", columns);
  const Tensor all_ids = dense(ids);
  const Tensor bounds = dense(offsets);
  const std::optional<Tensor> rows = dense(index);
  if (index) {
    check_dtype(*index, "index", {DType::kInt64});
    check_rank(*index, "index", 1);
    check_same_device(*index, "index", ids, "ids");
  }
  LogpsMaskParams p;
  p.ids = static_cast<const int32_t*>(all_ids.data_ptr());
  p.size = ids.numel();
  p.offsets = static_cast<const int64_t*>(bounds.data_ptr());
  p.total = offsets.numel() - 1;
  p.index = static_cast<const int64_t*>(data_or_null(rows));
  p.rows = index ? index->numel() : p.total;
  p.first = first;
  p.columns = columns;
  p.words = words_of(columns);
  Tensor mask = empty({p.rows, p.words}, DType::kInt32, ids);
  p.mask = static_cast<uint32_t*>(mask.data_ptr());
  launch(ids, p, launch_logps_allowed_mask_cpu, PACKING_OPS_CUDA(launch_logps_allowed_mask_cuda));
  return mask;
}

void logps_chunk_(const Tensor& logits, std::optional<Tensor> bias, const Tensor& targets, int64_t first,
                  const Tensor& scales, double inner, Tensor state, std::optional<Tensor> mask) {
  LogpsChunkParams p = chunk_params(logits, bias, targets, first, scales, inner, mask);
  const auto rows = several_per_row<3, 7>(state, "state", p, logits);
  p.max = rows[0];
  p.sum = rows[1];
  p.chosen = rows[2];
  p.weighted = rows[3];
  p.squares = rows[4];
  p.total = rows[5];
  p.top1 = rows[6];
  launch(logits, p, launch_logps_chunk_cpu, PACKING_OPS_CUDA(launch_logps_chunk_cuda));
}

void logps_chunk_backward_(Tensor logits, std::optional<Tensor> bias, const Tensor& targets, int64_t first,
                           const Tensor& scales, double inner, const Tensor& lse, const Tensor& slopes,
                           std::optional<Tensor> mask) {
  LogpsChunkParams p = chunk_params(logits, bias, targets, first, scales, inner, mask);
  check(p.rows <= 1 || p.row_stride >= p.columns, "logits: expected rows of their own memory (they are changed in ",
        "place), got stride ", p.row_stride, " in ", describe(logits));
  p.lse = per_row(lse, "lse", p, logits);
  const auto rows = several_per_row<2, 5>(slopes, "slopes", p, logits);
  p.grad = rows[0];
  p.plain = rows[1];
  p.by_log = rows[2];
  p.by_p = rows[3];
  p.even = rows[4];
  launch(logits, p, launch_logps_chunk_backward_cpu, PACKING_OPS_CUDA(launch_logps_chunk_backward_cuda));
}

PACKING_OPS_REGISTER(m) {
  m.impl("logps_targets", TORCH_BOX(&logps_targets));
  m.impl("logps_rows", TORCH_BOX(&logps_rows));
  m.impl("logps_allowed", TORCH_BOX(&logps_allowed));
  m.impl("logps_allowed_mask", TORCH_BOX(&logps_allowed_mask));
  m.impl("logps_chunk_", TORCH_BOX(&logps_chunk_));
  m.impl("logps_chunk_backward_", TORCH_BOX(&logps_chunk_backward_));
}

}  // namespace packing_ops
