// float32 on a GPU: right before fast, a warp for each row and no tensor cores (so no tf32).
#pragma once

#include "ops/attention/sm80/args.h"

namespace packing_ops::fp32 {

void run_forward(const sm80::Args& args, cudaStream_t stream);
// Needs args.row_stats.
void run_backward(const sm80::Args& args, cudaStream_t stream);

}  // namespace packing_ops::fp32
