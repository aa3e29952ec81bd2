// Shapes of the backward, and the instances that exist: one small .cu file each.
#pragma once

#include <cuda_runtime.h>

#include "ops/attention/sm80/args.h"

namespace packing_ops::sm80 {

constexpr int kBackwardRows = 64;
constexpr int backward_keys(int padded) {
  return padded <= 128 ? 128 : 64;
}
// Documents of one key tile have a kernel of their own; of at most so many keys with smaller blocks, two to a
// multiprocessor.
constexpr int backward_small_keys(int padded) {
  return padded <= 128 ? 64 : 0;
}

// Documents of several key tiles.
template <class T, int kDim, bool kTransform>
void run_backward(const Args& args, cudaStream_t stream);

// Documents of one. kKeys is backward_keys or backward_small_keys of the padded head_dim.
template <class T, int kDim, int kKeys, bool kTransform>
void run_backward_single(const Args& args, cudaStream_t stream);

// Before both: row_stats, zeros where no unit writes, and zeros for args.order.
template <class T>
void run_row_stats(const Args& args, cudaStream_t stream);

// After it: dsinks.
void run_sinks_backward(const Args& args, cudaStream_t stream);

}  // namespace packing_ops::sm80
