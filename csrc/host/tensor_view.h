// From torch tensors to what params structs hold, and back: the only way kernels get at memory.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "core/documents.h"
#include "core/dtype.h"
#include "core/view.h"
#include "host/allocate.h"

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // torch 2.10
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace packing_ops {

using torch::stable::Tensor;

inline DType dtype_of(const Tensor& t) {
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  if (dtype == aoti_torch_dtype_float32()) return DType::kFloat32;
  if (dtype == aoti_torch_dtype_bfloat16()) return DType::kBFloat16;
  if (dtype == aoti_torch_dtype_float16()) return DType::kFloat16;
  if (dtype == aoti_torch_dtype_float64()) return DType::kFloat64;
  if (dtype == aoti_torch_dtype_int64()) return DType::kInt64;
  if (dtype == aoti_torch_dtype_int32()) return DType::kInt32;
  if (dtype == aoti_torch_dtype_bool()) return DType::kBool;
  if (dtype == aoti_torch_dtype_uint8()) return DType::kUInt8;
  if (dtype == aoti_torch_dtype_int8()) return DType::kInt8;
  if (dtype == aoti_torch_dtype_int16()) return DType::kInt16;
  return DType::kOther;
}

inline int32_t torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return aoti_torch_dtype_bool();
    case DType::kUInt8:
      return aoti_torch_dtype_uint8();
    case DType::kInt8:
      return aoti_torch_dtype_int8();
    case DType::kInt16:
      return aoti_torch_dtype_int16();
    case DType::kInt32:
      return aoti_torch_dtype_int32();
    case DType::kInt64:
      return aoti_torch_dtype_int64();
    case DType::kBFloat16:
      return aoti_torch_dtype_bfloat16();
    case DType::kFloat16:
      return aoti_torch_dtype_float16();
    case DType::kFloat32:
      return aoti_torch_dtype_float32();
    default:
      return aoti_torch_dtype_float64();
  }
}

// A dtype argument (ScalarType in the schema): the floating ones and bool, kOther for the rest.
inline DType dtype_of(torch::headeronly::ScalarType dtype) {
  using torch::headeronly::ScalarType;
  switch (dtype) {
    case ScalarType::Bool:
      return DType::kBool;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      return DType::kOther;
  }
}

namespace detail {

inline Tensor empty_on(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int32_t dtype,
                       const Tensor& device_of) {
  int32_t device_type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(device_of.get(), &device_type));
  return allocate(sizes, strides, dtype, device_type, device_of.get_device_index());
}

inline std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  return strides;
}

}  // namespace detail

inline Tensor empty(const std::vector<int64_t>& sizes, DType dtype, const Tensor& device_of) {
  return detail::empty_on(sizes, detail::contiguous_strides(sizes), torch_dtype(dtype), device_of);
}

// The dtype and device of `like`, any dtype at all.
inline Tensor empty_as(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, const Tensor& like) {
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  return detail::empty_on(sizes, strides, dtype, like);
}

inline Tensor empty_as(const std::vector<int64_t>& sizes, const Tensor& like) {
  return empty_as(sizes, detail::contiguous_strides(sizes), like);
}

// Pinned memory of the host, which kernels on the device of `device_of` can write; ordinary memory for a CPU tensor.
inline Tensor empty_on_host(int64_t size, DType dtype, const Tensor& device_of) {
  if (device_of.is_cpu()) return empty({size}, dtype, device_of);
  return allocate({size}, {1}, torch_dtype(dtype), aoti_torch_device_type_cpu(), 0, true);
}

// torch.empty_like: the strides of `t` where its memory is dense. Asking the dispatcher would cost a tiny op 0.5 us.
inline Tensor empty_with_strides_of(const Tensor& t) {
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  // Dense: from the innermost dimension outwards each stride is the size of what is inside it.
  int64_t inside = 1;
  for (size_t found = 0; found < sizes.size(); ++found) {
    size_t next = 0;
    while (next < sizes.size() && (sizes[next] <= 1 || strides[next] != inside)) ++next;
    if (next == sizes.size()) break;
    inside *= sizes[next];
  }
  if (inside == t.numel()) return empty_as({sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}, t);
  try {
    return torch::stable::empty_like(t);
  } catch (const std::runtime_error&) {
    return empty_as({sizes.begin(), sizes.end()}, t);  // no memory: raised as torch raises it
  }
}

// Scratch for a kernel: from torch, so that the caching allocator and CUDA graphs know about it.
inline Tensor scratch(int64_t bytes, const Tensor& device_of) {
  return empty({bytes < 1 ? 1 : bytes}, DType::kUInt8, device_of);
}

inline std::vector<int64_t> sizes_of(const Tensor& t) {
  std::vector<int64_t> sizes(static_cast<size_t>(t.dim()));
  for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = t.size(static_cast<int64_t>(i));
  return sizes;
}

// Contiguous, even where strides of `t` overlap.
inline Tensor copy_of(const Tensor& t) {
  Tensor copy = empty_as(sizes_of(t), t);
  return torch::stable::copy_(copy, t);
}

inline Tensor dense(const Tensor& t) {
  return t.is_contiguous() ? t : copy_of(t);
}

// For what is planned on the CPU, which is faster than a GPU at it: one copy for a tensor on CUDA, which waits for it.
inline Tensor on_host(const Tensor& t) {
  if (t.is_cpu()) return t;
  const std::vector<int64_t> sizes = sizes_of(t);
  Tensor copy =
      allocate(sizes, detail::contiguous_strides(sizes), torch_dtype(dtype_of(t)), aoti_torch_device_type_cpu(), 0);
  return torch::stable::copy_(copy, t);
}

// And back.
inline Tensor on_device_of(const Tensor& t, const Tensor& device_of) {
  if (device_of.is_cpu()) return t;
  Tensor copy = empty(sizes_of(t), dtype_of(t), device_of);
  return torch::stable::copy_(copy, t);
}

inline std::optional<Tensor> dense(const std::optional<Tensor>& t) {
  return t ? std::optional<Tensor>(dense(*t)) : std::nullopt;
}

inline void* data_or_null(const std::optional<Tensor>& t) {
  return t ? t->data_ptr() : nullptr;
}

inline IndexView index_view(const Tensor& t) {
  return {t.data_ptr(), dtype_of(t) == DType::kInt64};
}

inline MutableIndexView mutable_index_view(const Tensor& t) {
  return {t.data_ptr(), dtype_of(t) == DType::kInt64};
}

inline Documents documents_view(const Tensor& cu_seqlens, int64_t total) {
  return {static_cast<const int32_t*>(cu_seqlens.data_ptr()), cu_seqlens.numel() - 1, total};
}

}  // namespace packing_ops
