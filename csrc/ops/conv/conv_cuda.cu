// causal_conv1d: a warp takes 32 vectors of channels through a run of rows; the last rows stay in registers.
#include "ops/conv/conv.cuh"

namespace packing_ops {

namespace conv {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRun = 32;  // rows of a warp
constexpr int kRows = kWarps * kRun;

template <class T, int kVec, int kTaps>
__global__ void __launch_bounds__(kThreads, kVec == 1 ? 4 : 2) conv_kernel(CausalConvParams p, FaultFlag fault) {
  __shared__ Place places[kRows];
  flag_cu_seqlens(p.documents, fault);
  const int64_t total = p.documents.total;
  const int64_t tile = int64_t{blockIdx.x} * kRows;
  find_places<kThreads>(p.documents, tile, kRows, places);
  const int warp = static_cast<int>(threadIdx.x / kWarp);
  const int64_t channel = (int64_t{blockIdx.y} * kWarp + threadIdx.x % kWarp) * kVec;
  const int64_t first = tile + warp * kRun;
  if (channel >= p.channels || first >= total) return;
  const Taps<T, kVec, kTaps> taps(p, channel);
  float rows[kTaps - 1][kVec];
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) {
    unpack_row(i + 1 < p.width ? load_row<T, kVec>(p.x, p.x_row, first - 1 - i, total, channel) : Vec<T, kVec>{},
               rows[i]);
  }
  T* out = static_cast<T*>(p.out) + channel;
  for (int run = 0; run < kRun; run += kAhead) {
    Vec<T, kVec> ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      ahead[i] = load_row<T, kVec>(p.x, p.x_row, first + run + i, total, channel);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t t = first + run + i;
      if (t >= total) return;
      const Place place = places[warp * kRun + run + i];
      float x[kVec], sum[kVec];
      unpack_row(ahead[i], x);
      sum_row<T, kVec, kTaps>(p, taps, place, channel, x, rows, sum);
      push(x, rows);
      if (p.silu) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) sum[v] *= sigmoid<T>(sum[v]);
      }
      if (place.document == p.documents.num_documents) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) sum[v] = 0.0f;
      }
      store_row<T, kVec>(sum, out + t * p.channels);
    }
  }
}

// The last rows of each document.
template <class T>
__global__ void __launch_bounds__(kThreads) conv_state_kernel(CausalConvParams p) {
  const int64_t states = p.width - 1;
  const int64_t count = p.documents.num_documents * p.channels * states;
  for (int64_t i = thread_id(); i < count; i += thread_count()) {
    const int64_t document = i / (p.channels * states);
    const int64_t channel = i / states % p.channels;
    const Interval<int64_t> rows = p.documents[document];
    const int64_t position = rows.size() - states + i % states;
    T x = static_cast<T>(0.0f);
    if (position >= 0) {
      x = static_cast<const T*>(p.x)[(rows.begin + position) * p.x_row + channel];
    } else if (p.initial_state) {
      x = static_cast<const T*>(p.initial_state)[state_at(p, document, channel, static_cast<int>(-position))];
    }
    static_cast<T*>(p.final_state)[i] = x;
  }
}

}  // namespace

}  // namespace conv

void launch_causal_conv1d_cuda(const CausalConvParams& p, const CudaLaunch& launch) {
  const int64_t bytes = p.dtype == DType::kFloat32 ? 4 : 2;
  const bool vectors = conv::has_vectors(p.x, p.x_row, bytes) && conv::has_vectors(p.out, p.channels, bytes);
  conv::dispatch_conv<16>(p, vectors, [&](auto zero, auto vec, auto taps) {
    using T = decltype(zero);
    const dim3 grid(static_cast<unsigned>(ceil_div(p.documents.total, conv::kRows)),
                    static_cast<unsigned>(ceil_div(p.channels, kWarp * vec)));
    const auto kernel = conv::conv_kernel<T, vec, taps>;
    if (p.documents.total > 0 && p.channels > 0) {
      kernel<<<grid, conv::kThreads, 0, stream_of(launch)>>>(p, launch.fault);
      check_launch("conv_kernel");
    }
    if (p.final_state) {
      const int64_t states = p.documents.num_documents * p.channels * (p.width - 1);
      const auto of_states = conv::conv_state_kernel<T>;
      of_states<<<grid_for(states, conv::kThreads), conv::kThreads, 0, stream_of(launch)>>>(p);
      check_launch("conv_state_kernel");
    }
  });
}

}  // namespace packing_ops
