#include "host/tensor_check.h"

#include <algorithm>
#include <limits>

#include "core/narrow.h"
#include "host/launch.h"

namespace packing_ops {

namespace {

constexpr int64_t kMaxTotal = std::numeric_limits<int32_t>::max();

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::string device_text(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device:") + std::to_string(t.get_device_index());
}

bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cpu() == b.is_cpu() && (a.is_cpu() || a.get_device_index() == b.get_device_index());
}

void narrow_cpu(const NarrowParams& p, const char* name) {
  for (int64_t i = 0; i < p.count; ++i) {
    p.to[i] = static_cast<int32_t>(p.from[i]);
    check(p.to[i] == p.from[i], name, ": expected numbers that fit int32, got ", p.from[i], " at index ", i);
  }
}

// int32 of int64, in new memory.
Tensor int32_copy(const Tensor& cu_seqlens, const char* name) {
  const Tensor values = dense(cu_seqlens);
  Tensor copy = empty(sizes_of(cu_seqlens), DType::kInt32, cu_seqlens);
  const NarrowParams p{static_cast<const int64_t*>(values.data_ptr()), static_cast<int32_t*>(copy.data_ptr()),
                       values.numel()};
  if (cu_seqlens.is_cpu()) {
    narrow_cpu(p, name);
    return copy;
  }
  const CudaScope scope(cu_seqlens);
#ifdef PACKING_OPS_WITH_CUDA
  launch_narrow_cuda(p, scope.launch());
#endif
  scope.finish();
  return copy;
}

}  // namespace

const char* dtype_name(torch::headeronly::ScalarType dtype) {
  using torch::headeronly::ScalarType;
  switch (dtype) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::UInt16:
      return "uint16";
    case ScalarType::UInt32:
      return "uint32";
    case ScalarType::UInt64:
      return "uint64";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    default:
      return dtype_name(dtype_of(dtype));
  }
}

std::string describe(const Tensor& t) {
  // A shim's number of a dtype is its ScalarType's.
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  const char* name = dtype_name(static_cast<torch::headeronly::ScalarType>(dtype));
  return std::string(name) + " " + shape_text(sizes_of(t)) + " on " + device_text(t);
}

void check_dtype(const Tensor& t, const char* name, std::initializer_list<DType> allowed) {
  if (std::find(allowed.begin(), allowed.end(), dtype_of(t)) != allowed.end()) return;
  std::string wanted;
  size_t i = 0;
  for (DType dtype : allowed) {
    wanted += (i == 0 ? "" : (i + 1 == allowed.size() ? " or " : ", ")) + std::string(dtype_name(dtype));
    ++i;
  }
  fail(name, ": expected ", wanted, ", got ", describe(t));
}

void check_rank(const Tensor& t, const char* name, int64_t rank) {
  if (t.dim() != rank) fail(name, ": expected ", rank, " dimensions, got ", describe(t));
}

void check_shape(const Tensor& t, const char* name, const std::vector<int64_t>& shape, const char* wanted) {
  if (sizes_of(t) != shape) fail(name, ": expected ", wanted, " = ", shape_text(shape), ", got ", describe(t));
}

void check_same_device(const Tensor& t, const char* name, const Tensor& other, const char* other_name) {
  if (same_device(t, other)) return;
  fail(name, ": expected on ", device_text(other), " like ", other_name, ", got ", describe(t));
}

void check_same_dtype(const Tensor& t, const char* name, const Tensor& other, const char* other_name) {
  if (dtype_of(t) == dtype_of(other)) return;
  fail(name, ": expected ", dtype_name(dtype_of(other)), " like ", other_name, ", got ", describe(t));
}

void check_fits(int64_t value, const char* name, const Tensor& t, const char* t_name) {
  if (dtype_of(t) == DType::kInt64 || (value >= INT32_MIN && value <= INT32_MAX)) return;
  fail(name, ": expected a number that ", dtype_name(dtype_of(t)), " holds, as ", t_name, " are, got ", value);
}

void check_last_dim_contiguous(const Tensor& t, const char* name) {
  const int64_t last = t.dim() - 1;
  if (t.size(last) <= 1 || t.stride(last) == 1 || t.numel() == 0) return;
  fail(name, ": expected a contiguous last dimension (stride 1), got stride ", t.stride(last), " in ", describe(t));
}

void check_total(int64_t total, const char* name) {
  check(total >= 0 && total <= kMaxTotal, name, ": expected 0 to ", kMaxTotal, " slots, got ", total);
}

void take_cu_seqlens(Tensor& cu_seqlens, const char* name, int64_t total, const Tensor& other, const char* other_name) {
  check_dtype(cu_seqlens, name, {DType::kInt32, DType::kInt64});
  check_rank(cu_seqlens, name, 1);
  if (cu_seqlens.numel() < 1) {
    fail(name, ": expected [num_documents + 1] with at least one entry, got ", describe(cu_seqlens));
  }
  check_same_device(cu_seqlens, name, other, other_name);
  if (dtype_of(cu_seqlens) == DType::kInt64) cu_seqlens = int32_copy(cu_seqlens, name);
  check(cu_seqlens.is_contiguous(), name, ": expected contiguous, got stride ", cu_seqlens.stride(0));
  if (!cu_seqlens.is_cpu()) return;
  const auto* values = static_cast<const int32_t*>(cu_seqlens.data_ptr());
  const int64_t count = cu_seqlens.numel();
  check(values[0] == 0, name, ": expected to start at 0, got ", values[0]);
  for (int64_t i = 1; i < count; ++i) {
    check(values[i] >= values[i - 1], name, ": expected never to decrease, got ", values[i], " after ", values[i - 1],
          " at index ", i);
  }
  check(values[count - 1] <= total, name, ": expected to end at most at total=", total, ", got ", values[count - 1]);
}

}  // namespace packing_ops
