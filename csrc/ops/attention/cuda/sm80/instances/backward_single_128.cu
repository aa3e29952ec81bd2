#include "ops/attention/cuda/sm80/backward_single.cuh"

namespace packing_ops::attention::sm80 {

template void run_backward_single<__nv_bfloat16, 128, 128, false, Room::kMedium>(const Args&, cudaStream_t);
template void run_backward_single<__nv_bfloat16, 128, 128, true, Room::kMedium>(const Args&, cudaStream_t);
template void run_backward_single<__nv_bfloat16, 128, 64, false, Room::kMedium>(const Args&, cudaStream_t);
template void run_backward_single<__nv_bfloat16, 128, 64, true, Room::kMedium>(const Args&, cudaStream_t);
template void run_backward_single<__half, 128, 128, false, Room::kMedium>(const Args&, cudaStream_t);
template void run_backward_single<__half, 128, 128, true, Room::kMedium>(const Args&, cudaStream_t);
template void run_backward_single<__half, 128, 64, false, Room::kMedium>(const Args&, cudaStream_t);
template void run_backward_single<__half, 128, 64, true, Room::kMedium>(const Args&, cudaStream_t);

}  // namespace packing_ops::attention::sm80
