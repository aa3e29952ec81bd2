// What each slot predicts, and which slots predict at all.
#include "core/documents.cuh"
#include "core/launch.cuh"
#include "core/ptx/mma.cuh"
#include "ops/logps/logps.h"

namespace packing_ops {

namespace {

constexpr int kThreads = 256;
constexpr int kPairs = 2;  // pairs of slots per thread

// --- targets ---

template <class Label>
struct Target {
  const Label* labels;
  int num_documents;
  int total;
  int64_t ignore_index;
  int64_t vocab;
  FaultFlag fault;

  __device__ Label load(int t) const { return t + 1 < total ? labels[t + 1] : Label(0); }
  __device__ int32_t operator()(int t, Label next, int document, Interval<int> s) const {
    if (t + 1 >= s.end || document >= num_documents || next == ignore_index) return -1;
    if (next >= 0 && next < vocab) return static_cast<int32_t>(next);
    fault.raise(Fault::kLabelOutside, t + 1);
    return -1;
  }
};

template <class Label>
__global__ void __launch_bounds__(kThreads)
    logps_targets_kernel(Documents documents, int32_t* targets, Target<Label> target, FaultFlag fault) {
  fill_slots<kThreads, kPairs>(documents, targets, target);
  flag_cu_seqlens(documents, fault);
}

// --- rows ---

constexpr int kRowThreads = 1024;

// One block, slot by slot: a few microseconds, against products of milliseconds.
__global__ void __launch_bounds__(kRowThreads) logps_rows_kernel(LogpsRowsParams p, FaultFlag fault) {
  __shared__ int of_warps[kRowThreads / kWarp];
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarp;
  int64_t before = 0;
  for (int64_t first = 0; first < p.total; first += kRowThreads) {
    const int64_t t = first + thread;
    const bool kept = t < p.total && p.targets[t] >= 0;
    const unsigned votes = __ballot_sync(0xffffffffu, kept);
    if (thread % kWarp == 0) of_warps[warp] = __popc(votes);
    __syncthreads();
    int64_t place = before + __popc(votes & ((1u << (thread % kWarp)) - 1));
    for (int w = 0; w < kRowThreads / kWarp; ++w) {
      if (w < warp) place += of_warps[w];
      before += of_warps[w];
    }
    if (kept && place < p.size) p.rows[place] = t;
    if (kept && place == p.size) fault.raise(Fault::kTargetOverBound, t);
    __syncthreads();
  }
  for (int64_t i = before + thread; i < p.size; i += kRowThreads) p.rows[i] = -1;
}

// --- sets of entries of the vocabulary ---

__global__ void __launch_bounds__(kThreads) logps_allowed_ids_kernel(LogpsAllowedParams p, FaultFlag fault) {
  for (int64_t i = thread_id(); i < p.size; i += thread_count()) {
    const int64_t id = p.ids[i];
    const bool inside = id >= 0 && id < p.vocab;
    if (!inside) fault.raise(Fault::kAllowedOutside, i);
    p.checked_ids[i] = inside ? static_cast<int32_t>(id) : -1;
  }
}

// One warp per row, and one for the end of the last set. The ids are checked before.
__global__ void __launch_bounds__(kThreads) logps_allowed_offsets_kernel(LogpsAllowedParams p, FaultFlag fault) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto bound = [&p](int64_t t) {
    const int64_t value = p.offsets[t < p.total ? t : p.total];
    return value < 0 ? 0 : (value > p.size ? p.size : value);
  };
  for (int64_t t = thread_id() / kWarp; t <= p.total; t += thread_count() / kWarp) {
    const int64_t begin = bound(t + p.ahead), end = bound(t + p.ahead + 1);
    if (lane == 0) {
      const bool wrong = t == p.total ? p.offsets[t] != p.size : p.offsets[t + 1] < p.offsets[t];
      if (wrong || (t == 0 && p.offsets[0] != 0)) fault.raise(Fault::kAllowedOffsets, wrong && t < p.total ? t + 1 : t);
      p.checked_offsets[t] = begin;
    }
    const int32_t target = t < p.total ? p.targets[t] : -1;
    if (target < 0 || end <= begin) continue;
    bool found = false;
    for (int64_t i = begin + lane; i < end; i += kWarp) found |= p.checked_ids[i] == target;
    if (!__any_sync(0xffffffffu, found) && lane == 0) fault.raise(Fault::kLabelNotAllowed, t + p.ahead);
  }
}

// One block per row.
__global__ void __launch_bounds__(kThreads) logps_allowed_mask_kernel(LogpsMaskParams p) {
  const Interval<int64_t> set = p.set_of(blockIdx.x);
  uint32_t* words = p.mask + blockIdx.x * p.words;
  for (int64_t i = threadIdx.x; i < p.words; i += kThreads) words[i] = set.empty() ? ~0u : 0u;
  __syncthreads();
  for (int64_t i = set.begin + threadIdx.x; i < set.end; i += kThreads) {
    const int64_t column = p.ids[i] - p.first;
    if (p.has_column(column)) atomicOr(words + column / 32, 1u << column % 32);
  }
}

}  // namespace

void launch_logps_allowed_cuda(const LogpsAllowedParams& p, const CudaLaunch& launch) {
  if (p.size > 0) {
    logps_allowed_ids_kernel<<<grid_for(p.size, kThreads), kThreads, 0, stream_of(launch)>>>(p, launch.fault);
    check_launch("logps_allowed_ids_kernel");
  }
  const unsigned grid = grid_for((p.total + 1) * kWarp, kThreads);
  logps_allowed_offsets_kernel<<<grid, kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  check_launch("logps_allowed_offsets_kernel");
}

void launch_logps_allowed_mask_cuda(const LogpsMaskParams& p, const CudaLaunch& launch) {
  if (p.rows == 0 || p.words == 0) return;
  logps_allowed_mask_kernel<<<static_cast<unsigned>(p.rows), kThreads, 0, stream_of(launch)>>>(p);
  check_launch("logps_allowed_mask_kernel");
}

void launch_logps_targets_cuda(const LogpsTargetsParams& p, const CudaLaunch& launch) {
  const unsigned grid = grid_for(ceil_div(p.documents.total, 2 * kPairs), kThreads);
  const auto run = [&](auto label) {
    using Label = decltype(label);
    const Target<Label> target{static_cast<const Label*>(p.labels.data),
                               static_cast<int>(p.documents.num_documents),
                               static_cast<int>(p.documents.total),
                               p.ignore_index,
                               p.vocab,
                               launch.fault};
    logps_targets_kernel<<<grid, kThreads, 0, stream_of(launch)>>>(p.documents, p.targets, target, launch.fault);
  };
  p.labels.is_int64 ? run(int64_t{}) : run(int32_t{});
  check_launch("logps_targets_kernel");
}

void launch_logps_rows_cuda(const LogpsRowsParams& p, const CudaLaunch& launch) {
  if (p.total == 0 && p.size == 0) return;
  logps_rows_kernel<<<1, kRowThreads, 0, stream_of(launch)>>>(p, launch.fault);
  check_launch("logps_rows_kernel");
}

}  // namespace packing_ops
