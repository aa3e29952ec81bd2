// Conversions, prompts and labels; same results as boundaries_cpu.cpp. Values of cu_seqlens and lengths are checked
// here, on the device. segment_sum and the mask are in boundaries_segment_cuda.cu.
#include <thrust/iterator/counting_iterator.h>

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_select.cuh>
#include <limits>

#include "core/documents.cuh"
#include "core/launch.cuh"
#include "ops/boundaries/boundaries.h"

namespace packing_ops {

namespace {

constexpr int kThreads = 256;
constexpr int kScanThreads = 1024;
constexpr int kPairs = 2;  // pairs of slots per thread

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

// --- one value per slot: load(t) fetches what does not depend on the document ---

struct Nothing {};

struct PositionId {
  __device__ Nothing load(int) const { return {}; }
  __device__ int64_t operator()(int t, Nothing, int, Interval<int> s) const { return t < s.begin ? 0 : t - s.begin; }
};

struct SequenceIndex {
  __device__ Nothing load(int) const { return {}; }
  __device__ int32_t operator()(int, Nothing, int document, Interval<int>) const { return document; }
};

template <class Label>
struct MaskFirst {
  const Label* labels;
  int num_documents;
  int total;
  Label ignore_index;
  __device__ Label load(int t) const { return labels[t]; }
  __device__ Label operator()(int t, Label label, int document, Interval<int> s) const {
    return t == s.begin && document < num_documents ? ignore_index : label;
  }
};

template <class Label>
struct ShiftLeft {
  const Label* labels;
  int num_documents;
  int total;
  Label ignore_index;
  __device__ Label load(int t) const { return t + 1 < total ? labels[t + 1] : ignore_index; }
  __device__ Label operator()(int t, Label next, int document, Interval<int> s) const {
    return t + 1 < s.end && document < num_documents ? next : ignore_index;
  }
};

template <class Out, class Value>
__global__ void __launch_bounds__(kThreads) slots_kernel(Documents documents, Out* out, Value value, FaultFlag fault) {
  fill_slots<kThreads, kPairs>(documents, out, value);
  flag_cu_seqlens(documents, fault);
}

template <class Out, class Value>
void launch_slots(const Documents& documents, Out* out, const Value& value, const CudaLaunch& launch) {
  const unsigned grid = grid_for(ceil_div(documents.total, 2 * kPairs), kThreads);
  slots_kernel<<<grid, kThreads, 0, stream_of(launch)>>>(documents, out, value, launch.fault);
  check_launch("slots_kernel");
}

template <template <class> class Value>
void launch_labels(const LabelsParams& p, const CudaLaunch& launch) {
  const auto run = [&](auto label) {
    using Label = decltype(label);
    const Value<Label> value{static_cast<const Label*>(p.labels.data), static_cast<int>(p.documents.num_documents),
                             static_cast<int>(p.documents.total), static_cast<Label>(p.ignore_index)};
    launch_slots(p.documents, static_cast<Label*>(p.out.data), value, launch);
  };
  p.labels.is_int64 ? run(int64_t{}) : run(int32_t{});
}

// In place, so only the ends are touched.
__global__ void mask_last_kernel(LabelsParams p, FaultFlag fault) {
  flag_cu_seqlens(p.documents, fault);
  for (int64_t i = thread_id(); i < p.documents.num_documents; i += thread_count()) {
    const Interval<int64_t> s = p.documents[i];
    if (s.begin < s.end) p.out.set(s.end - 1, p.ignore_index);
  }
}

// Every label that is no ignore_index, less those that open a document.
__global__ void __launch_bounds__(kThreads) count_target_tokens_kernel(LabelsParams p, FaultFlag fault) {
  flag_cu_seqlens(p.documents, fault);
  using Reduce = cub::BlockReduce<int64_t, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  int64_t count = 0;
  const int64_t end = p.documents.end();
  for (int64_t t = thread_id(); t < end; t += thread_count()) count += p.labels[t] != p.ignore_index;
  for (int64_t i = thread_id(); i < p.documents.num_documents; i += thread_count()) {
    const Interval<int64_t> s = p.documents[i];
    if (s.begin < s.end) count -= p.labels[s.begin] != p.ignore_index;
  }
  count = Reduce(storage).Sum(count);
  // Two's complement: adding the unsigned pattern of a negative count subtracts.
  if (threadIdx.x == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(p.count), static_cast<unsigned long long>(count));
  }
}

// --- runs ---

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

// What CUB needs for either kind of runs.
size_t runs_cub_bytes(int64_t size) {
  size_t documents = 0;
  size_t prompts = 0;
  size_t sort = 0;
  int64_t* none = nullptr;
  check_cuda(cub::DeviceSelect::If(nullptr, documents, thrust::counting_iterator<int32_t>(0),
                                   static_cast<int32_t*>(nullptr), none, size, StartsDocument{}),
             "cub::DeviceSelect::If");
  check_cuda(
      cub::DeviceSelect::If(nullptr, prompts, thrust::counting_iterator<int64_t>(1), none, none, size, EndsPrompt{}),
      "cub::DeviceSelect::If");
  check_cuda(cub::DeviceRadixSort::SortPairs(nullptr, sort, none, none, none, none, size),
             "cub::DeviceRadixSort::SortPairs");
  return documents > prompts ? (documents > sort ? documents : sort) : (prompts > sort ? prompts : sort);
}

}  // namespace

void launch_cu_seqlens_from_lengths_cuda(const CuSeqlensFromLengthsParams& p, const CudaLaunch& launch) {
  cu_seqlens_from_lengths_kernel<<<1, kScanThreads, 0, stream_of(launch)>>>(p, launch.fault);
  check_launch("cu_seqlens_from_lengths_kernel");
}

void launch_position_ids_cuda(const SlotParams& p, const CudaLaunch& launch) {
  launch_slots(p.documents, p.position_ids, PositionId{}, launch);
}

void launch_seq_idx_cuda(const SlotParams& p, const CudaLaunch& launch) {
  launch_slots(p.documents, p.seq_idx, SequenceIndex{}, launch);
}

void launch_mask_boundary_labels_cuda(const LabelsParams& p, const CudaLaunch& launch) {
  launch_labels<MaskFirst>(p, launch);
}

void launch_shift_labels_cuda(const LabelsParams& p, const CudaLaunch& launch) {
  launch_labels<ShiftLeft>(p, launch);
}

void launch_mask_boundary_labels_shifted_cuda(const LabelsParams& p, const CudaLaunch& launch) {
  mask_last_kernel<<<grid_for(p.documents.num_documents, kThreads), kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  check_launch("mask_last_kernel");
}

void launch_count_target_tokens_cuda(const LabelsParams& p, const CudaLaunch& launch) {
  check_cuda(cudaMemsetAsync(p.count, 0, sizeof(int64_t), stream_of(launch)), "cudaMemsetAsync");
  const unsigned grid = grid_for(ceil_div(p.documents.total, 8), kThreads);
  count_target_tokens_kernel<<<grid, kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  check_launch("count_target_tokens_kernel");
}

// prompt_end_indices sorts four int64 arrays next to CUB's memory.
int64_t runs_scratch_cuda(int64_t size) {
  return size * 4 * static_cast<int64_t>(sizeof(int64_t)) + static_cast<int64_t>(runs_cub_bytes(size));
}

void launch_cu_seqlens_from_position_ids_cuda(const RunsParams& p, const CudaLaunch& launch) {
  size_t bytes = static_cast<size_t>(p.scratch_bytes);
  const cudaStream_t stream = stream_of(launch);
  check_cuda(cub::DeviceSelect::If(p.scratch, bytes, thrust::counting_iterator<int32_t>(0), p.cu_seqlens, p.count,
                                   p.size, StartsDocument{p.values}, stream),
             "cub::DeviceSelect::If");
  fill_after_kernel<<<grid_for(p.size + 1, kThreads), kThreads, 0, stream>>>(p.cu_seqlens, p.count, p.size + 1,
                                                                             static_cast<int32_t>(p.size));
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

  check_cuda(cub::DeviceSelect::If(cub_scratch, bytes, thrust::counting_iterator<int64_t>(1), p.ends, p.count, p.size,
                                   EndsPrompt{p.values, p.size}, stream),
             "cub::DeviceSelect::If");
  fill_after_kernel<<<grid, kThreads, 0, stream>>>(p.ends, p.count, p.size, p.size);
  check_launch("fill_after_kernel");
}

}  // namespace packing_ops
