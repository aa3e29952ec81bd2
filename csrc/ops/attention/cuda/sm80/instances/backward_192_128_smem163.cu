// Written by tools/generate_instances.py.
// clang-format off
#include "ops/attention/cuda/sm80/backward.cuh"

namespace packing_ops::attention::sm80 {

template void run_backward<__nv_bfloat16, 192, false, SmemTier::k163KB, 128>(const Args&, cudaStream_t);
template void run_backward<__nv_bfloat16, 192, true, SmemTier::k163KB, 128>(const Args&, cudaStream_t);
template void run_backward<__half, 192, false, SmemTier::k163KB, 128>(const Args&, cudaStream_t);
template void run_backward<__half, 192, true, SmemTier::k163KB, 128>(const Args&, cudaStream_t);

}  // namespace packing_ops::attention::sm80
