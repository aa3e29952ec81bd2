#include "ops/attention/cuda/sm90/backward.cuh"

namespace packing_ops::attention::sm90 {

template void run_backward<__nv_bfloat16, 256, 256, false>(const Args&, DType, cudaStream_t);
template void run_backward<__nv_bfloat16, 256, 256, true>(const Args&, DType, cudaStream_t);
template void run_backward<__half, 256, 256, false>(const Args&, DType, cudaStream_t);
template void run_backward<__half, 256, 256, true>(const Args&, DType, cudaStream_t);

}  // namespace packing_ops::attention::sm90
