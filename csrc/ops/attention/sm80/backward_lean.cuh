// The backward on GPUs whose blocks have less shared memory than backward.h's shapes ask for.
#pragma once

#include "ops/attention/sm80/backward.cuh"
#include "ops/attention/sm80/backward_single.cuh"

namespace packing_ops::sm80 {

template <class T, int kDim, bool kTransform>
void run_lean_backward(const Args& args, cudaStream_t stream) {
  launch_backward<T, kDim, kTransform, true>(args, stream);
  launch_backward_single<T, kDim, lean_backward_keys(kDim), kTransform, true>(args, stream);
}

}  // namespace packing_ops::sm80
