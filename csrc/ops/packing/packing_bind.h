// Shared by the packing family's bind files.
#pragma once

#include "host/tensor_view.h"

namespace packing_ops {

// Packing is planned on the CPU, which is faster than a GPU at it; one copy for a tensor on CUDA.
inline Tensor on_host(const Tensor& t) {
  if (t.is_cpu()) return t;
  const std::vector<int64_t> sizes = sizes_of(t);
  Tensor copy =
      allocate(sizes, detail::contiguous_strides(sizes), torch_dtype(dtype_of(t)), aoti_torch_device_type_cpu(), 0);
  return torch::stable::copy_(copy, t);
}

inline int64_t* outputs(const Tensor& t) {
  return static_cast<int64_t*>(t.data_ptr());
}

}  // namespace packing_ops
