// Written by tools/generate_instances.py.
// clang-format off
#include "ops/attention/cuda/sm80/backward.cuh"

namespace packing_ops::attention::sm80 {

template void run_backward<__nv_bfloat16, 512, true, SmemTier::k227KB>(const Args&, cudaStream_t);
template void run_backward<__half, 512, true, SmemTier::k227KB>(const Args&, cudaStream_t);

}  // namespace packing_ops::attention::sm80
