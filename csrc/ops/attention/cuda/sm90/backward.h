// Backward of head_dim up to 256 in the half types on compute capability 9.0: documents of more than 64 keys.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "ops/attention/cuda/args.cuh"

namespace packing_ops::attention::sm90 {

struct BackwardArgs {
  CUtensorMap q, dout, k, v, dk, dv;
  CUtensorMap q_token, dout_token;  // a token's rows, for tiles that begin before their document
  Args common;
  Divisor tile_tokens;
};

// kTransform: as transforms_scores of softmax.cuh says.
template <class T, int kDim, int kDimV, bool kTransform>
void run_backward(const Args& args, DType dtype, cudaStream_t stream);

}  // namespace packing_ops::attention::sm90
