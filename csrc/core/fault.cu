#include "core/fault.h"
#include "core/launch.cuh"

namespace packing_ops {

FaultFlag device_fault_flag() {
  static const FaultFlag flag = [] {
    // The first call may come while a graph is being captured, where plain allocation is refused.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    void* word = nullptr;
    const cudaError_t status =
        cudaHostAlloc(&word, sizeof(unsigned long long), cudaHostAllocPortable | cudaHostAllocMapped);
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    check_cuda(status, "cudaHostAlloc");
    auto* typed = static_cast<volatile unsigned long long*>(word);
    *typed = 0;
    return FaultFlag{typed};
  }();
  return flag;
}

void wait_for_stream(void* stream) {
  check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize");
}

}  // namespace packing_ops
