// int64 cu_seqlens as the int32 that kernels read.
#pragma once

#include <cstdint>

#include "core/launch.h"

namespace packing_ops {

struct NarrowParams {
  const int64_t* from = nullptr;  // [count]
  int32_t* to = nullptr;          // [count]
  int64_t count = 0;
};

// A number that int32 does not hold is a fault, and becomes the nearest one that it holds, which every reader clamps.
void launch_narrow_cuda(const NarrowParams& p, const CudaLaunch& launch);

}  // namespace packing_ops
