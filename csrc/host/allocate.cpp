#include "host/allocate.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>

#include "host/loaded_function.h"

namespace packing_ops {

namespace {

using torch::stable::Tensor;

// The stable ABI turns an exception into an error code: its class (torch.OutOfMemoryError, which those catch who look
// for the largest batch) and its text are lost. So what has failed is asked for once more, by the C++ function behind
// it, whose exception goes on through us to Python. Its arguments, as they are handed over:
struct IntArray {  // c10::ArrayRef<c10::SymInt>
  const int64_t* data;
  size_t size;
};
struct TorchDevice {  // c10::Device
  int8_t type;
  int8_t index;
};
struct TorchTensor {  // at::Tensor: one pointer, returned in memory since it has a destructor. Here it gives nothing
                      // up.
  void* impl;
  ~TorchTensor() {}
};
using EmptyStrided = TorchTensor (*)(IntArray sizes, IntArray strides, std::optional<int8_t> dtype,
                                     std::optional<int8_t> layout, std::optional<TorchDevice> device,
                                     std::optional<bool> pinned);
// at::_ops::empty_strided::call(c10::SymIntArrayRef, c10::SymIntArrayRef, std::optional<at::ScalarType>,
// std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>): other types give another name.
constexpr const char* kTorch = "libtorch_cpu.so";
constexpr const char* kEmptyStrided =
    "_ZN2at4_ops13empty_strided4callEN3c108ArrayRefINS2_6SymIntEEES5_St8optionalINS2_10ScalarTypeEES6_INS2_6LayoutEES6_"
    "INS2_6DeviceEES6_IbE";

// For a torch without that function: its text if it has one (2.13 does), else ours.
[[noreturn]] void raise_without_class(const std::vector<int64_t>& sizes) {
  if (const auto text = loaded_function<const char* (*)()>(kTorch, "torch_exception_get_what_without_backtrace")) {
    throw std::runtime_error(text());
  }
  std::string shape;
  for (const int64_t size : sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
  throw std::runtime_error("torch gave no memory for a tensor [" + shape + "]: out of memory?");
}

}  // namespace

Tensor allocate(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int32_t dtype,
                int32_t device_type, int32_t device_index, bool pinned) {
  const auto ask = pinned ? aoti_torch_empty_strided_pinned : aoti_torch_empty_strided;
  AtenTensorHandle handle = nullptr;
  if (ask(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, device_type, device_index,
          &handle) == AOTI_TORCH_SUCCESS) {
    return Tensor(handle);
  }
  const auto empty_strided = loaded_function<EmptyStrided>(kTorch, kEmptyStrided);
  if (!empty_strided) raise_without_class(sizes);
  const TorchDevice device{static_cast<int8_t>(device_type), static_cast<int8_t>(device_index)};
  constexpr int8_t kStrided = 0;
  // A handle is the address of an at::Tensor, which torch deletes.
  return Tensor(reinterpret_cast<AtenTensorHandle>(
      new TorchTensor(empty_strided({sizes.data(), sizes.size()}, {strides.data(), strides.size()},
                                    static_cast<int8_t>(dtype), kStrided, device, pinned))));
}

}  // namespace packing_ops
