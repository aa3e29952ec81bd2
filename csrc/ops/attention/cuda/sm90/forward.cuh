// Forward on wgmma and TMA. A unit is (document, two or three tiles of packed rows, kv head), a tile for each consumer
// warpgroup; a persistent block claims one unit after the other. Roles of its threads: roles.cuh. Key tiles start at
// multiples of their size from the document's start, from the first visible one upwards, so a row's sum has one order
// wherever its document is.
#pragma once

#include "core/launch.cuh"
#include "ops/attention/cuda/persistent.cuh"
#include "ops/attention/cuda/plan_check.cuh"
#include "ops/attention/cuda/sm90/forward_copies.cuh"
#include "ops/attention/cuda/sm90/forward_rows.cuh"
#include "ops/attention/cuda/sm90/maps.h"
#include "ops/attention/cuda/zero_padding.cuh"

namespace packing_ops::attention::sm90 {

template <class T, class Shape, bool kTransform>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attention_forward_sm90_kernel(__grid_constant__ const ForwardArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t shared[];
  __shared__ ForwardBarriers<Shape> barriers;
  const uint32_t base = (ptx::shared_address(shared) + 1023) & ~1023u;
  const int warp = warp_uniform(static_cast<int>(threadIdx.x / kWarpThreads));
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  if (warp < kWarpgroupWarps) {
    ptx::setmaxnreg_dec<Shape::kProducerRegisters>();
    if (threadIdx.x == first_thread_of(Role::kLoadKeysAndValues)) load_keys_and_values<Shape>(args, barriers, base);
    if (warp == warp_of(Role::kLoadQueries)) load_queries<Shape>(args, barriers, base);
    if constexpr (Shape::kOutThroughQ) {
      if (threadIdx.x == first_thread_of(Role::kStoreOut)) store_out<Shape>(args, barriers, base);
    }
  } else {
    ptx::setmaxnreg_inc<Shape::kConsumerRegisters>();
    // Checks, while the first tiles are loaded
    const int64_t thread = blockIdx.x * Shape::kConsumerThreads + threadIdx.x - kWarpgroupThreads;
    const int64_t threads = gridDim.x * Shape::kConsumerThreads;
    check_plan(args.common.plan, args.common.documents_q, args.common.documents_k, args.common.fault, thread, threads);
    check_visible_end(args.common.plan, args.common.visible_end, args.common.fault, thread, threads);
    zero_padding(args.common, thread, threads);
    attend<T, Shape, kTransform>(args, barriers, base, warp / kWarpgroupWarps - 1);
  }
  ptx::griddepcontrol_wait();
#endif
}

template <class T, class Shape, bool kTransform>
void run_forward_of(const Args& args, DType dtype, cudaStream_t stream, bool overlaps) {
  static PersistentKernel kernel{reinterpret_cast<const void*>(attention_forward_sm90_kernel<T, Shape, kTransform>),
                                 Shape::kThreads, Shape::kShared, "attention_forward_sm90_kernel"};
  const ForwardArgs forward = forward_args(args, dtype, Shape::kKeys);
  // What it overlaps with, forward_resident.cuh, sets the counter.
  if (!overlaps) check_cuda(cudaMemsetAsync(args.counters, 0, sizeof(*args.counters), stream), "cudaMemsetAsync");
  launch_persistent(kernel, &forward, args.plan.forward_capacity() * args.num_kv_heads, stream, overlaps);
}

template <class T, int kDim, int kDimV, bool kTransform>
void run_forward(const Args& args, DType dtype, cudaStream_t stream, bool overlaps) {
  constexpr int kFew = wgmma_min_forward_tiles(kDim);
  constexpr int kMany = wgmma_max_forward_tiles(kDim);
  if (kFew < kMany && args.plan.tiles.forward_rows == kFew * tile_tokens(args.group) * args.group) {
    run_forward_of<T, ForwardShape<kDim, kDimV, kFew>, kTransform>(args, dtype, stream, overlaps);
  } else {
    run_forward_of<T, ForwardShape<kDim, kDimV, kMany>, kTransform>(args, dtype, stream, overlaps);
  }
}

}  // namespace packing_ops::attention::sm90
