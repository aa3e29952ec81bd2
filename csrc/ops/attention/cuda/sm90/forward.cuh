// Forward on wgmma and bulk copies. A unit is (document, two tiles of packed rows, kv head); a block works its units
// off one after the other. The first warpgroup copies, the other two compute a tile of rows each. Key tiles start at
// multiples of their size from the document's start, from the first visible one upwards, so a row's sum has one order
// wherever its document lies.
#pragma once

#include "core/launch.cuh"
#include "ops/attention/cuda/persistent.cuh"
#include "ops/attention/cuda/plan_check.cuh"
#include "ops/attention/cuda/sm90/forward_copies.cuh"
#include "ops/attention/cuda/sm90/forward_rows.cuh"
#include "ops/attention/cuda/sm90/maps.h"
#include "ops/attention/cuda/zero_padding.cuh"

namespace packing_ops::attention::sm90 {

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attention_forward_sm90_kernel(__grid_constant__ const ForwardArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t shared[];
  __shared__ ForwardBarriers<Shape> barriers;
  const uint32_t base = (ptx::shared_address(shared) + 1023) & ~1023u;
  const int warp = threadIdx.x / 32;
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  if (warp < 4) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == 0) load_keys_and_values<Shape>(args, barriers, base);
    if (warp == 1) load_queries<Shape>(args, barriers, base);
    if constexpr (Shape::kOutThroughQ) {
      if (threadIdx.x == 96) store_out<Shape>(args, barriers, base);
    }
  } else {
    ptx::setmaxnreg_inc<232>();
    // While the first tiles come.
    const int64_t thread = blockIdx.x * 256 + threadIdx.x - 128;
    check_plan(args.common.plan, args.common.documents_q, args.common.documents_k, args.common.fault, thread,
               gridDim.x * 256);
    check_visible_end(args.common.plan, args.common.visible_end, args.common.fault, thread, gridDim.x * 256);
    zero_padding(args.common, thread, gridDim.x * 256);
    attend<T, Shape>(args, barriers, base, warp / 4 - 1);
  }
  ptx::griddepcontrol_wait();
#endif
}

template <class T, int kDim, int kDimV>
void run_forward(const Args& args, DType dtype, cudaStream_t stream) {
  using Shape = ForwardShape<kDim, kDimV>;
  static PersistentKernel kernel{reinterpret_cast<const void*>(attention_forward_sm90_kernel<T, Shape>),
                                 Shape::kThreads, Shape::kShared, "attention_forward_sm90_kernel"};
  const ForwardArgs forward = forward_args(args, dtype, Shape::kKeys);
  launch_persistent(kernel, &forward, args.plan.forward_capacity() * args.num_kv_heads, stream);
}

}  // namespace packing_ops::attention::sm90
