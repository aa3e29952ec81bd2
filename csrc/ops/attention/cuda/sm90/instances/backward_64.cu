#include "ops/attention/cuda/sm90/backward.cuh"

namespace packing_ops::attention::sm90 {

template void run_backward<__nv_bfloat16, 64, 64, false>(const Args&, DType, cudaStream_t);
template void run_backward<__nv_bfloat16, 64, 64, true>(const Args&, DType, cudaStream_t);
template void run_backward<__half, 64, 64, false>(const Args&, DType, cudaStream_t);
template void run_backward<__half, 64, 64, true>(const Args&, DType, cudaStream_t);

}  // namespace packing_ops::attention::sm90
