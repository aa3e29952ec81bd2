// causal_conv1d: a thread takes its channels through a run of rows; the last rows stay in registers.
#include "ops/conv/conv.cuh"

namespace packing_ops {

namespace conv {

namespace {

constexpr int kThreads = 256;
constexpr int kStages = 4;  // groups of rows whose loads are in flight
// Rows of a block: many if there are enough blocks, since a block finds its documents first.
constexpr int kShortRun = 16;
constexpr int kLongRun = 128;
constexpr int64_t kManyElements = int64_t{1} << 26;

// The sums of row t, whose rows may be before its document; 0 for a row of no document. Reads all from memory, in the
// order of sum_row.
template <class T, int kVec>
__device__ void sum_at(const CausalConvParams& p, const Place& place, int64_t t, int64_t channel,
                       const float (&bias)[kVec], float (&sum)[kVec]) {
  const bool inside = place.document < p.documents.num_documents;
  const T* weight = static_cast<const T*>(p.weight) + channel * p.width;
#pragma unroll
  for (int v = 0; v < kVec; ++v) sum[v] = inside ? bias[v] : 0.0f;
#pragma unroll 1
  for (int i = static_cast<int>(p.width) - 1; inside && i >= 0; --i) {
    if (i > place.before && !p.initial_state) continue;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const T x =
          i <= place.before
              ? static_cast<const T*>(p.x)[(t - i) * p.x_row + channel + v]
              : static_cast<const T*>(p.initial_state)[state_at(p, place.document, channel + v, i - place.before)];
      sum[v] += static_cast<float>(weight[v * p.width + p.width - 1 - i]) * static_cast<float>(x);
    }
  }
}

template <class T, int kVec>
__device__ __forceinline__ void finish_row(const CausalConvParams& p, float (&sum)[kVec], T* to) {
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    if (p.silu) sum[v] *= sigmoid<T>(sum[v]);
  }
  store_row<T, kVec>(sum, to);
}

template <class T, int kVec, int kTaps>
__global__ void __launch_bounds__(kThreads, 3) conv_kernel(CausalConvParams p, int rows_of_tile, FaultFlag fault) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ Place places[kLongRun];
  const Tile tile(p.channels, kThreads * kVec, kVec);
  const int64_t first = tile.index * rows_of_tile;
  const int64_t left = p.documents.total - first;
  const int count = static_cast<int>(left < rows_of_tile ? left : rows_of_tile);
  RowRing<T, kVec, kThreads, kStages> ring(p.x, p.x_row, first, tile.channel, tile.exists ? count : 0, shared);
#pragma unroll
  for (int i = 0; i < kStages; ++i) ring.start();
  flag_cu_seqlens(p.documents, fault);
  find_places<kThreads>(p.documents, first, rows_of_tile, places);
  if (!tile.exists) return;
  const Taps<T, kVec, kTaps> taps(p, tile.channel);
  float rows[kTaps - 1][kVec];
  load_rows_before<T, kVec, kTaps>(p, first, tile.channel, rows);
  T* out = static_cast<T*>(p.out) + first * p.channels + tile.channel;
  for (int run = 0; run < count; run += kGroup) {
    ptx::cp_async_wait<kStages - 1>();
    if (run + kGroup <= count && are_inside<kTaps>(p, places + run, kGroup)) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i, out += p.channels) {
        float x[kVec], sum[kVec];
        unpack_row(ring[i], x);
        sum_row<true, T, kVec, kTaps>(p, taps, {}, tile.channel, x, rows, sum);
        push(x, rows);
        finish_row<T, kVec>(p, sum, out);
      }
    } else {
#pragma unroll 1
      for (int i = run; i < run + kGroup && i < count; ++i, out += p.channels) {
        float sum[kVec];
        sum_at<T, kVec>(p, places[i], first + i, tile.channel, taps.bias, sum);
        finish_row<T, kVec>(p, sum, out);
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        float x[kVec];
        unpack_row(ring[i], x);
        push(x, rows);
      }
    }
    ring.start();
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
  conv::dispatch_conv<8>(p, vectors, [&](auto zero, auto vec, auto taps) {
    using T = decltype(zero);
    const bool many = p.documents.total * p.channels >= conv::kManyElements;
    const int rows_of_tile = many ? conv::kLongRun : conv::kShortRun;
    const int64_t grid =
        ceil_div(p.documents.total, rows_of_tile) * ceil_div(p.channels, int64_t{conv::kThreads} * vec);
    constexpr int kRing = conv::RowRing<T, vec, conv::kThreads, conv::kStages>::kBytes;
    const auto kernel = conv::conv_kernel<T, vec, taps>;
    if (p.documents.total > 0 && p.channels > 0) {
      kernel<<<static_cast<unsigned>(grid), conv::kThreads, kRing, stream_of(launch)>>>(p, rows_of_tile, launch.fault);
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
