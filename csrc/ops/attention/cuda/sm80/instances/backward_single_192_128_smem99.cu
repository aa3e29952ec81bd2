// Written by tools/generate_instances.py.
// clang-format off
#include "ops/attention/cuda/sm80/backward_single.cuh"

namespace packing_ops::attention::sm80 {

template void run_backward_single<__nv_bfloat16, 192, backward_keys(192, SmemTier::k99KB), false, SmemTier::k99KB, 128>(const Args&, cudaStream_t);
template void run_backward_single<__nv_bfloat16, 192, backward_keys(192, SmemTier::k99KB), true, SmemTier::k99KB, 128>(const Args&, cudaStream_t);
template void run_backward_single<__half, 192, backward_keys(192, SmemTier::k99KB), false, SmemTier::k99KB, 128>(const Args&, cudaStream_t);
template void run_backward_single<__half, 192, backward_keys(192, SmemTier::k99KB), true, SmemTier::k99KB, 128>(const Args&, cudaStream_t);

}  // namespace packing_ops::attention::sm80
