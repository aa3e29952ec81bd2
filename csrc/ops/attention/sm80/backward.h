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

// Most bytes of shared memory that a block takes, with so many row tiles on their way.
constexpr int backward_shared(int padded, int keys, int stages) {
  const int scores = 2 * kBackwardRows * (keys < 64 ? 64 : keys) * 2;
  return 2 * keys * padded * 2 + scores + stages * (2 * kBackwardRows * padded * 2 + kBackwardRows * 8);
}

// GPUs of less shared memory (sm_86, sm_89, sm_120) get narrower tiles, one row tile at a time.
constexpr int lean_backward_keys(int padded) {
  return padded <= 128 ? 64 : 32;
}
constexpr bool has_lean_backward(int padded) {
  return padded == 96 || padded == 128 || padded == 192;
}
bool needs_lean_backward(int padded, int device);

// Documents of several key tiles.
template <class T, int kDim, bool kTransform, bool kLean = false>
void run_backward(const Args& args, cudaStream_t stream);

// Documents of one. kKeys is backward_keys, backward_small_keys or lean_backward_keys of the padded head_dim.
template <class T, int kDim, int kKeys, bool kTransform, bool kLean = false>
void run_backward_single(const Args& args, cudaStream_t stream);

// Before both: row_stats, zeros where no unit writes, and zeros for args.order.
template <class T>
void run_row_stats(const Args& args, cudaStream_t stream);

// After it: dsinks.
void run_sinks_backward(const Args& args, cudaStream_t stream);

}  // namespace packing_ops::sm80
