#include "ops/attention/sm80/backward_lean.cuh"

namespace packing_ops::sm80 {

template void run_lean_backward<__nv_bfloat16, 96, false>(const Args&, cudaStream_t);
template void run_lean_backward<__nv_bfloat16, 96, true>(const Args&, cudaStream_t);

}  // namespace packing_ops::sm80
