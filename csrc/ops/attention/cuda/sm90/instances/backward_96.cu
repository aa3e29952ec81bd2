#include "ops/attention/cuda/sm90/backward.cuh"

namespace packing_ops::attention::sm90 {

template void run_backward<__nv_bfloat16, 96, 96, false>(const Args&, DType, cudaStream_t);
template void run_backward<__nv_bfloat16, 96, 96, true>(const Args&, DType, cudaStream_t);
template void run_backward<__half, 96, 96, false>(const Args&, DType, cudaStream_t);
template void run_backward<__half, 96, 96, true>(const Args&, DType, cudaStream_t);

}  // namespace packing_ops::attention::sm90
