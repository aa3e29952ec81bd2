// What a CUDA launcher needs besides its params. No CUDA header: the CPU-only library includes this too.
#pragma once

#include "core/fault.h"

namespace packing_ops {

struct CudaLaunch {
  void* stream = nullptr;  // cudaStream_t
  FaultFlag fault;
};

}  // namespace packing_ops
