// Device side of segment.h.
#pragma once

#include "core/fault.h"
#include "core/segment.h"

namespace packing_ops {

// The grid checks cu_seqlens together, each entry once; it costs no launch of its own.
__device__ inline void flag_cu_seqlens(const Documents& documents, const FaultFlag& fault) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i <= documents.num_documents;
       i += step) {
    const int32_t value = documents.cu_seqlens[i];
    if (i == 0 && value != 0) fault.raise(Fault::kCuSeqlensStart, 0);
    if (i > 0 && value < documents.cu_seqlens[i - 1]) fault.raise(Fault::kCuSeqlensOrder, i);
    if (value > documents.total) fault.raise(Fault::kCuSeqlensTotal, i);
  }
}

}  // namespace packing_ops
