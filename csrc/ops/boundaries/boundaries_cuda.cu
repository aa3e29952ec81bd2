// Same results as boundaries_cpu.cpp. Values of cu_seqlens and lengths are checked here, on the device.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <thrust/iterator/counting_iterator.h>

#include <cub/cub.cuh>
#include <limits>

#include "core/launch.cuh"
#include "core/segment.cuh"
#include "ops/boundaries/boundaries.h"

namespace packing_ops {

namespace {

constexpr int kThreads = 256;
constexpr int kScanThreads = 1024;

__device__ int64_t thread_id() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ int64_t thread_count() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

// One block: the number of documents is small next to the number of tokens.
__global__ void __launch_bounds__(kScanThreads)
    cu_seqlens_from_lengths_kernel(CuSeqlensFromLengthsParams p, FaultFlag fault) {
  using Scan = cub::BlockScan<int64_t, kScanThreads>;
  __shared__ typename Scan::TempStorage storage;
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  int64_t carry = 0;
  if (threadIdx.x == 0) p.cu_seqlens[0] = 0;
  for (int64_t base = 0; base < p.num_documents; base += blockDim.x) {
    const int64_t i = base + threadIdx.x;
    int64_t length = i < p.num_documents ? p.lengths[i] : 0;
    if (length < 0) {
      fault.raise(Fault::kNegativeLength, i);
      length = 0;
    }
    int64_t sum = 0;
    int64_t chunk = 0;
    Scan(storage).InclusiveSum(length, sum, chunk);
    sum += carry;
    if (sum > kMax) {
      if (i < p.num_documents) fault.raise(Fault::kLengthsOverflow, i);
      sum = kMax;
    }
    if (i < p.num_documents) p.cu_seqlens[i + 1] = static_cast<int32_t>(sum);
    carry += chunk;
    __syncthreads();
  }
}

__global__ void position_ids_kernel(SlotParams p, FaultFlag fault) {
  flag_cu_seqlens(p.documents, fault);
  for (int64_t t = thread_id(); t < p.documents.total; t += thread_count()) {
    p.position_ids[t] = t - p.documents.bound(p.documents.document_of(t));
  }
}

__global__ void seq_idx_kernel(SlotParams p, FaultFlag fault) {
  flag_cu_seqlens(p.documents, fault);
  for (int64_t t = thread_id(); t < p.documents.total; t += thread_count()) {
    p.seq_idx[t] = static_cast<int32_t>(p.documents.document_of(t));
  }
}

// Where a run starts: the position does not grow, or the uid changes.
struct StartsDocument {
  IndexView values;
  __device__ bool operator()(int32_t t) const { return t == 0 || values[t] <= values[t - 1]; }
};

struct EndsPrompt {
  IndexView values;
  int64_t size;
  __device__ bool operator()(int64_t end) const { return end == size || values[end] != values[end - 1]; }
};

template <class T>
__global__ void fill_after_kernel(T* out, const int64_t* count, int64_t size, T value) {
  for (int64_t i = *count + thread_id(); i < size; i += thread_count()) out[i] = value;
}

// Sorted by uid (stable), equal uids must have been next to each other.
__global__ void returning_uid_kernel(const int64_t* uids, const int64_t* indices, int64_t size, FaultFlag fault) {
  for (int64_t i = thread_id() + 1; i < size; i += thread_count()) {
    if (uids[i] == uids[i - 1] && indices[i] != indices[i - 1] + 1) fault.raise(Fault::kReturningUid, indices[i]);
  }
}

__global__ void uid_keys_kernel(IndexView uids, int64_t* keys, int64_t* indices, int64_t size) {
  for (int64_t i = thread_id(); i < size; i += thread_count()) {
    keys[i] = uids[i];
    indices[i] = i;
  }
}

// Scratch of prompt_end_indices: four int64 arrays for the sort, then CUB's own.
size_t runs_cub_bytes(int64_t size) {
  size_t select = 0;
  size_t sort = 0;
  thrust::counting_iterator<int64_t> counter(1);
  check_cuda(cub::DeviceSelect::If(nullptr, select, counter, static_cast<int64_t*>(nullptr),
                                   static_cast<int64_t*>(nullptr), size, EndsPrompt{}),
             "cub::DeviceSelect::If");
  check_cuda(
      cub::DeviceRadixSort::SortPairs(nullptr, sort, static_cast<int64_t*>(nullptr), static_cast<int64_t*>(nullptr),
                                      static_cast<int64_t*>(nullptr), static_cast<int64_t*>(nullptr), size),
      "cub::DeviceRadixSort::SortPairs");
  return select > sort ? select : sort;
}

enum class LabelWork { kMask, kMaskShifted, kShift };

template <LabelWork kWork>
__global__ void labels_kernel(LabelsParams p, FaultFlag fault) {
  flag_cu_seqlens(p.documents, fault);
  const int64_t end_of_documents = p.documents.end();
  for (int64_t t = thread_id(); t < p.documents.total; t += thread_count()) {
    if (t >= end_of_documents) {
      p.out.set(t, kWork == LabelWork::kShift ? p.ignore_index : p.labels[t]);
      continue;
    }
    const Segment s = p.documents[p.documents.document_of(t)];
    if constexpr (kWork == LabelWork::kMask) p.out.set(t, t == s.start ? p.ignore_index : p.labels[t]);
    if constexpr (kWork == LabelWork::kMaskShifted) p.out.set(t, t == s.end - 1 ? p.ignore_index : p.labels[t]);
    if constexpr (kWork == LabelWork::kShift) p.out.set(t, t + 1 < s.end ? p.labels[t + 1] : p.ignore_index);
  }
}

__global__ void count_target_tokens_kernel(LabelsParams p, FaultFlag fault) {
  flag_cu_seqlens(p.documents, fault);
  using Reduce = cub::BlockReduce<unsigned long long, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  unsigned long long count = 0;
  const int64_t end_of_documents = p.documents.end();
  for (int64_t t = thread_id(); t < end_of_documents; t += thread_count()) {
    if (p.labels[t] == p.ignore_index) continue;
    count += t != p.documents.bound(p.documents.document_of(t));
  }
  count = Reduce(storage).Sum(count);
  if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.count), count);
}

// One block per document; thread i sums slots i, i + kThreads, ... and the block's tree adds them: an order that
// depends on the document's own length alone.
template <class T, class Sum>
__global__ void segment_sum_kernel(SegmentSumParams p, FaultFlag fault) {
  flag_cu_seqlens(p.documents, fault);
  using Reduce = cub::BlockReduce<Sum, kThreads>;
  using Count = cub::BlockReduce<int64_t, kThreads>;
  __shared__ union {
    typename Reduce::TempStorage sum;
    typename Count::TempStorage count;
  } storage;
  const T* values = static_cast<const T*>(p.values);
  const bool* mask = static_cast<const bool*>(p.mask);
  for (int64_t i = blockIdx.x; i < p.documents.num_documents; i += gridDim.x) {
    const Segment s = p.documents[i];
    Sum sum = 0;
    int64_t kept = 0;
    for (int64_t t = s.start + threadIdx.x; t < s.end; t += kThreads) {
      if (mask && !mask[t]) continue;
      sum += static_cast<Sum>(values[t]);
      ++kept;
    }
    sum = Reduce(storage.sum).Sum(sum);
    __syncthreads();
    kept = Count(storage.count).Sum(kept);
    __syncthreads();
    if (threadIdx.x == 0) {
      static_cast<Sum*>(p.sums)[i] = p.average ? sum / static_cast<Sum>(kept > 0 ? kept : 1) : sum;
    }
  }
}

template <class T, class Sum>
__global__ void segment_sum_backward_kernel(SegmentSumParams p, FaultFlag fault) {
  flag_cu_seqlens(p.documents, fault);
  using Count = cub::BlockReduce<int64_t, kThreads>;
  __shared__ typename Count::TempStorage storage;
  __shared__ Sum share;
  const bool* mask = static_cast<const bool*>(p.mask);
  T* out = static_cast<T*>(p.grad_values);
  // One more turn than documents: the padding after them gets zeros.
  for (int64_t i = blockIdx.x; i <= p.documents.num_documents; i += gridDim.x) {
    const bool padding = i == p.documents.num_documents;
    const Segment s = padding ? Segment{p.documents.end(), p.documents.total} : p.documents[i];
    int64_t kept = 0;
    if (p.average && mask && !padding) {
      for (int64_t t = s.start + threadIdx.x; t < s.end; t += kThreads) kept += mask[t];
      kept = Count(storage).Sum(kept);
    } else {
      kept = s.end - s.start;
    }
    if (threadIdx.x == 0) {
      const Sum grad = padding ? Sum(0) : static_cast<const Sum*>(p.grad)[i];
      share = p.average ? grad / static_cast<Sum>(kept > 0 ? kept : 1) : grad;
    }
    __syncthreads();
    for (int64_t t = s.start + threadIdx.x; t < s.end; t += kThreads) {
      out[t] = static_cast<T>(mask && !mask[t] ? Sum(0) : share);
    }
    __syncthreads();
  }
}

template <class T>
__global__ void block_causal_mask_kernel(BlockCausalMaskParams p, T visible, T hidden, FaultFlag fault) {
  flag_cu_seqlens(p.documents, fault);
  const int64_t total = p.documents.total;
  T* mask = static_cast<T*>(p.mask);
  for (int64_t i = blockIdx.x; i < total; i += gridDim.x) {
    int64_t first = p.documents.bound(p.documents.document_of(i));
    if (p.window > 0 && i - p.window + 1 > first) first = i - p.window + 1;
    for (int64_t j = threadIdx.x; j < total; j += blockDim.x)
      mask[i * total + j] = j >= first && j <= i ? visible : hidden;
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

}  // namespace

void launch_cu_seqlens_from_lengths_cuda(const CuSeqlensFromLengthsParams& p, const CudaLaunch& launch) {
  cu_seqlens_from_lengths_kernel<<<1, kScanThreads, 0, stream_of(launch)>>>(p, launch.fault);
  check_launch("cu_seqlens_from_lengths_kernel");
}

void launch_position_ids_cuda(const SlotParams& p, const CudaLaunch& launch) {
  position_ids_kernel<<<grid_for(p.documents.total, kThreads), kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  check_launch("position_ids_kernel");
}

void launch_seq_idx_cuda(const SlotParams& p, const CudaLaunch& launch) {
  seq_idx_kernel<<<grid_for(p.documents.total, kThreads), kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  check_launch("seq_idx_kernel");
}

int64_t runs_scratch_cuda(int64_t size) {
  return size * 4 * static_cast<int64_t>(sizeof(int64_t)) + static_cast<int64_t>(runs_cub_bytes(size));
}

void launch_cu_seqlens_from_position_ids_cuda(const RunsParams& p, const CudaLaunch& launch) {
  size_t bytes = static_cast<size_t>(p.scratch_bytes);
  thrust::counting_iterator<int32_t> counter(0);
  check_cuda(cub::DeviceSelect::If(p.scratch, bytes, counter, p.cu_seqlens, p.count, p.size, StartsDocument{p.values},
                                   stream_of(launch)),
             "cub::DeviceSelect::If");
  fill_after_kernel<<<grid_for(p.size + 1, kThreads), kThreads, 0, stream_of(launch)>>>(
      p.cu_seqlens, p.count, p.size + 1, static_cast<int32_t>(p.size));
  check_launch("fill_after_kernel");
}

void launch_prompt_end_indices_cuda(const RunsParams& p, const CudaLaunch& launch) {
  auto* keys = static_cast<int64_t*>(p.scratch);
  int64_t* indices = keys + p.size;
  int64_t* sorted_keys = indices + p.size;
  int64_t* sorted_indices = sorted_keys + p.size;
  void* cub_scratch = sorted_indices + p.size;
  size_t bytes = static_cast<size_t>(p.scratch_bytes) - static_cast<size_t>(p.size) * 4 * sizeof(int64_t);
  const cudaStream_t stream = stream_of(launch);
  const unsigned grid = grid_for(p.size, kThreads);

  uid_keys_kernel<<<grid, kThreads, 0, stream>>>(p.values, keys, indices, p.size);
  check_launch("uid_keys_kernel");
  check_cuda(cub::DeviceRadixSort::SortPairs(cub_scratch, bytes, keys, sorted_keys, indices, sorted_indices, p.size, 0,
                                             64, stream),
             "cub::DeviceRadixSort::SortPairs");
  returning_uid_kernel<<<grid, kThreads, 0, stream>>>(sorted_keys, sorted_indices, p.size, launch.fault);
  check_launch("returning_uid_kernel");

  thrust::counting_iterator<int64_t> counter(1);
  check_cuda(
      cub::DeviceSelect::If(cub_scratch, bytes, counter, p.ends, p.count, p.size, EndsPrompt{p.values, p.size}, stream),
      "cub::DeviceSelect::If");
  fill_after_kernel<<<grid, kThreads, 0, stream>>>(p.ends, p.count, p.size, p.size);
  check_launch("fill_after_kernel");
}

void launch_mask_boundary_labels_cuda(const LabelsParams& p, const CudaLaunch& launch) {
  const unsigned grid = grid_for(p.documents.total, kThreads);
  labels_kernel<LabelWork::kMask><<<grid, kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  check_launch("labels_kernel");
}

void launch_mask_boundary_labels_shifted_cuda(const LabelsParams& p, const CudaLaunch& launch) {
  const unsigned grid = grid_for(p.documents.total, kThreads);
  labels_kernel<LabelWork::kMaskShifted><<<grid, kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  check_launch("labels_kernel");
}

void launch_shift_labels_cuda(const LabelsParams& p, const CudaLaunch& launch) {
  const unsigned grid = grid_for(p.documents.total, kThreads);
  labels_kernel<LabelWork::kShift><<<grid, kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  check_launch("labels_kernel");
}

void launch_count_target_tokens_cuda(const LabelsParams& p, const CudaLaunch& launch) {
  check_cuda(cudaMemsetAsync(p.count, 0, sizeof(int64_t), stream_of(launch)), "cudaMemsetAsync");
  const unsigned grid = grid_for(p.documents.total, kThreads);
  count_target_tokens_kernel<<<grid, kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  check_launch("count_target_tokens_kernel");
}

void launch_segment_sum_cuda(const SegmentSumParams& p, const CudaLaunch& launch) {
  const unsigned grid = grid_for(p.documents.num_documents, 1);
  dispatch_sum(p.dtype, [&](auto element, auto sum) {
    segment_sum_kernel<decltype(element), decltype(sum)><<<grid, kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  });
  check_launch("segment_sum_kernel");
}

void launch_segment_sum_backward_cuda(const SegmentSumParams& p, const CudaLaunch& launch) {
  const unsigned grid = grid_for(p.documents.num_documents + 1, 1);
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
