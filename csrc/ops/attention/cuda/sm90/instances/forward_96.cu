#include "ops/attention/cuda/sm90/forward.cuh"

namespace packing_ops::attention::sm90 {

template void run_forward<__nv_bfloat16, 96, 96, false>(const Args&, DType, cudaStream_t, bool);
template void run_forward<__nv_bfloat16, 96, 96, true>(const Args&, DType, cudaStream_t, bool);
template void run_forward<__half, 96, 96, false>(const Args&, DType, cudaStream_t, bool);
template void run_forward<__half, 96, 96, true>(const Args&, DType, cudaStream_t, bool);

}  // namespace packing_ops::attention::sm90
