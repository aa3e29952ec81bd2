// What runs before and after the backward's units, for every kind of kernel.
#pragma once

#include <cuda_runtime.h>

#include "ops/attention/cuda/args.cuh"

namespace packing_ops::attention {

// Before them (FlashAttention's backward preprocess): row_stats, zeros where no unit writes, zeros in args.counters.
template <class T>
void run_row_stats(const Args& args, cudaStream_t stream);

// After run_row_stats: dsinks.
void run_sinks_backward(const Args& args, cudaStream_t stream);

}  // namespace packing_ops::attention
