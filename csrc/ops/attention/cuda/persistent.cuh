#pragma once

#include <cuda_runtime.h>

#include "ops/attention/cuda/args.cuh"

namespace packing_ops::attention {

constexpr int kMaxDevices = 64;

// One per instance. resident_blocks: how many of its blocks a device runs at once, queried at the first launch.
struct PersistentKernel {
  const void* entry;
  int threads;
  int shared;
  const char* name;
  int resident_blocks[kMaxDevices] = {};  // atomic; <atomic> would take long to compile in every instance
};

// A grid of min(units, resident blocks). args: the kernel's only parameter. overlaps: programmatic dependent launch, so
// that it may start while the kernel before still runs, which must be one of the same call.
void launch_persistent(PersistentKernel& kernel, const void* args, int64_t units, cudaStream_t stream,
                       bool overlaps = false);

// The unit of this block in round `round`: in serpentine order, so that no block always gets the costlier one.
__device__ __forceinline__ uint32_t serpentine(uint32_t round) {
  const uint32_t index = (round & 1) ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  return round * gridDim.x + index;
}

}  // namespace packing_ops::attention
