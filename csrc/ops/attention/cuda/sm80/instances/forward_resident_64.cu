// Written by tools/generate_instances.py.
// clang-format off
#include "ops/attention/cuda/sm80/forward_resident.cuh"

namespace packing_ops::attention::sm80 {

template void run_forward_resident<__nv_bfloat16, 64, false>(const Args&, cudaStream_t);
template void run_forward_resident<__nv_bfloat16, 64, true>(const Args&, cudaStream_t);
template void run_forward_resident<__half, 64, false>(const Args&, cudaStream_t);
template void run_forward_resident<__half, 64, true>(const Args&, cudaStream_t);

}  // namespace packing_ops::attention::sm80
