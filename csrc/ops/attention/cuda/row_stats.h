// Beside the units of the backward, for every kind of kernel.
#pragma once

#include <cuda_runtime.h>

#include "ops/attention/cuda/args.cuh"

namespace packing_ops::attention {

// Before both: row_stats, zeros where no unit writes, and zeros for args.order.
template <class T>
void run_row_stats(const Args& args, cudaStream_t stream);

// After it: dsinks.
void run_sinks_backward(const Args& args, cudaStream_t stream);

}  // namespace packing_ops::attention
