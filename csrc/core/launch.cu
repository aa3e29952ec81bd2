#include <stdexcept>
#include <string>

#include "core/launch.cuh"

#ifndef PACKING_OPS_WITH_CUDA
#define PACKING_OPS_WITH_CUDA ""
#define PACKING_OPS_CUDA_ARCHS ""
#endif

namespace packing_ops {

namespace {

// Whether the library does not fit this driver or this GPU: cudaGetErrorString does not say so.
bool is_of_the_build(cudaError_t status) {
  switch (status) {
    case cudaErrorInsufficientDriver:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidPtx:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
      return true;
    default:
      return false;
  }
}

}  // namespace

void fail_cuda(cudaError_t status, const char* what) {
  std::string text = std::string(what) + ": " + cudaGetErrorString(status);
  if (is_of_the_build(status)) {
    text += "; packing_ops was built with CUDA " PACKING_OPS_WITH_CUDA " for " PACKING_OPS_CUDA_ARCHS
            ", which this driver or this GPU does not run: python -m packing_ops info says what is needed";
  }
  throw std::runtime_error(text);
}

}  // namespace packing_ops
