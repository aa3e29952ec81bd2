// Tensor maps: what the copy engine knows of a tensor.
#pragma once

#include "ops/attention/cuda/sm90/backward.h"
#include "ops/attention/cuda/sm90/forward.h"

namespace packing_ops::attention::sm90 {

ForwardArgs forward_args(const Args& args, DType dtype, int step_keys);
// copied_keys, stored_keys: rows of k and v that come at once, of dk and dv that leave at once.
BackwardArgs backward_args(const Args& args, DType dtype, int copied_keys, int stored_keys);

}  // namespace packing_ops::attention::sm90
