// The last line of every bind function: run the CPU kernel, or the CUDA kernel on torch's current stream.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <type_traits>

#include "core/launch.h"
#include "host/tensor_view.h"

// A CPU-only library has no CUDA launchers to name.
#ifdef PACKING_OPS_WITH_CUDA
#define PACKING_OPS_CUDA(launcher) (&launcher)
#else
#define PACKING_OPS_CUDA(launcher) nullptr
#endif

namespace packing_ops {

// Device guard, stream and fault flag of one call. Raises what an earlier call left in the flag.
class CudaScope {
 public:
  explicit CudaScope(const Tensor& anchor);
  const CudaLaunch& launch() const { return launch_; }
  // Under PACKING_OPS_CHECK=1 waits for the stream and raises this call's own fault.
  void finish() const;

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  CudaLaunch launch_;
};

template <class Params>
void launch(const Tensor& anchor, const Params& params, void (*cpu)(const Params&),
            std::type_identity_t<void (*)(const Params&, const CudaLaunch&)> cuda) {
  if (!anchor.is_cuda()) return cpu(params);
  CudaScope scope(anchor);
  cuda(params, scope.launch());
  scope.finish();
}

}  // namespace packing_ops
