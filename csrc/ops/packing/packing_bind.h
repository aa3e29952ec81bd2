// Shared by the packing family's bind files.
#pragma once

#include "host/tensor_view.h"

namespace packing_ops {

inline int64_t* outputs(const Tensor& t) {
  return static_cast<int64_t*>(t.data_ptr());
}

}  // namespace packing_ops
