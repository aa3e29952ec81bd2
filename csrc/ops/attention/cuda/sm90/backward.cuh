// Backward on wgmma and TMA, for documents of more than 64 keys. A unit is (document, 128 keys, kv head), for 192
// columns 96 keys, for 256 64: its dk and dv stay in registers over all rows that attend to its keys. dq of a row tile
// is summed over key tiles in the fixed order of dq_ring.cuh, which makes it deterministic. Roles of the threads:
// roles.cuh.
#pragma once

#include "core/launch.cuh"
#include "ops/attention/cuda/persistent.cuh"
#include "ops/attention/cuda/sm90/backward_columns.cuh"
#include "ops/attention/cuda/sm90/backward_copies.cuh"
#include "ops/attention/cuda/sm90/backward_keys.cuh"
#include "ops/attention/cuda/sm90/backward_panels.cuh"
#include "ops/attention/cuda/sm90/maps.h"

namespace packing_ops::attention::sm90 {

template <class T, class Shape, bool kTransform>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attention_backward_sm90_kernel(__grid_constant__ const BackwardArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t shared[];
  __shared__ BackwardBarriers<Shape> barriers;
  const uint32_t base = (ptx::shared_address(shared) + 1023) & ~1023u;
  const int warp = warp_uniform(static_cast<int>(threadIdx.x / kWarpThreads));
  ptx::griddepcontrol_launch_dependents();  // backward_single.cuh does not depend on this kernel
  if (threadIdx.x == 0) barriers.init();
  constexpr int kPanelTiles = Shape::kRowBytes / (kTileRows * 128);
  zero_unused_rows(args, Shape::tile_q(base, 0), kPanelTiles, warp, Shape::kThreads / kWarpThreads);
  __syncthreads();
  if (warp < kWarpgroupWarps) {
    ptx::setmaxnreg_dec<Shape::kProducerRegisters>();
    if (threadIdx.x == first_thread_of(Role::kLoadUnits)) load_units<Shape>(args, barriers, base);
    if (warp == warp_of(Role::kLoadRowStats)) load_row_stats<Shape>(args, barriers, base);
    if (warp >= warp_of(Role::kSendDq) && (Shape::kByColumns || threadIdx.x % kWarpThreads == 0)) {
      send_dq<Shape>(args, barriers, base, warp - warp_of(Role::kSendDq));
    }
  } else if (Shape::kNarrowValues && warp >= kWarpgroupWarps * (1 + Shape::kPanelsV)) {
    ptx::setmaxnreg_inc<Shape::kConsumerRegisters>();  // in either branch: in front of both, registers spill
    if constexpr (Shape::kNarrowValues) {
      attend_with_shared_scores<Shape>(
          BackwardPanel<T, Shape, kTransform, false>(args, barriers, base, Shape::kPanelsV));
    }
  } else {
    ptx::setmaxnreg_inc<Shape::kConsumerRegisters>();
    if constexpr (Shape::kByPanels) {
      attend_with_shared_scores<Shape>(
          BackwardPanel<T, Shape, kTransform, true>(args, barriers, base, warp / kWarpgroupWarps - 1));
    } else if constexpr (Shape::kByColumns) {
      attend_with_shared_scores<Shape>(
          BackwardColumns<T, Shape, kTransform>(args, barriers, base, warp / kWarpgroupWarps - 1));
    } else {
      attend_to_keys<T, Shape, kTransform>(args, barriers, base, warp / kWarpgroupWarps - 1);
    }
  }
#endif
}

template <class T, int kDim, int kDimV, bool kTransform>
void run_backward(const Args& args, DType dtype, cudaStream_t stream) {
  using Shape = BackwardShape<kDim, kDimV>;
  static_assert(Shape::kShared + sizeof(BackwardBarriers<Shape>) <= 227 << 10);
  static PersistentKernel kernel{reinterpret_cast<const void*>(attention_backward_sm90_kernel<T, Shape, kTransform>),
                                 Shape::kThreads, Shape::kShared, "attention_backward_sm90_kernel"};
  const BackwardArgs backward = backward_args(args, dtype, Shape::copied_keys(args), Shape::kStoredKeys);
  launch_persistent(kernel, &backward, args.plan.backward_capacity() * args.num_kv_heads, stream);
}

}  // namespace packing_ops::attention::sm90
