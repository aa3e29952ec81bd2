#pragma once

#include <cuda_runtime.h>

#include "ops/attention/cuda/args.cuh"

namespace packing_ops::attention {

constexpr int kMaxDevices = 64;

// One per instance: how many of its blocks fit on each device at once, asked for at the first launch.
struct PersistentKernel {
  const void* entry;
  int threads;
  int shared;
  const char* name;
  bool overlaps = false;           // may start while the kernel before still runs, where the GPU can do that
  int resident[kMaxDevices] = {};  // atomic; <atomic> would take long to compile in every instance
};

// At most `units` blocks, at most as many as fit at once. args: the kernel's only parameter.
void launch_persistent(PersistentKernel& kernel, const void* args, int64_t units, cudaStream_t stream);

// Unit number `round` of this block, in a serpentine so that no block always gets the longer one.
__device__ __forceinline__ uint32_t serpentine(uint32_t round) {
  const uint32_t at = (round & 1) ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  return round * gridDim.x + at;
}

}  // namespace packing_ops::attention
