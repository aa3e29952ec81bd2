#include "ops/attention/cuda/sm90/forward.cuh"

namespace packing_ops::attention::sm90 {

template void run_forward<__nv_bfloat16, 64, 64, false>(const Args&, DType, cudaStream_t, bool);
template void run_forward<__nv_bfloat16, 64, 64, true>(const Args&, DType, cudaStream_t, bool);
template void run_forward<__half, 64, 64, false>(const Args&, DType, cudaStream_t, bool);
template void run_forward<__half, 64, 64, true>(const Args&, DType, cudaStream_t, bool);

}  // namespace packing_ops::attention::sm90
