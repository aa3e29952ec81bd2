// Forward of head_dim up to 256 in the half types on compute capability 9.0: all rows but those of
// sm80/forward_resident.cuh.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "ops/attention/cuda/args.cuh"

namespace packing_ops::attention::sm90 {

// A map's dimensions: the columns, heads and tokens (of q and out; of k and v tokens and heads), the tokens again, and
// one that takes kMapTokens tokens off, for the first of the tokens' dimensions ends at kMapTokens.
constexpr int32_t kMapTokens = 1 << 30;

struct ForwardArgs {
  CUtensorMap q, k, v, out;
  Args common;
  int32_t tile_tokens = 0;
};

// kTransform: as transforms_scores of softmax.cuh says.
template <class T, int kDim, int kDimV, bool kTransform>
void run_forward(const Args& args, DType dtype, cudaStream_t stream, bool overlaps);

}  // namespace packing_ops::attention::sm90
