// Divergence of two heads: check -> allocate -> fill the params -> launch.
#include <limits>

#include "host/launch.h"
#include "host/memory_overlap.h"
#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/logps/logps_kl.h"

namespace packing_ops {

namespace {

DType real_of(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// Checks and fills of the ops. Names: of the arguments.
KlHead kl_head(const Tensor& logits, const char* name, const std::optional<Tensor>& bias, const char* bias_name,
               double inv_temperature) {
  check_rank(logits, name, 2);
  check_last_dim_contiguous(logits, name);
  KlHead head{logits.data_ptr(), logits.stride(0), nullptr, inv_temperature};
  if (!bias) return head;
  check_dtype(*bias, bias_name, {real_of(dtype_of(logits))});
  check_shape(*bias, bias_name, {logits.size(1)}, "a number per column of logits");
  check_same_device(*bias, bias_name, logits, "logits");
  check(bias->is_contiguous(), bias_name, ": expected contiguous, got stride ", bias->stride(0));
  head.bias = bias->data_ptr();
  return head;
}

// Sets dtype, rows and columns.
template <class Params>
void set_shape(Params& p, const Tensor& matrix, const char* name) {
  constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
  check_dtype(matrix, name, {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64});
  check_rank(matrix, name, 2);
  p.dtype = dtype_of(matrix);
  p.rows = matrix.size(0);
  p.columns = matrix.size(1);
  check(p.rows <= kMostRows && p.columns <= kMostRows, name, ": expected at most ", kMostRows,
        " rows and columns, got ", describe(matrix));
}

// name: the matrix's; wanted: of an error.
const void* scales_of_rows(const Tensor& scales, const Tensor& matrix, const char* name, const char* wanted,
                           const Tensor& out) {
  check_dtype(scales, "scales", {real_of(dtype_of(matrix))});
  check_shape(scales, "scales", {matrix.size(0)}, wanted);
  check_same_device(scales, "scales", matrix, name);
  check(scales.is_contiguous(), "scales: expected contiguous, got stride ", scales.stride(0));
  check_no_overlap(out, "out", scales, "scales");
  return scales.data_ptr();
}

// Sets out and out_stride of p, whose shape is the matrix's.
template <class Params>
void set_out(Params& p, const Tensor& out, const Tensor& matrix, const char* name, const char* wanted) {
  check_dtype(out, "out", {p.dtype});
  check_shape(out, "out", {p.rows, p.columns}, wanted);
  check_same_device(out, "out", matrix, name);
  check_last_dim_contiguous(out, "out");
  check_no_overlap(out, "out");
  p.out = out.data_ptr();
  p.out_stride = out.stride(0);
}

KlParams kl_params(const Tensor& logits, const Tensor& teacher_logits, const Tensor& targets, double beta) {
  KlParams p;
  set_shape(p, logits, "logits");
  check_dtype(teacher_logits, "teacher_logits", {p.dtype});
  check_shape(teacher_logits, "teacher_logits", {p.rows, p.columns}, "as logits");
  check_same_device(teacher_logits, "teacher_logits", logits, "logits");
  check_dtype(targets, "targets", {DType::kInt32});
  check_shape(targets, "targets", {p.rows}, "a target per row of logits");
  check_same_device(targets, "targets", logits, "logits");
  check(targets.is_contiguous(), "targets: expected contiguous, got stride ", targets.stride(0));
  p.targets = static_cast<const int32_t*>(targets.data_ptr());
  check(beta >= 0 && beta <= 1, "beta: expected 0 to 1, got ", beta);
  p.beta = beta;
  return p;
}

// Whether elements of two tensors of one shape are at the same addresses: each is read before it is overwritten.
bool same_memory(const Tensor& a, const Tensor& b) {
  return a.data_ptr() == b.data_ptr() && (a.stride(0) == b.stride(0) || a.size(0) == 1);
}

// The rows of a contiguous [4, rows].
void set_stats(KlParams& p, const Tensor& stats) {
  const int64_t bytes = p.rows * (p.dtype == DType::kFloat64 ? 8 : 4);
  auto* memory = static_cast<char*>(stats.data_ptr());
  p.divergence = memory;
  p.student_lse = memory + bytes;
  p.teacher_lse = memory + 2 * bytes;
  p.student_kl = memory + 3 * bytes;
}

}  // namespace

Tensor kl_rows(const Tensor& logits, std::optional<Tensor> bias, const Tensor& teacher_logits,
               std::optional<Tensor> teacher_bias, const Tensor& targets, double inv_temperature,
               double teacher_inv_temperature, double beta) {
  KlParams p = kl_params(logits, teacher_logits, targets, beta);
  p.student = kl_head(logits, "logits", bias, "bias", inv_temperature);
  p.teacher = kl_head(teacher_logits, "teacher_logits", teacher_bias, "teacher_bias", teacher_inv_temperature);
  Tensor stats = empty({4, p.rows}, real_of(p.dtype), logits);
  set_stats(p, stats);
  launch(logits, p, launch_kl_rows_cpu, PACKING_OPS_CUDA(launch_kl_rows_cuda));
  return stats;
}

void kl_chunk_backward_(const Tensor& logits, std::optional<Tensor> bias, const Tensor& teacher_logits,
                        std::optional<Tensor> teacher_bias, const Tensor& targets, double inv_temperature,
                        double teacher_inv_temperature, double beta, const Tensor& stats, std::optional<Tensor> scales,
                        Tensor out) {
  KlParams p = kl_params(logits, teacher_logits, targets, beta);
  p.student = kl_head(logits, "logits", bias, "bias", inv_temperature);
  p.teacher = kl_head(teacher_logits, "teacher_logits", teacher_bias, "teacher_bias", teacher_inv_temperature);
  check_dtype(stats, "stats", {real_of(p.dtype)});
  check_shape(stats, "stats", {4, p.rows}, "[4, rows of logits]");
  check_same_device(stats, "stats", logits, "logits");
  check(stats.is_contiguous(), "stats: expected contiguous, got other strides");
  set_stats(p, stats);
  set_out(p, out, logits, "logits", "as logits");
  if (scales) p.scales = scales_of_rows(*scales, logits, "logits", "a number per row of logits", out);
  if (!same_memory(out, logits)) check_no_overlap(out, "out", logits, "logits");
  check_no_overlap(out, "out", teacher_logits, "teacher_logits");
  launch(logits, p, launch_kl_chunk_backward_cpu, PACKING_OPS_CUDA(launch_kl_chunk_backward_cuda));
}

void kl_scale_kept_(const Tensor& dz, const Tensor& scales, Tensor out) {
  KlKeptParams p;
  set_shape(p, dz, "dz");
  check_last_dim_contiguous(dz, "dz");
  p.dz = dz.data_ptr();
  p.dz_stride = dz.stride(0);
  set_out(p, out, dz, "dz", "as dz");
  p.scales = scales_of_rows(scales, dz, "dz", "a number per row of dz", out);
  if (!same_memory(out, dz)) check_no_overlap(out, "out", dz, "dz");
  launch(dz, p, launch_kl_scale_kept_cpu, PACKING_OPS_CUDA(launch_kl_scale_kept_cuda));
}

PACKING_OPS_REGISTER(m) {
  m.impl("kl_rows", TORCH_BOX(&kl_rows));
  m.impl("kl_chunk_backward_", TORCH_BOX(&kl_chunk_backward_));
  m.impl("kl_scale_kept_", TORCH_BOX(&kl_scale_kept_));
}

}  // namespace packing_ops
