// The backward's preprocess: lse and rowsum(dout * out) - dlse of each row, and the zeros that no unit writes.
#include "core/launch.cuh"
#include "core/ptx/mma.cuh"
#include "ops/attention/cuda/mask.cuh"
#include "ops/attention/cuda/plan_check.cuh"
#include "ops/attention/cuda/row_stats.h"
#include "ops/attention/cuda/softmax.cuh"

namespace packing_ops::attention {

namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 8;  // lanes of one row

// What a lane takes at a time: 16 bytes of the half types, whose rows are aligned, or one float, whose need not be.
template <class T>
struct Word {
  using Bits = uint4;
  static constexpr int kElements = 8;
};
template <>
struct Word<float> {
  using Bits = uint32_t;
  static constexpr int kElements = 1;
};

template <class T>
__device__ float dot_words(const T* a, const T* b) {
  using Bits = typename Word<T>::Bits;
  const Bits left = *reinterpret_cast<const Bits*>(a);
  const Bits right = *reinterpret_cast<const Bits*>(b);
  const T* x = reinterpret_cast<const T*>(&left);
  const T* y = reinterpret_cast<const T*>(&right);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < Word<T>::kElements; ++i) sum += static_cast<float>(x[i]) * static_cast<float>(y[i]);
  return sum;
}

template <class T>
__device__ T* row_of(const AttentionTensor& rows, int64_t token, int64_t head) {
  return static_cast<T*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
}

template <class T>
__device__ void zero_row(T* row, int head_dim, int lane) {
  constexpr int kStep = Word<T>::kElements;
  for (int i = lane * kStep; i < head_dim; i += kLanes * kStep) {
    *reinterpret_cast<typename Word<T>::Bits*>(row + i) = typename Word<T>::Bits{};
  }
}

__device__ bool row_attends(const Args& args, int64_t token) {
  const int64_t document = args.documents_q.document_of(token);
  const DocumentWithEnds d = document_with_ends(args.documents_q, args.documents_k, document, args.plan);
  const int32_t position = static_cast<int32_t>(token - d.start_q);
  return !d.visible_keys(position, position).empty();
}

struct Row {
  int64_t token;
  int32_t head;
};

// Of the first `count` of these rows, by kLanes lanes. All loads are issued before the first is used.
template <class T, int kRows>
__device__ void write_row_stats(const Args& args, const Row (&rows)[kRows], int count, int lane) {
  float sum[kRows] = {};
  float lse[kRows];
  float dlse[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t index = rows[r].head * args.documents_q.total + rows[r].token;
    lse[r] = lane == 0 && r < count ? args.lse[index] : 0.f;
    dlse[r] = lane == 0 && r < count && args.dlse != nullptr ? args.dlse[index] : 0.f;
  }
  constexpr int kStep = Word<T>::kElements;
  for (int i = lane * kStep; i < args.head_dim_v; i += kLanes * kStep) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < count) {
        sum[r] += dot_words<T>(row_of<T>(args.dout, rows[r].token, rows[r].head) + i,
                               row_of<T>(args.out, rows[r].token, rows[r].head) + i);
      }
    }
  }
  const unsigned peers = 0xffu << (threadIdx.x & 24);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) sum[r] += __shfl_xor_sync(peers, sum[r], step);
    if (lane == 0 && r < count) {
      args.row_stats[rows[r].token * args.num_heads + rows[r].head] =
          make_float2(lse[r] == -INFINITY ? 0.f : lse[r] * kLog2e, sum[r] - dlse[r]);
    }
  }
}

// Rows of documents of several key tiles. The plan has one entry for each of their key tiles; an entry takes an equal
// share of its document's tokens, cut into kShares units so that few documents occupy the whole GPU.
template <class T>
__device__ void write_listed_row_stats(const Args& args) {
  constexpr int kShares = 32;
  constexpr int kGroups = kThreads / kLanes;
  const int32_t group = threadIdx.x / kLanes;
  const int32_t tokens = kGroups / args.num_heads;
  const int32_t heads = kGroups % args.num_heads;
  const auto next = [&](const Row& row) {
    const bool over = row.head + heads >= args.num_heads;
    return Row{row.token + tokens + over, row.head + heads - (over ? args.num_heads : 0)};
  };
  const PlanEntry* entries = args.plan.entries[PlanView::kBackward];
  const int64_t units = static_cast<int64_t>(args.plan.data[PlanView::kBackward]) * kShares;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const PlanEntry entry = entries[unit / kShares];
    const int64_t shares = ceil_div(entry.keys, args.plan.tiles.backward_keys) * kShares;
    const int64_t share = entry.tile * kShares + unit % kShares;
    const int64_t first = entry.start_q + entry.tokens * share / shares;
    const int64_t end = entry.start_q + entry.tokens * (share + 1) / shares;
    Row row{first + group / args.num_heads, group % args.num_heads};
    while (row.token < end) {
      const Row rows[2] = {row, next(row)};
      write_row_stats<T>(args, rows, rows[1].token < end ? 2 : 1, threadIdx.x % kLanes);
      row = next(rows[1]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) row_stats_kernel(__grid_constant__ const Args args) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int lane = threadIdx.x % kLanes;
  for (int64_t i = thread; i < args.num_counters; i += threads) args.counters[i] = 0;
  check_plan(args.plan, args.documents_q, args.documents_k, args.fault);

  const int64_t end_q = args.plan.data[PlanView::kEndQ];
  const bool all_attend = args.documents_q.cu_seqlens == args.documents_k.cu_seqlens;
  const int64_t rows = args.documents_q.total * args.num_heads;
  const int64_t first_row = args.all_row_stats ? 0 : end_q * args.num_heads;
  for (int64_t row = first_row + thread / kLanes; row < rows; row += threads / kLanes) {
    const int64_t token = row / args.num_heads;
    const int32_t head = static_cast<int32_t>(row - token * args.num_heads);
    if (token >= end_q || (!all_attend && !row_attends(args, token))) {
      zero_row(row_of<T>(args.dq, token, head), args.head_dim, lane);
      if (token >= end_q) continue;
    }
    const Row one[1] = {{token, head}};
    write_row_stats<T>(args, one, 1, lane);
  }
  if (!args.all_row_stats) write_listed_row_stats<T>(args);

  const int64_t end_k = args.plan.data[PlanView::kEndK];
  const int64_t key_rows = (args.documents_k.total - end_k) * args.num_kv_heads;
  for (int64_t row = thread / kLanes; row < key_rows; row += threads / kLanes) {
    const int64_t token = end_k + row / args.num_kv_heads;
    zero_row(row_of<T>(args.dk, token, row % args.num_kv_heads), args.head_dim, lane);
    zero_row(row_of<T>(args.dv, token, row % args.num_kv_heads), args.head_dim_v, lane);
  }
}

// A block for each head; thread i adds tokens i, i + kThreads, ... and a tree adds the threads.
__global__ void __launch_bounds__(kThreads) sinks_backward_kernel(__grid_constant__ const Args args) {
  __shared__ float sums[kThreads];
  const int64_t head = blockIdx.x;
  const float sink = args.sinks[head] * kLog2e;
  const int64_t end_q = args.plan.data[PlanView::kEndQ];
  float sum = 0.f;
  for (int64_t token = threadIdx.x; token < end_q; token += kThreads) {
    const float2 stats = args.row_stats[token * args.num_heads + head];
    sum -= ptx::exp2_approx(sink - stats.x) * stats.y;
  }
  sums[threadIdx.x] = sum;
  for (int step = kThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
  }
  if (threadIdx.x == 0) args.dsinks[head] = sums[0];
}

}  // namespace

template <class T>
void run_row_stats(const Args& args, cudaStream_t stream) {
  const int64_t rows = args.documents_q.total * args.num_heads + args.documents_k.total * args.num_kv_heads;
  row_stats_kernel<T><<<grid_for(rows * kLanes, kThreads), kThreads, 0, stream>>>(args);
  check_launch("row_stats_kernel");
}

template void run_row_stats<__nv_bfloat16>(const Args&, cudaStream_t);
template void run_row_stats<__half>(const Args&, cudaStream_t);
template void run_row_stats<float>(const Args&, cudaStream_t);

void run_sinks_backward(const Args& args, cudaStream_t stream) {
  sinks_backward_kernel<<<args.num_heads, kThreads, 0, stream>>>(args);
  check_launch("sinks_backward_kernel");
}

}  // namespace packing_ops::attention
