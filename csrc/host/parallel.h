// torch's own thread pool for CPU kernels.
#pragma once

#include <torch/csrc/stable/ops.h>

namespace packing_ops {

using torch::stable::get_num_threads;
using torch::stable::parallel_for;  // (begin, end, grain_size, f(begin, end))

}  // namespace packing_ops
