// What the checks of both ops share. `first` is the tensor that others are compared with.
#pragma once

#include <vector>

#include "host/launch.h"
#include "host/tensor_check.h"
#include "ops/scan/scan.h"

namespace packing_ops {

inline DType scan_sums_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// Kernels read rows in pieces of 16 bytes on CUDA.
inline Tensor scan_rows(const Tensor& t) {
  const int64_t piece = t.is_cpu() ? 1 : dtype_of(t) == DType::kFloat32 ? 4 : 8;
  const bool aligned = t.is_cpu() || reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
  const bool whole = t.size(2) <= 1 || t.stride(2) == 1;
  return t.numel() == 0 || (whole && aligned && t.stride(0) % piece == 0 && t.stride(1) % piece == 0) ? t : dense(t);
}

inline HeadRows scan_rows_view(const Tensor& t) {
  return {t.data_ptr(), t.stride(0), t.stride(1)};
}

inline void check_scan_rows(const Tensor& first, const char* name) {
  if (first.is_cpu()) {
    check_dtype(first, name, {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64});
  } else {
    check_dtype(first, name, {DType::kFloat32, DType::kBFloat16, DType::kFloat16});
  }
  check_rank(first, name, 3);
  check_total(first.size(0), name);
}

inline void check_like_first(const Tensor& t, const char* name, const Tensor& first, const char* first_name) {
  check_rank(t, name, 3);
  check_same_device(t, name, first, first_name);
  check_same_dtype(t, name, first, first_name);
}

inline void check_scan_sums(const Tensor& t, const char* name, const Tensor& first, const char* first_name,
                            const std::vector<int64_t>& shape, const char* wanted) {
  check_dtype(t, name, {scan_sums_dtype(dtype_of(first))});
  check_same_device(t, name, first, first_name);
  check_shape(t, name, shape, wanted);
}

inline void check_head_dim(const Tensor& t, const char* name) {
  const int64_t size = t.size(2);
  if (t.is_cpu() || size == 64 || size == 128 || size == 256) return;
  fail(name, ": expected a head_dim of 64, 128 or 256 on CUDA, got ", describe(t));
}

inline void set_scan_dims(const Tensor& q, const Tensor& v, ScanParams& p) {
  p.dtype = dtype_of(q);
  p.num_k_heads = q.size(1);
  p.head_dim = q.size(2);
  p.num_v_heads = v.size(1);
  p.head_dim_v = v.size(2);
}

}  // namespace packing_ops
