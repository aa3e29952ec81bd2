// torch's current CUDA stream, without linking a CUDA library of torch.
#pragma once

#include <cstdint>

namespace packing_ops {

// cudaStream_t of the current stream of that device.
void* current_cuda_stream(int32_t device_index);

}  // namespace packing_ops
