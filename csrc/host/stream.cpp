#include "host/stream.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <stdexcept>

#include "host/loaded_function.h"

namespace packing_ops {

#ifdef PACKING_OPS_WITH_CUDA

void* current_cuda_stream(int32_t device_index) {
  // libtorch_cuda is loaded by whoever made a CUDA tensor.
  using Getter = decltype(&aoti_torch_get_current_cuda_stream);
  static const Getter getter = [] {
    const auto found = loaded_function<Getter>("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream");
    if (!found) throw std::runtime_error("packing_ops: this torch has no libtorch_cuda.so with a current stream");
    return found;
  }();
  void* stream = nullptr;
  if (getter(device_index, &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("packing_ops: torch did not give its current CUDA stream");
  }
  return stream;
}

#else

void* current_cuda_stream(int32_t) {
  throw std::runtime_error("packing_ops was built without CUDA");
}

#endif

}  // namespace packing_ops
