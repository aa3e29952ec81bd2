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
  // Under PACKING_OPS_CHECK=1 waits for the stream, unless it is being captured, and raises this call's fault.
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

// Waits for a result in host memory, set to kUnset before the launch, until the kernel has written it.
constexpr int64_t kUnset = -1;
int64_t wait_for_value(const Tensor& anchor, const int64_t* value);

// Scratch memory of a CUDA kernel, bytes_of(arguments...) bytes; 0 on the CPU. Keep the tensor until after the
// launch. `bytes_of` is PACKING_OPS_CUDA(...) of a function.
template <class BytesOf, class... Arguments>
std::optional<Tensor> cuda_scratch(const Tensor& anchor, BytesOf bytes_of, const Arguments&... arguments) {
  if constexpr (!std::is_null_pointer_v<BytesOf>) {
    if (anchor.is_cuda()) return scratch(bytes_of(arguments...), anchor);
  }
  return std::nullopt;
}

}  // namespace packing_ops
