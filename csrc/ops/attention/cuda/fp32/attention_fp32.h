// float32 on a GPU: right before fast, a warp for each row and no tensor cores (so no tf32).
#pragma once

#include "ops/attention/cuda/args.cuh"

namespace packing_ops::attention::fp32 {

void run_forward(const Args& args, cudaStream_t stream);
// Needs args.row_stats.
void run_backward(const Args& args, cudaStream_t stream);

}  // namespace packing_ops::attention::fp32
