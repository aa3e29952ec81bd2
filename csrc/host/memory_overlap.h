// Whether elements of tensors that are changed in place share memory.
#pragma once

#include "host/tensor_view.h"

namespace packing_ops {

// No two elements share memory. The last dimension is contiguous.
void check_no_overlap(const Tensor& t, const char* name);

// No element of `t` shares memory with one of `other`: of its dtype, with a contiguous last dimension of the same size.
void check_no_overlap(const Tensor& t, const char* name, const Tensor& other, const char* other_name);

}  // namespace packing_ops
