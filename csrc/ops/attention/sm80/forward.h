// Which tile shape a head_dim gets, and the instances that exist: a small .cu file each, for both half types.
#pragma once

#include <cuda_runtime.h>

#include "ops/attention/sm80/args.h"

namespace packing_ops::sm80 {

// The instance for a head_dim; columns above head_dim are zeros.
constexpr int padded_dim(int64_t head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 96 ? 96 : head_dim <= 128 ? 128 : head_dim <= 192 ? 192 : 256;
}
constexpr int forward_rows(int padded) {
  return padded <= 128 ? 128 : 64;
}
constexpr int forward_keys(int padded) {
  return padded <= 128 ? 64 : 32;
}

// Documents of at most so many keys times heads of a group get smaller units, four to a multiprocessor.
constexpr int kShortMost = 512;
constexpr bool has_short_forward(int padded) {
  return padded <= 128;
}
constexpr int kShortRows = 64;
constexpr int kShortKeys = 32;

// Documents of at most so many keys and tokens are a single unit where a block may take enough shared memory (sm_90,
// sm_100) for a ring of key tiles, and for 16 rows of q for each of the warps that compute.
constexpr int kWholeMost = 128;
constexpr int kWholeRows = 16;
constexpr int kWholeWarps = 15;
constexpr int whole_tiles(int padded) {
  return 10 * 128 / padded;
}
constexpr int whole_shared(int padded) {
  return (2 * whole_tiles(padded) * kShortKeys + kWholeWarps * kWholeRows) * padded * 2 + 128;
}
constexpr int kWholeRing = 2048;  // bytes beside these, at most
bool has_whole_forward(int padded, int device);

// kTransform: scores pass through softcap, or softmax_scale is not positive.
template <class T, int kDim, bool kShort, bool kTransform>
void run_forward(const Args& args, cudaStream_t stream);

template <class T, int kDim, bool kTransform>
void run_forward_whole(const Args& args, cudaStream_t stream);

}  // namespace packing_ops::sm80
