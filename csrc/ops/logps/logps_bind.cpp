// Log-probabilities: check -> allocate -> fill the params -> launch.
#include <limits>

#include "host/launch.h"
#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/logps/logps.h"

namespace packing_ops {

namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // slots, and entries of a vocabulary

// float32 or float64, contiguous, a number per row.
const void* per_row(const Tensor& t, const char* name, const LogpsChunkParams& p, const Tensor& logits) {
  check_dtype(t, name, {p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32});
  check_shape(t, name, {p.rows}, "a number per row of logits");
  check_same_device(t, name, logits, "logits");
  check(t.is_contiguous(), name, ": expected contiguous, got stride ", t.stride(0));
  return t.data_ptr();
}

LogpsChunkParams chunk_params(const Tensor& logits, const std::optional<Tensor>& bias, const Tensor& targets,
                              int64_t first, double inv_temperature) {
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
  p.inv_temperature = inv_temperature;
  check(p.rows <= kMost && p.columns <= kMost, "logits: expected at most ", kMost, " rows and columns, got ",
        describe(logits));
  check_dtype(targets, "targets", {DType::kInt32});
  check_shape(targets, "targets", {p.rows}, "a target per row of logits");
  check_same_device(targets, "targets", logits, "logits");
  check(targets.is_contiguous(), "targets: expected contiguous, got stride ", targets.stride(0));
  p.targets = static_cast<const int32_t*>(targets.data_ptr());
  if (bias) {
    check_dtype(*bias, "bias", {p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32});
    check_shape(*bias, "bias", {p.columns}, "a number per column of logits");
    check_same_device(*bias, "bias", logits, "logits");
    check(bias->is_contiguous(), "bias: expected contiguous, got stride ", bias->stride(0));
    p.bias = bias->data_ptr();
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

void logps_chunk_(const Tensor& logits, std::optional<Tensor> bias, const Tensor& targets, int64_t first,
                  double inv_temperature, Tensor state) {
  LogpsChunkParams p = chunk_params(logits, bias, targets, first, inv_temperature);
  const DType real = p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  check_dtype(state, "state", {real});
  check_rank(state, "state", 2);
  const int64_t sums = state.size(0);
  check_shape(state, "state", {sums == 4 ? 4 : 3, p.rows}, "[3 or 4, rows of logits]");
  check_same_device(state, "state", logits, "logits");
  check(state.is_contiguous(), "state: expected contiguous (it is changed in place), got other strides");
  const int64_t bytes = p.rows * (real == DType::kFloat64 ? 8 : 4);
  auto* memory = static_cast<char*>(state.data_ptr());
  p.max = memory;
  p.sum = memory + bytes;
  p.chosen = memory + 2 * bytes;
  p.weighted = sums == 4 ? memory + 3 * bytes : nullptr;
  launch(logits, p, launch_logps_chunk_cpu, PACKING_OPS_CUDA(launch_logps_chunk_cuda));
}

void logps_chunk_backward_(Tensor logits, std::optional<Tensor> bias, const Tensor& targets, int64_t first,
                           double inv_temperature, const Tensor& lse, const Tensor& grad_logps,
                           std::optional<Tensor> entropy, std::optional<Tensor> grad_entropy) {
  LogpsChunkParams p = chunk_params(logits, bias, targets, first, inv_temperature);
  check(p.rows <= 1 || p.row_stride >= p.columns, "logits: expected rows of their own memory (they are changed in ",
        "place), got stride ", p.row_stride, " in ", describe(logits));
  p.lse = per_row(lse, "lse", p, logits);
  p.grad_logps = per_row(grad_logps, "grad_logps", p, logits);
  check(entropy.has_value() == grad_entropy.has_value(), "grad_entropy: expected together with entropy");
  if (entropy) {
    p.entropy = per_row(*entropy, "entropy", p, logits);
    p.grad_entropy = per_row(*grad_entropy, "grad_entropy", p, logits);
  }
  launch(logits, p, launch_logps_chunk_backward_cpu, PACKING_OPS_CUDA(launch_logps_chunk_backward_cuda));
}

PACKING_OPS_REGISTER(m) {
  m.impl("logps_targets", TORCH_BOX(&logps_targets));
  m.impl("logps_chunk_", TORCH_BOX(&logps_chunk_));
  m.impl("logps_chunk_backward_", TORCH_BOX(&logps_chunk_backward_));
}

}  // namespace packing_ops
