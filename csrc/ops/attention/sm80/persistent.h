#pragma once

#include <cuda_runtime.h>

#include "ops/attention/sm80/args.h"

namespace packing_ops::sm80 {

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

// Bytes that a block on the device may take, or PACKING_OPS_SHARED_MEMORY where that is less: what a smaller GPU does
// can be tried on a larger one.
int64_t shared_memory_of_block(int device);

// At most `units` blocks, at most as many as fit at once.
void launch_persistent(PersistentKernel& kernel, const Args& args, int64_t units, cudaStream_t stream);

}  // namespace packing_ops::sm80
