#include "ops/attention/cuda/sm80/backward_single.cuh"

namespace packing_ops::attention::sm80 {

template void run_backward_single<__nv_bfloat16, 256, 64, false, Room::kMedium>(const Args&, cudaStream_t);
template void run_backward_single<__nv_bfloat16, 256, 64, true, Room::kMedium>(const Args&, cudaStream_t);
template void run_backward_single<__nv_bfloat16, 256, 64, false, Room::kLarge>(const Args&, cudaStream_t);
template void run_backward_single<__nv_bfloat16, 256, 64, true, Room::kLarge>(const Args&, cudaStream_t);
template void run_backward_single<__half, 256, 64, false, Room::kMedium>(const Args&, cudaStream_t);
template void run_backward_single<__half, 256, 64, true, Room::kMedium>(const Args&, cudaStream_t);
template void run_backward_single<__half, 256, 64, false, Room::kLarge>(const Args&, cudaStream_t);
template void run_backward_single<__half, 256, 64, true, Room::kLarge>(const Args&, cudaStream_t);

}  // namespace packing_ops::attention::sm80
