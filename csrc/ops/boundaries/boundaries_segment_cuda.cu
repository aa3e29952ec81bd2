// segment_sum, its gradient, and block_causal_mask.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>

#include "core/launch.cuh"
#include "core/segment.cuh"
#include "ops/boundaries/boundaries.h"

namespace packing_ops {

namespace {

constexpr int kThreads = 128;
constexpr int kUnroll = 16;  // independent loads in flight per thread

// Every load of a round is under way before the first is used.
template <class T, class Sum, bool kMasked>
__global__ void __launch_bounds__(kThreads) segment_sum_kernel(SegmentSumParams p, FaultFlag fault) {
  for_each_document<kThreads>(p.documents, p.documents.num_documents, [&](int64_t i, Segment s, const auto& group) {
    constexpr int kStep = std::decay_t<decltype(group)>::kSize;
    const T* values = static_cast<const T*>(p.values) + s.start;
    const bool* mask = kMasked ? static_cast<const bool*>(p.mask) + s.start : nullptr;
    const int length = static_cast<int>(s.end - s.start);
    Sum sums[kUnroll] = {};
    int kept = 0;
    for (int t = group.rank; t < length; t += kStep * kUnroll) {
      T loaded[kUnroll];
      bool keep[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = t + u * kStep;
        keep[u] = at < length;
        if (keep[u]) loaded[u] = values[at];
        if (kMasked && keep[u]) keep[u] = mask[at];
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        kept += keep[u];
        if (keep[u]) sums[u] += static_cast<Sum>(loaded[u]);
      }
    }
#pragma unroll
    for (int half = kUnroll / 2; half > 0; half /= 2) {
#pragma unroll
      for (int u = 0; u < half; ++u) sums[u] += sums[u + half];
    }
    Sum sum = group.sum(sums[0]);
    if (p.average) {
      kept = group.sum(kept);
      sum /= static_cast<Sum>(kept > 0 ? kept : 1);
    }
    if (group.rank == 0) static_cast<Sum*>(p.sums)[i] = sum;
  });
  flag_cu_seqlens(p.documents, fault);
}

template <class T, class Sum>
__global__ void __launch_bounds__(kThreads) segment_sum_backward_kernel(SegmentSumParams p, FaultFlag fault) {
  flag_cu_seqlens(p.documents, fault);
  T* out = static_cast<T*>(p.grad_values);
  const bool* mask = static_cast<const bool*>(p.mask);
  // One more than there are documents: the padding after them gets zeros.
  for_each_document<kThreads>(p.documents, p.documents.num_documents + 1, [&](int64_t i, Segment s, const auto& group) {
    constexpr int kStep = std::decay_t<decltype(group)>::kSize;
    const bool padding = i == p.documents.num_documents;
    Sum share = padding ? Sum(0) : static_cast<const Sum*>(p.grad)[i];
    if (p.average && !padding) {
      int kept = 0;
      for (int64_t t = s.start + group.rank; t < s.end; t += kStep) kept += !mask || mask[t];
      kept = group.sum(kept);
      share /= static_cast<Sum>(kept > 0 ? kept : 1);
    }
    for (int64_t t = s.start + group.rank; t < s.end; t += kStep) {
      out[t] = static_cast<T>(mask && !mask[t] ? Sum(0) : share);
    }
  });
}

template <class T>
__global__ void block_causal_mask_kernel(BlockCausalMaskParams p, T visible, T hidden, FaultFlag fault) {
  flag_cu_seqlens(p.documents, fault);
  const int64_t total = p.documents.total;
  T* mask = static_cast<T*>(p.mask);
  for (int64_t i = blockIdx.x; i < total; i += gridDim.x) {
    int64_t first = segment_at(p.documents, p.documents.document_of(i)).start;
    if (p.window > 0 && i - p.window + 1 > first) first = i - p.window + 1;
    for (int64_t j = threadIdx.x; j < total; j += blockDim.x) {
      mask[i * total + j] = j >= first && j <= i ? visible : hidden;
    }
  }
}

// f(element type, accumulation type) for a floating dtype.
template <class F>
void dispatch_sum(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat64:
      return f(double{}, double{});
    case DType::kBFloat16:
      return f(__nv_bfloat16{}, float{});
    case DType::kFloat16:
      return f(__half{}, float{});
    default:
      return f(float{}, float{});
  }
}

// Two rows of blocks, as for_each_document wants.
dim3 documents_grid(int64_t count) {
  return dim3(grid_for(count, 1), 2);
}

}  // namespace

void launch_segment_sum_cuda(const SegmentSumParams& p, const CudaLaunch& launch) {
  const dim3 grid = documents_grid(p.documents.num_documents);
  dispatch_sum(p.dtype, [&](auto element, auto sum) {
    using T = decltype(element);
    using Sum = decltype(sum);
    const auto kernel = p.mask ? segment_sum_kernel<T, Sum, true> : segment_sum_kernel<T, Sum, false>;
    kernel<<<grid, kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  });
  check_launch("segment_sum_kernel");
}

void launch_segment_sum_backward_cuda(const SegmentSumParams& p, const CudaLaunch& launch) {
  const dim3 grid = documents_grid(p.documents.num_documents + 1);
  dispatch_sum(p.dtype, [&](auto element, auto sum) {
    segment_sum_backward_kernel<decltype(element), decltype(sum)>
        <<<grid, kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  });
  check_launch("segment_sum_backward_kernel");
}

void launch_block_causal_mask_cuda(const BlockCausalMaskParams& p, const CudaLaunch& launch) {
  const unsigned grid = grid_for(p.documents.total, 1);
  const auto run = [&](auto visible, auto hidden) {
    block_causal_mask_kernel<<<grid, kThreads, 0, stream_of(launch)>>>(p, visible, hidden, launch.fault);
    check_launch("block_causal_mask_kernel");
  };
  const float kHidden = -std::numeric_limits<float>::infinity();
  switch (p.dtype) {
    case DType::kBool:
      return run(true, false);
    case DType::kFloat64:
      return run(0.0, static_cast<double>(kHidden));
    case DType::kBFloat16:
      return run(__float2bfloat16(0.0f), __float2bfloat16(kHidden));
    case DType::kFloat16:
      return run(__float2half(0.0f), __float2half(kHidden));
    default:
      return run(0.0f, kHidden);
  }
}

}  // namespace packing_ops
