// Written by tools/generate_instances.py.
// clang-format off
#include "ops/attention/cuda/sm80/forward.cuh"

namespace packing_ops::attention::sm80 {

template void run_forward<__nv_bfloat16, 192, false, false>(const Args&, cudaStream_t, bool);
template void run_forward<__nv_bfloat16, 192, false, true>(const Args&, cudaStream_t, bool);
template void run_forward<__half, 192, false, false>(const Args&, cudaStream_t, bool);
template void run_forward<__half, 192, false, true>(const Args&, cudaStream_t, bool);

}  // namespace packing_ops::attention::sm80
