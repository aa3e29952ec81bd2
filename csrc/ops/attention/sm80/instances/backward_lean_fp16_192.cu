#include "ops/attention/sm80/backward_lean.cuh"

namespace packing_ops::sm80 {

template void run_lean_backward<__half, 192, false>(const Args&, cudaStream_t);
template void run_lean_backward<__half, 192, true>(const Args&, cudaStream_t);

}  // namespace packing_ops::sm80
