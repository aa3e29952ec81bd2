// Rows after the last document are padding: out 0, lse -inf.
#pragma once

#include "core/launch.cuh"
#include "ops/attention/cuda/args.cuh"

namespace packing_ops::attention {

// By `count` threads of the grid.
__device__ inline void zero_padding(const Args& args, int64_t thread = thread_id(), int64_t count = thread_count()) {
  const int64_t end = args.plan.data[PlanView::kEndQ];
  const int64_t words = args.head_dim_v / 8;
  const int64_t rows = (args.documents_q.total - end) * args.num_heads;
  for (int64_t i = thread; i < rows * words; i += count) {
    const int64_t row = i / words;
    const int64_t token = end + row / args.num_heads;
    const int64_t head = row % args.num_heads;
    auto* out = static_cast<uint16_t*>(args.out.data) + token * args.out.token_stride + head * args.out.head_stride;
    *reinterpret_cast<uint4*>(out + (i % words) * 8) = make_uint4(0, 0, 0, 0);
    if (i % words == 0) args.lse[head * args.documents_q.total + token] = -INFINITY;
  }
}

}  // namespace packing_ops::attention
