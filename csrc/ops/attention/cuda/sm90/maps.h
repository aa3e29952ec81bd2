// Tensor maps: what the copy engine knows of a tensor.
#pragma once

#include "ops/attention/cuda/sm90/backward.h"
#include "ops/attention/cuda/sm90/forward.h"

namespace packing_ops::attention::sm90 {

ForwardArgs forward_args(const Args& args, DType dtype, int step_keys);
BackwardArgs backward_args(const Args& args, DType dtype, int unit_keys);

}  // namespace packing_ops::attention::sm90
