#include "ops/attention/cuda/sm80/backward.cuh"
#include "ops/attention/cuda/sm80/backward_single.cuh"

namespace packing_ops::attention::sm80 {

template void run_backward<__nv_bfloat16, 96, false, Room::kSmall>(const Args&, cudaStream_t);
template void run_backward<__nv_bfloat16, 96, true, Room::kSmall>(const Args&, cudaStream_t);
template void run_backward_single<__nv_bfloat16, 96, 64, false, Room::kSmall>(const Args&, cudaStream_t);
template void run_backward_single<__nv_bfloat16, 96, 64, true, Room::kSmall>(const Args&, cudaStream_t);
template void run_backward<__half, 96, false, Room::kSmall>(const Args&, cudaStream_t);
template void run_backward<__half, 96, true, Room::kSmall>(const Args&, cudaStream_t);
template void run_backward_single<__half, 96, 64, false, Room::kSmall>(const Args&, cudaStream_t);
template void run_backward_single<__half, 96, 64, true, Room::kSmall>(const Args&, cudaStream_t);

}  // namespace packing_ops::attention::sm80
