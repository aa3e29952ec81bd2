// The backward's instances, each in a separate .cu file for fp16 and bf16. Their tiles are in cuda/tiles.h.
#pragma once

#include <cuda_runtime.h>

#include "ops/attention/cuda/args.cuh"
#include "ops/attention/cuda/tiles.h"

namespace packing_ops::attention::sm80 {

// Documents of several key tiles. kDimV: of v, out, dout and dv.
template <class T, int kDim, bool kTransform, SmemTier kTier, int kDimV = kDim>
void run_backward(const Args& args, cudaStream_t stream);

// Documents of one key tile. kKeys is backward_keys or backward_small_keys.
template <class T, int kDim, int kKeys, bool kTransform, SmemTier kTier, int kDimV = kDim>
void run_backward_single(const Args& args, cudaStream_t stream);

}  // namespace packing_ops::attention::sm80
