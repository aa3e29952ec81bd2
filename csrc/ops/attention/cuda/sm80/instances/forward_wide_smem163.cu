// Written by tools/generate_instances.py.
// clang-format off
#include "ops/attention/cuda/sm80/forward_wide.cuh"

namespace packing_ops::attention::sm80 {

template void run_forward_wide<__nv_bfloat16, SmemTier::k163KB>(const Args&, cudaStream_t);
template void run_forward_wide<__half, SmemTier::k163KB>(const Args&, cudaStream_t);

}  // namespace packing_ops::attention::sm80
