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

// One block, slot by slot: a few microseconds, beside products of milliseconds.
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

}  // namespace

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
