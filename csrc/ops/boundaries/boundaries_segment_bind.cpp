// segment_sum, its gradient, and gae: check -> allocate -> fill the params -> launch.
#include <tuple>
#include <vector>

#include "host/launch.h"
#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/boundaries/boundaries.h"

namespace packing_ops {

namespace {

constexpr auto kFloats = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

DType sum_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// `front`, then the dimensions of `rows` [rows, ...] after its first.
std::vector<int64_t> with_features(int64_t front, const Tensor& rows) {
  std::vector<int64_t> sizes = sizes_of(rows);
  sizes[0] = front;
  return sizes;
}

int64_t features_of(const Tensor& rows) {
  int64_t features = 1;
  for (int64_t d = 1; d < rows.dim(); ++d) features *= rows.size(d);
  return features;
}

// Read as [total, features], a row [1, total] is one token, and the error would blame cu_seqlens.
void check_no_batch(const Tensor& values, const Tensor& cu_seqlens) {
  if (values.dim() < 2 || values.size(0) != 1 || !cu_seqlens.is_cpu() || cu_seqlens.dim() != 1 ||
      cu_seqlens.numel() < 1) {
    return;
  }
  const DType dtype = dtype_of(cu_seqlens);
  if (dtype != DType::kInt32 && dtype != DType::kInt64) return;
  if (index_view(cu_seqlens)[(cu_seqlens.numel() - 1) * cu_seqlens.stride(0)] > 1) {
    fail("values: expected [total, ...], got ", describe(values), " (without its batch of 1: values[0])");
  }
}

Documents checked_documents(Tensor& cu_seqlens, const std::optional<Tensor>& mask, int64_t total, const Tensor& anchor,
                            const char* anchor_name) {
  check_total(total, anchor_name);
  take_cu_seqlens(cu_seqlens, "cu_seqlens", total, anchor, anchor_name);
  if (mask) {
    check_dtype(*mask, "mask", {DType::kBool});
    check_shape(*mask, "mask", {total}, "[total] like values");
    check_same_device(*mask, "mask", anchor, anchor_name);
  }
  return documents_view(cu_seqlens, total);
}

SegmentSumParams segment_sum_params(Tensor& cu_seqlens, const std::optional<Tensor>& mask, bool average, int64_t total,
                                    DType dtype, const Tensor& anchor, const char* anchor_name) {
  SegmentSumParams p;
  p.documents = checked_documents(cu_seqlens, mask, total, anchor, anchor_name);
  p.dtype = dtype;
  p.features = features_of(anchor);
  p.average = average;
  return p;
}

}  // namespace

Tensor segment_sum(const Tensor& values, Tensor cu_seqlens, std::optional<Tensor> mask, bool average) {
  check_dtype(values, "values", kFloats);
  if (values.dim() < 1) fail("values: expected [total, ...], got ", describe(values));
  check_no_batch(values, cu_seqlens);
  SegmentSumParams p =
      segment_sum_params(cu_seqlens, mask, average, values.size(0), dtype_of(values), values, "values");
  const Tensor dense_values = dense(values);
  const std::optional<Tensor> dense_mask = dense(mask);
  Tensor sums = empty(with_features(p.documents.num_documents, values), sum_dtype(p.dtype), values);
  p.values = dense_values.data_ptr();
  p.mask = data_or_null(dense_mask);
  p.sums = sums.data_ptr();
  launch(values, p, launch_segment_sum_cpu, PACKING_OPS_CUDA(launch_segment_sum_cuda));
  return sums;
}

std::tuple<Tensor, Tensor> gae(const Tensor& rewards, const Tensor& values, Tensor cu_seqlens,
                               std::optional<Tensor> mask, std::optional<Tensor> bootstrap, double gamma, double lam) {
  check_dtype(rewards, "rewards", kFloats);
  check_rank(rewards, "rewards", 1);
  check_same_dtype(values, "values", rewards, "rewards");
  check_shape(values, "values", sizes_of(rewards), "[total] like rewards");
  check_same_device(values, "values", rewards, "rewards");
  check(gamma >= 0 && gamma <= 1, "gamma: expected 0 to 1, got ", gamma);
  check(lam >= 0 && lam <= 1, "lam: expected 0 to 1, got ", lam);
  const int64_t total = rewards.numel();
  const DType dtype = dtype_of(rewards);
  GaeParams p;
  p.documents = checked_documents(cu_seqlens, mask, total, rewards, "rewards");
  if (bootstrap) {
    check_dtype(*bootstrap, "bootstrap", {sum_dtype(dtype)});
    check_shape(*bootstrap, "bootstrap", {p.documents.num_documents}, "[num_documents]");
    check_same_device(*bootstrap, "bootstrap", rewards, "rewards");
  }
  const Tensor dense_rewards = dense(rewards);
  const Tensor dense_values = dense(values);
  const std::optional<Tensor> dense_mask = dense(mask);
  const std::optional<Tensor> dense_bootstrap = dense(bootstrap);
  Tensor advantages = empty({total}, sum_dtype(dtype), rewards);
  Tensor returns = empty({total}, sum_dtype(dtype), rewards);
  p.dtype = dtype;
  p.gamma = gamma;
  p.lam = lam;
  p.rewards = dense_rewards.data_ptr();
  p.values = dense_values.data_ptr();
  p.mask = data_or_null(dense_mask);
  p.bootstrap = data_or_null(dense_bootstrap);
  p.advantages = advantages.data_ptr();
  p.returns = returns.data_ptr();
  launch(rewards, p, launch_gae_cpu, PACKING_OPS_CUDA(launch_gae_cuda));
  return {advantages, returns};
}

// total and dtype: those of values.
Tensor segment_sum_backward(const Tensor& grad, Tensor cu_seqlens, std::optional<Tensor> mask, bool average,
                            int64_t total, torch::headeronly::ScalarType dtype) {
  const DType values_dtype = dtype_of(dtype);
  if (grad.dim() < 1) fail("grad: expected [num_documents, ...], got ", describe(grad));
  SegmentSumParams p = segment_sum_params(cu_seqlens, mask, average, total, values_dtype, grad, "grad");
  check_dtype(grad, "grad", {sum_dtype(values_dtype)});
  check_shape(grad, "grad", with_features(p.documents.num_documents, grad), "[num_documents, ...]");
  const Tensor dense_grad = dense(grad);
  const std::optional<Tensor> dense_mask = dense(mask);
  Tensor grad_values = empty(with_features(total, grad), values_dtype, grad);
  p.grad = dense_grad.data_ptr();
  p.mask = data_or_null(dense_mask);
  p.grad_values = grad_values.data_ptr();
  launch(grad, p, launch_segment_sum_backward_cpu, PACKING_OPS_CUDA(launch_segment_sum_backward_cuda));
  return grad_values;
}

PACKING_OPS_REGISTER(m) {
  m.impl("segment_sum", TORCH_BOX(&segment_sum));
  m.impl("segment_sum_backward", TORCH_BOX(&segment_sum_backward));
  m.impl("gae", TORCH_BOX(&gae));
}

}  // namespace packing_ops
