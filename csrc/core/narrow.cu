#include "core/launch.cuh"
#include "core/narrow.h"

namespace packing_ops {

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) narrow_kernel(NarrowParams p, FaultFlag fault) {
  for (int64_t i = thread_id(); i < p.count; i += thread_count()) {
    const int64_t value = p.from[i];
    const int64_t held = value > INT32_MAX ? INT32_MAX : (value < INT32_MIN ? INT32_MIN : value);
    if (held != value) fault.raise(held > value ? Fault::kCuSeqlensOrder : Fault::kCuSeqlensTotal, i);
    p.to[i] = static_cast<int32_t>(held);
  }
}

}  // namespace

void launch_narrow_cuda(const NarrowParams& p, const CudaLaunch& launch) {
  narrow_kernel<<<grid_for(p.count, kThreads), kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  check_launch("narrow_kernel");
}

}  // namespace packing_ops
