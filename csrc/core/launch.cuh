// Launch helpers for .cu files.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/launch.h"

namespace packing_ops {

inline cudaStream_t stream_of(const CudaLaunch& launch) {
  return static_cast<cudaStream_t>(launch.stream);
}

// Not here: the headers of exceptions and strings would be a fifth of what an instance of attention takes to compile.
[[noreturn]] void fail_cuda(cudaError_t status, const char* what);

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) fail_cuda(status, what);
}

// After every <<<>>>: an invalid configuration is reported where it happened.
inline void check_launch(const char* kernel) {
  check_cuda(cudaGetLastError(), kernel);
}

// Of a one-dimensional grid.
__device__ inline int64_t thread_id() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ inline int64_t thread_count() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Enough blocks for `work` items, at most as many as keep the GPU full; kernels loop over the rest.
inline unsigned grid_for(int64_t work, int threads, int blocks_per_sm = 16) {
  int device = 0;
  int sms = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  const int64_t blocks = ceil_div(work, threads);
  const int64_t max_blocks = static_cast<int64_t>(sms) * blocks_per_sm;
  return static_cast<unsigned>(blocks < 1 ? 1 : (blocks < max_blocks ? blocks : max_blocks));
}

}  // namespace packing_ops
