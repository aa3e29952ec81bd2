#include "ops/attention/cuda/sm80/forward.cuh"
#include "ops/attention/cuda/sm80/forward_whole.cuh"

namespace packing_ops::attention::sm80 {

template void run_forward<__nv_bfloat16, 128, false, false>(const Args&, cudaStream_t);
template void run_forward<__nv_bfloat16, 128, false, true>(const Args&, cudaStream_t);
template void run_forward<__nv_bfloat16, 128, true, false>(const Args&, cudaStream_t);
template void run_forward<__nv_bfloat16, 128, true, true>(const Args&, cudaStream_t);
template void run_forward_whole<__nv_bfloat16, 128, false>(const Args&, cudaStream_t);
template void run_forward_whole<__nv_bfloat16, 128, true>(const Args&, cudaStream_t);
template void run_forward<__half, 128, false, false>(const Args&, cudaStream_t);
template void run_forward<__half, 128, false, true>(const Args&, cudaStream_t);
template void run_forward<__half, 128, true, false>(const Args&, cudaStream_t);
template void run_forward<__half, 128, true, true>(const Args&, cudaStream_t);
template void run_forward_whole<__half, 128, false>(const Args&, cudaStream_t);
template void run_forward_whole<__half, 128, true>(const Args&, cudaStream_t);

}  // namespace packing_ops::attention::sm80
