#include "ops/attention/cuda/sm80/backward.cuh"

namespace packing_ops::attention::sm80 {

template void run_backward<__nv_bfloat16, 96, false, Room::kMedium>(const Args&, cudaStream_t);
template void run_backward<__nv_bfloat16, 96, true, Room::kMedium>(const Args&, cudaStream_t);
template void run_backward<__half, 96, false, Room::kMedium>(const Args&, cudaStream_t);
template void run_backward<__half, 96, true, Room::kMedium>(const Args&, cudaStream_t);

}  // namespace packing_ops::attention::sm80
