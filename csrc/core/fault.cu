#include <stdexcept>

#include "core/fault.h"
#include "core/launch.cuh"

namespace packing_ops {

FaultFlag device_fault_flag() {
  static const FaultFlag flag = [] {
    // The first call may be made while a graph is being captured, where plain allocation is refused.
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
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture), "cudaStreamIsCapturing");
  if (capture != cudaStreamCaptureStatusNone) return;
  check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize");
}

int64_t wait_for_value(const volatile int64_t* value, int64_t unset, void* stream) {
  // A stream that failed, or is being captured, never sets it; asking costs more than looking.
  constexpr int kLooks = 4096;
  for (;;) {
    for (int i = 0; i < kLooks; ++i) {
      if (*value != unset) return *value;
    }
    const cudaError_t status = cudaStreamQuery(static_cast<cudaStream_t>(stream));
    if (status != cudaErrorNotReady) check_cuda(status, "cudaStreamQuery");
    if (status == cudaSuccess && *value == unset) throw std::runtime_error("packing_ops: a kernel left no value");
  }
}

}  // namespace packing_ops
