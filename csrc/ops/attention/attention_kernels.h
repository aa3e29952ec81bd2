// Which kernels serve a call, only by its geometry, dtype and device.
#pragma once

#include "ops/attention/attention.h"

namespace packing_ops {

// The folder of the kernels in cuda/; "... and sm80" where short rows or documents run on those.
// Read from p: dtype, heads, head_dims and device.
const char* attention_forward_kernels_cuda(const VarlenAttentionParams& p);
const char* attention_backward_kernels_cuda(const VarlenAttentionParams& p);

}  // namespace packing_ops
