// Whether elements of tensors that are changed in place share memory.
#pragma once

#include "host/tensor_view.h"

namespace packing_ops {

// Every element has memory of its own. The last dimension is contiguous.
void check_no_overlap(const Tensor& t, const char* name);

// No element of `t` lies where one of `other` does: of its dtype, with a contiguous last dimension of the same size.
void check_no_overlap(const Tensor& t, const char* name, const Tensor& other, const char* other_name);

}  // namespace packing_ops
