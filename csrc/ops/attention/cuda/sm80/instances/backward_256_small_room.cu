#include "ops/attention/cuda/sm80/backward.cuh"
#include "ops/attention/cuda/sm80/backward_single.cuh"

namespace packing_ops::attention::sm80 {

template void run_backward<__nv_bfloat16, 256, false, Room::kSmall>(const Args&, cudaStream_t);
template void run_backward<__nv_bfloat16, 256, true, Room::kSmall>(const Args&, cudaStream_t);
template void run_backward_single<__nv_bfloat16, 256, 32, false, Room::kSmall>(const Args&, cudaStream_t);
template void run_backward_single<__nv_bfloat16, 256, 32, true, Room::kSmall>(const Args&, cudaStream_t);
template void run_backward<__half, 256, false, Room::kSmall>(const Args&, cudaStream_t);
template void run_backward<__half, 256, true, Room::kSmall>(const Args&, cudaStream_t);
template void run_backward_single<__half, 256, 32, false, Room::kSmall>(const Args&, cudaStream_t);
template void run_backward_single<__half, 256, 32, true, Room::kSmall>(const Args&, cudaStream_t);

}  // namespace packing_ops::attention::sm80
