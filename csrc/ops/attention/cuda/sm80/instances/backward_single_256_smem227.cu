// Written by tools/generate_instances.py.
// clang-format off
#include "ops/attention/cuda/sm80/backward_single.cuh"

namespace packing_ops::attention::sm80 {

template void run_backward_single<__nv_bfloat16, 256, backward_keys(256, SmemTier::k227KB), false, SmemTier::k227KB>(const Args&, cudaStream_t);
template void run_backward_single<__nv_bfloat16, 256, backward_keys(256, SmemTier::k227KB), true, SmemTier::k227KB>(const Args&, cudaStream_t);
template void run_backward_single<__half, 256, backward_keys(256, SmemTier::k227KB), false, SmemTier::k227KB>(const Args&, cudaStream_t);
template void run_backward_single<__half, 256, backward_keys(256, SmemTier::k227KB), true, SmemTier::k227KB>(const Args&, cudaStream_t);

}  // namespace packing_ops::attention::sm80
