// Backward on wgmma and bulk copies, for documents of more than 64 keys. A unit is (document, 128 keys, kv head), above
// 128 columns 64 keys: its dk and dv stay in registers over all rows that attend to its keys. dq of a row tile is
// summed over key tiles in the fixed order of dq_ring.cuh, which makes it deterministic. The first warpgroup copies and
// keeps that order, the other two compute.
#pragma once

#include "core/launch.cuh"
#include "ops/attention/cuda/persistent.cuh"
#include "ops/attention/cuda/sm90/backward_columns.cuh"
#include "ops/attention/cuda/sm90/backward_copies.cuh"
#include "ops/attention/cuda/sm90/backward_keys.cuh"
#include "ops/attention/cuda/sm90/maps.h"

namespace packing_ops::attention::sm90 {

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attention_backward_sm90_kernel(__grid_constant__ const BackwardArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t shared[];
  __shared__ BackwardBarriers<Shape> barriers;
  const uint32_t base = (ptx::shared_address(shared) + 1023) & ~1023u;
  const int warp = threadIdx.x / 32;
  ptx::griddepcontrol_launch_dependents();  // backward_single.cuh does not depend on this kernel
  if (threadIdx.x == 0) barriers.init();
  constexpr int kPanelTiles = 2 * kRowStages * Shape::kPanels * Shape::kTiles;
  zero_unused_rows(args, Shape::tile_q(base, 0), kPanelTiles, warp, Shape::kThreads / 32);
  __syncthreads();
  if (warp < 4) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == 0) load_units<Shape>(args, barriers, base);
    if (warp == 1) load_row_stats<Shape>(args, barriers);
    if (threadIdx.x == 64) wait_for_turns<Shape>(args, barriers);
    if (Shape::kByColumns ? warp == 3 : threadIdx.x == 96) send_queries<Shape>(args, barriers, base);
  } else {
    ptx::setmaxnreg_inc<232>();
    if constexpr (Shape::kByColumns) {
      attend_by_columns<T, Shape>(args, barriers, base, warp / 4 - 1);
    } else {
      attend_to_keys<T, Shape>(args, barriers, base, warp / 4 - 1);
    }
  }
#endif
}

template <class T, int kDim>
void run_backward(const Args& args, DType dtype, cudaStream_t stream) {
  using Shape = BackwardShape<kDim>;
  static_assert(Shape::kShared + sizeof(BackwardBarriers<Shape>) <= 227 << 10);
  static PersistentKernel kernel{reinterpret_cast<const void*>(attention_backward_sm90_kernel<T, Shape>),
                                 Shape::kThreads, Shape::kShared, "attention_backward_sm90_kernel"};
  const BackwardArgs backward = backward_args(args, dtype, Shape::kUnitKeys);
  launch_persistent(kernel, &backward, args.plan.backward_capacity() * args.num_kv_heads, stream);
}

}  // namespace packing_ops::attention::sm90
