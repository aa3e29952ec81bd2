// segment_sum, its gradient, gae, and block_causal_mask.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>

#include "core/documents.cuh"
#include "core/launch.cuh"
#include "ops/boundaries/boundaries.h"

namespace packing_ops {

namespace {

constexpr int kThreads = 128;
constexpr int kUnroll = 16;  // independent loads in flight per thread

// All kUnroll loads of a round are issued before the first is used.
template <class T, class Sum, bool kMasked>
__global__ void __launch_bounds__(kThreads) segment_sum_kernel(SegmentSumParams p, FaultFlag fault) {
  for_each_document<kThreads>(p.documents, p.documents.num_documents,
                              [&](int64_t i, Interval<int64_t> s, const auto& group) {
                                constexpr int kStep = std::decay_t<decltype(group)>::kSize;
                                const T* values = static_cast<const T*>(p.values) + s.begin;
                                const bool* mask = kMasked ? static_cast<const bool*>(p.mask) + s.begin : nullptr;
                                const int length = static_cast<int>(s.size());
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
  for_each_document<kThreads>(p.documents, p.documents.num_documents + 1,
                              [&](int64_t i, Interval<int64_t> s, const auto& group) {
                                constexpr int kStep = std::decay_t<decltype(group)>::kSize;
                                const bool padding = i == p.documents.num_documents;
                                Sum share = padding ? Sum(0) : static_cast<const Sum*>(p.grad)[i];
                                if (p.average && !padding) {
                                  int kept = 0;
                                  for (int64_t t = s.begin + group.rank; t < s.end; t += kStep)
                                    kept += !mask || mask[t];
                                  kept = group.sum(kept);
                                  share /= static_cast<Sum>(kept > 0 ? kept : 1);
                                }
                                for (int64_t t = s.begin + group.rank; t < s.end; t += kStep) {
                                  out[t] = static_cast<T>(mask && !mask[t] ? Sum(0) : share);
                                }
                              });
}

// --- rows of several features: a block of 8 warps for a document and 32 neighbouring features ---

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / kWarp;
constexpr int kRowUnroll = 8;  // rows in flight per warp

// Rows of a segment that the mask keeps. Every warp counts all of them: no block synchronisation.
__device__ int kept_rows(const bool* mask, Interval<int64_t> s) {
  if (!mask) return static_cast<int>(s.size());
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  int kept = 0;
  for (int64_t t = s.begin + lane; t < s.end; t += kWarp) kept += mask[t];
  return WarpGroup{lane}.sum(kept);
}

// body(i, segment, feature) for each document i < count and each feature, the blocks in turn; a warp's lanes have
// neighbouring features, some of them past the last.
template <class Body>
__device__ void for_each_column(const SegmentSumParams& p, int64_t count, const Body& body) {
  const int64_t tiles = ceil_div(p.features, kWarp);
  for (int64_t work = blockIdx.x; work < count * tiles; work += gridDim.x) {
    const int64_t i = work / tiles;
    body(i, segment_at(p.documents, i), (work % tiles) * kWarp + threadIdx.x % kWarp);
  }
}

// Warp w sums rows w, w + 8, ...; the sums of the warps are added in order of the warps.
template <class T, class Sum>
__global__ void __launch_bounds__(kRowThreads) segment_sum_rows_kernel(SegmentSumParams p, FaultFlag fault) {
  __shared__ Sum of_warp[kRowWarps][kWarp];
  const T* values = static_cast<const T*>(p.values);
  const bool* mask = static_cast<const bool*>(p.mask);
  const int warp = static_cast<int>(threadIdx.x / kWarp);
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  for_each_column(p, p.documents.num_documents, [&](int64_t i, Interval<int64_t> s, int64_t feature) {
    const bool exists = feature < p.features;
    Sum sums[kRowUnroll] = {};
    for (int64_t t = s.begin + warp; t < s.end; t += kRowWarps * kRowUnroll) {
      T loaded[kRowUnroll];
      bool keep[kRowUnroll];
#pragma unroll
      for (int u = 0; u < kRowUnroll; ++u) {
        const int64_t at = t + u * kRowWarps;
        keep[u] = exists && at < s.end && (!mask || mask[at]);
        if (keep[u]) loaded[u] = values[at * p.features + feature];
      }
#pragma unroll
      for (int u = 0; u < kRowUnroll; ++u) {
        if (keep[u]) sums[u] += static_cast<Sum>(loaded[u]);
      }
    }
#pragma unroll
    for (int half = kRowUnroll / 2; half > 0; half /= 2) {
#pragma unroll
      for (int u = 0; u < half; ++u) sums[u] += sums[u + half];
    }
    of_warp[warp][lane] = sums[0];
    __syncthreads();
    if (warp == 0) {
      Sum sum = of_warp[0][lane];
      for (int w = 1; w < kRowWarps; ++w) sum += of_warp[w][lane];
      if (p.average) {
        const int kept = kept_rows(mask, s);
        sum /= static_cast<Sum>(kept > 0 ? kept : 1);
      }
      if (exists) static_cast<Sum*>(p.sums)[i * p.features + feature] = sum;
    }
    __syncthreads();  // before the next document's sums take the memory
  });
  flag_cu_seqlens(p.documents, fault);
}

template <class T, class Sum>
__global__ void __launch_bounds__(kRowThreads) segment_sum_rows_backward_kernel(SegmentSumParams p, FaultFlag fault) {
  flag_cu_seqlens(p.documents, fault);
  T* out = static_cast<T*>(p.grad_values);
  const bool* mask = static_cast<const bool*>(p.mask);
  const int warp = static_cast<int>(threadIdx.x / kWarp);
  // One more than there are documents: the padding after them gets zeros.
  for_each_column(p, p.documents.num_documents + 1, [&](int64_t i, Interval<int64_t> s, int64_t feature) {
    const bool padding = i == p.documents.num_documents;
    const int kept = p.average && !padding ? kept_rows(mask, s) : 1;
    if (feature >= p.features) return;
    Sum share = padding ? Sum(0) : static_cast<const Sum*>(p.grad)[i * p.features + feature];
    share /= static_cast<Sum>(kept > 0 ? kept : 1);
    for (int64_t t = s.begin + warp; t < s.end; t += kRowWarps) {
      out[t * p.features + feature] = static_cast<T>(mask && !mask[t] ? Sum(0) : share);
    }
  });
}

// --- gae: `next` of GaeParams is a linear recurrence, a scan of affine maps. Documents are scanned from their end,
// tile by tile; a thread has kSlots neighbouring slots of a tile ---

template <class T, class Sum>
__global__ void __launch_bounds__(kThreads) gae_kernel(GaeParams p, FaultFlag fault) {
  flag_cu_seqlens(p.documents, fault);
  const T* rewards = static_cast<const T*>(p.rewards);
  const T* values = static_cast<const T*>(p.values);
  const bool* mask = static_cast<const bool*>(p.mask);
  Sum* advantages = static_cast<Sum*>(p.advantages);
  Sum* returns = static_cast<Sum*>(p.returns);
  const Sum gamma = static_cast<Sum>(p.gamma);
  const Sum lam = static_cast<Sum>(p.lam);
  const Sum rest = static_cast<Sum>(1 - p.lam);
  // One more than there are documents: the padding after them gets zeros.
  for_each_document<kThreads>(
      p.documents, p.documents.num_documents + 1, [&](int64_t i, Interval<int64_t> s, const auto& group) {
        constexpr int kStep = std::decay_t<decltype(group)>::kSize;
        constexpr int kSlots = kStep == kWarp ? 4 : 16;
        const bool padding = i == p.documents.num_documents;
        Sum after_tile = p.bootstrap && !padding ? static_cast<const Sum*>(p.bootstrap)[i] : Sum(0);
        for (int64_t tile_end = s.end; tile_end > s.begin; tile_end -= kStep * kSlots) {
          const int64_t end = tile_end - group.rank * kSlots;  // the thread has the slots end - 1, end - 2, ...
          Sum reward[kSlots];
          Sum value[kSlots];
          bool keep[kSlots];
#pragma unroll
          for (int u = 0; u < kSlots; ++u) {
            const int64_t t = end - 1 - u;
            keep[u] = t >= s.begin && !padding && (!mask || mask[t]);
            reward[u] = keep[u] ? static_cast<Sum>(rewards[t]) : Sum(0);
            value[u] = keep[u] ? static_cast<Sum>(values[t]) : Sum(0);
          }
          Affine<Sum> thread_step{Sum(1), Sum(0)};
#pragma unroll
          for (int u = 0; u < kSlots; ++u) {
            if (keep[u]) thread_step = thread_step.then({gamma * lam, lam * reward[u] + rest * value[u]});
          }
          Affine<Sum> before;
          Affine<Sum> all;
          group.scan(thread_step, before, all);
          Sum next = before(after_tile);
          after_tile = all(after_tile);
#pragma unroll
          for (int u = 0; u < kSlots; ++u) {
            const int64_t t = end - 1 - u;
            if (t < s.begin) break;
            const Sum ret = keep[u] ? reward[u] + gamma * next : Sum(0);
            returns[t] = ret;
            advantages[t] = ret - value[u];
            if (keep[u]) next = lam * ret + rest * value[u];
          }
        }
      });
}

template <class T>
__global__ void block_causal_mask_kernel(BlockCausalMaskParams p, T visible, T hidden, FaultFlag fault) {
  flag_cu_seqlens(p.documents, fault);
  const int64_t total = p.documents.total;
  T* mask = static_cast<T*>(p.mask);
  for (int64_t i = blockIdx.x; i < total; i += gridDim.x) {
    int64_t first = segment_at(p.documents, p.documents.document_of(i)).begin;
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

// As for_each_column wants.
unsigned columns_grid(const SegmentSumParams& p, int64_t count) {
  return grid_for(count * ceil_div(p.features, kWarp), 1);
}

}  // namespace

void launch_segment_sum_cuda(const SegmentSumParams& p, const CudaLaunch& launch) {
  if (p.features != 1) {
    const unsigned grid = columns_grid(p, p.documents.num_documents);
    dispatch_sum(p.dtype, [&](auto element, auto sum) {
      segment_sum_rows_kernel<decltype(element), decltype(sum)>
          <<<grid, kRowThreads, 0, stream_of(launch)>>>(p, launch.fault);
    });
    return check_launch("segment_sum_rows_kernel");
  }
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
  if (p.features != 1) {
    const unsigned grid = columns_grid(p, p.documents.num_documents + 1);
    dispatch_sum(p.dtype, [&](auto element, auto sum) {
      segment_sum_rows_backward_kernel<decltype(element), decltype(sum)>
          <<<grid, kRowThreads, 0, stream_of(launch)>>>(p, launch.fault);
    });
    return check_launch("segment_sum_rows_backward_kernel");
  }
  const dim3 grid = documents_grid(p.documents.num_documents + 1);
  dispatch_sum(p.dtype, [&](auto element, auto sum) {
    segment_sum_backward_kernel<decltype(element), decltype(sum)>
        <<<grid, kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  });
  check_launch("segment_sum_backward_kernel");
}

void launch_gae_cuda(const GaeParams& p, const CudaLaunch& launch) {
  const dim3 grid = documents_grid(p.documents.num_documents + 1);
  dispatch_sum(p.dtype, [&](auto element, auto sum) {
    gae_kernel<decltype(element), decltype(sum)><<<grid, kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  });
  check_launch("gae_kernel");
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
