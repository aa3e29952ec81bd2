// Memory from torch's allocators; without any left, the error that torch itself raises.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace packing_ops {

// dtype and device_type in torch's numbers. Uninitialised, without a trip through the dispatcher.
torch::stable::Tensor allocate(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int32_t dtype,
                               int32_t device_type, int32_t device_index, bool pinned = false);

}  // namespace packing_ops
