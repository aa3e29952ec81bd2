// The forward's instances that exist: a small .cu file each, for both half types. Their tiles: cuda/tiles.h.
#pragma once

#include <cuda_runtime.h>

#include "ops/attention/cuda/args.cuh"
#include "ops/attention/cuda/tiles.h"

namespace packing_ops::attention::sm80 {

// kTransform: as transforms_scores of softmax.cuh says. kDimV: of v and out.
template <class T, int kDim, bool kShort, bool kTransform, int kDimV = kDim>
void run_forward(const Args& args, cudaStream_t stream, bool overlaps);

template <class T, int kDim, bool kTransform>
void run_forward_resident(const Args& args, cudaStream_t stream);

// head_dim 512.
template <class T, SmemTier kTier>
void run_forward_wide(const Args& args, cudaStream_t stream);

}  // namespace packing_ops::attention::sm80
