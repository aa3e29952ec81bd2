// The gradients of causal_conv1d, in one pass: a thread takes its channels through a run of rows, and past its end as
// far as the taps reach. The sums for dweight and dbias of a block's rows go to memory, and are added up in order of
// the rows.
#include "ops/conv/conv.cuh"

namespace packing_ops {

namespace conv {

namespace {

constexpr int kThreads = 128;
constexpr int kRun = static_cast<int>(kConvBackwardRows);
constexpr int kSumRows = 32;  // of float32, whose longer sums would show
constexpr int kStages = 3;    // groups of rows whose loads are in flight

template <class T>
__device__ __forceinline__ float silu_slope(float x) {
  const float gate = sigmoid<T>(x);
  return gate * (1.0f + x * (1.0f - gate));
}

template <class T, int kVec, int kTaps>
struct Sums {
  float taps[kTaps][kVec] = {};
  float bias[kVec] = {};

  // Takes what others have, which are 0 then.
  __device__ __forceinline__ void take(Sums& others) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      bias[v] += others.bias[v];
#pragma unroll
      for (int i = 0; i < kTaps; ++i) taps[i][v] += others.taps[i][v];
    }
    others = {};
  }

  // d: the gradient of a row's sum. kInside: as for sum_row.
  template <bool kInside>
  __device__ __forceinline__ void add(const CausalConvParams& p, const Place& place, int64_t channel,
                                      const float (&d)[kVec], const float (&x)[kVec],
                                      const float (&rows)[kTaps - 1][kVec]) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      bias[v] += d[v];
      taps[0][v] += d[v] * x[v];
    }
#pragma unroll
    for (int i = 1; i < kTaps; ++i) {
      if (!kInside && i >= p.width) continue;
      if (kInside || i <= place.before) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) taps[i][v] += d[v] * rows[i - 1][v];
      } else if (p.initial_state) {
        const T* state = static_cast<const T*>(p.initial_state);
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          taps[i][v] += d[v] * static_cast<float>(state[state_at(p, place.document, channel + v, i - place.before)]);
        }
      }
    }
  }
};

// dx of the row at `place`; later[kTaps - 1 - i] is the gradient of the sum i rows after it. kInside: all
// taps are used, and all these rows are of its document.
template <bool kInside, class T, int kVec, int kTaps>
__device__ __forceinline__ void finish_row(const CausalConvBackwardParams& p, const Taps<T, kVec, kTaps>& taps,
                                           const Place& place, int64_t channel, const float (&later)[kTaps][kVec],
                                           T* to) {
  const bool inside = place.document < p.documents.num_documents;
  float dx[kVec] = {};
#pragma unroll
  for (int i = 0; i < kTaps; ++i) {
    if (!kInside && (i >= p.width || i > place.after || !inside)) continue;
#pragma unroll
    for (int v = 0; v < kVec; ++v) dx[v] += taps.at[i][v] * later[kTaps - 1 - i][v];
  }
  if (!kInside && p.dfinal_state && inside && place.after < p.width - 1) {
    const T* state = static_cast<const T*>(p.dfinal_state);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      dx[v] += static_cast<float>(state[state_at(p, place.document, channel + v, place.after + 1)]);
    }
  }
  store_row<T, kVec>(dx, to);
}

template <class T, int kVec, int kTaps>
__device__ __forceinline__ void store_sums(const CausalConvBackwardParams& p, const Sums<T, kVec, kTaps>& sums,
                                           const Tile& tile) {
  float* to = p.partial + tile.index * (p.width + 1) * p.channels + tile.channel;
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      if (i < p.width) to[i * p.channels + v] = sums.taps[i][v];
    }
    to[p.width * p.channels + v] = sums.bias[v];
  }
}

// What a thread has of its channels on its way through a tile's rows.
template <class T, int kVec, int kTaps>
struct Walk {
  static constexpr int kPast = kTaps - 1;  // rows after a row that its dx needs
  using Ring = RowRing<T, kVec, kThreads, kStages>;

  const CausalConvBackwardParams& p;
  const Place* places;
  const int64_t channel;
  const int rows_of_tile;
  const int count;  // of the rows to read
  T* dx;            // of the next row that is finished
  const Taps<T, kVec, kTaps> taps{p, channel};
  Sums<T, kVec, kTaps> sums, finished;
  float rows[kTaps - 1][kVec];
  float later[kTaps][kVec] = {};

  // The rows of a group, from `run` on. kInside: they and those before them that they finish are the tile's and of one
  // document.
  template <bool kInside, class Silu>
  __device__ __forceinline__ void take(const Ring& x_ring, const Ring& dout_ring, int run, Silu silu) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const bool exists = kInside || run + i < count;
      const Place place = kInside || !exists ? Place{} : places[run + i];
      float x[kVec], d[kVec], sum[kVec];
      unpack_row(x_ring[i], x);
      unpack_row(dout_ring[i], d);
      if (silu && exists) {
        sum_row<kInside, T, kVec, kTaps>(p, taps, place, channel, x, rows, sum);
#pragma unroll
        for (int v = 0; v < kVec; ++v) d[v] *= silu_slope<T>(sum[v]);
      }
      if (kInside || (run + i < rows_of_tile && place.document < p.documents.num_documents)) {
        sums.template add<kInside>(p, place, channel, d, x, rows);
      }
      push(x, rows);
      push(d, later);
      const int done = run + i - kPast;
      if (!kInside && (done < 0 || done >= rows_of_tile)) continue;
      finish_row<kInside, T, kVec, kTaps>(p, taps, kInside ? Place{} : places[done], channel, later, dx);
      dx += p.channels;
    }
  }
};

template <class T, int kVec, int kTaps>
__global__ void __launch_bounds__(kThreads) conv_backward_kernel(CausalConvBackwardParams p, FaultFlag fault) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ Place places[kRun + kTaps];
  using Rows = Walk<T, kVec, kTaps>;
  const Tile tile(p.channels, kThreads * kVec, kVec);
  const int64_t first = tile.index * kRun;
  const int64_t left = p.documents.total - first;
  const int rows_of_tile = static_cast<int>(left < kRun ? left : kRun);
  const int count = !tile.exists ? 0 : static_cast<int>(left < kRun + Rows::kPast ? left : kRun + Rows::kPast);
  typename Rows::Ring x_ring(p.x, p.x_row, first, tile.channel, count, shared);
  typename Rows::Ring dout_ring(p.dout, p.dout_row, first, tile.channel, count, shared + Rows::Ring::kBytes);
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    x_ring.start();
    dout_ring.start();
  }
  flag_cu_seqlens(p.documents, fault);
  find_places<kThreads>(p.documents, first, kRun + kTaps, places);
  if (!tile.exists) return;
  T* const dx = static_cast<T*>(p.dx) + first * p.channels + tile.channel;
  Rows walk{p, places, tile.channel, rows_of_tile, count, dx};
  load_rows_before<T, kVec, kTaps>(p, first, tile.channel, walk.rows);
  for (int run = 0; run < rows_of_tile + Rows::kPast; run += kGroup) {
    if (sizeof(T) == 4 && run % kSumRows == 0) walk.finished.take(walk.sums);
    ptx::cp_async_wait<2 * (kStages - 1)>();
    const bool inside =
        run >= Rows::kPast && run + kGroup <= rows_of_tile && are_inside<kTaps>(p, places + run, kGroup);
    if (!inside) {
      walk.template take<false>(x_ring, dout_ring, run, p.silu);
    } else if (p.silu) {
      walk.template take<true>(x_ring, dout_ring, run, std::true_type{});
    } else {
      walk.template take<true>(x_ring, dout_ring, run, std::false_type{});
    }
    x_ring.start();
    dout_ring.start();
  }
  walk.finished.take(walk.sums);
  store_sums<T, kVec, kTaps>(p, walk.finished, tile);
}

// dweight and dbias: warp w adds up rows w, w + 8, ... of the partial sums, and the warps' sums are added in order.
template <class T>
__global__ void __launch_bounds__(256) conv_sums_kernel(CausalConvBackwardParams p) {
  __shared__ float of_warps[8][kWarp];
  const int warp = static_cast<int>(threadIdx.x / kWarp);
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int64_t columns = (p.width + 1) * p.channels;
  const int64_t column = int64_t{blockIdx.x} * kWarp + lane;
  float sum = 0.0f;
  const int64_t parts = column < columns ? causal_conv1d_partial_sums(p.documents.total) : 0;
#pragma unroll 8
  for (int64_t i = warp; i < parts; i += 8) sum += p.partial[i * columns + column];
  of_warps[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= columns) return;
  for (int w = 1; w < 8; ++w) sum += of_warps[w][lane];
  const int64_t tap = column / p.channels;
  const int64_t channel = column % p.channels;
  if (tap < p.width) {
    static_cast<T*>(p.dweight)[channel * p.width + p.width - 1 - tap] = static_cast<T>(sum);
  } else if (p.dbias) {
    static_cast<T*>(p.dbias)[channel] = static_cast<T>(sum);
  }
}

// The sum of the row at `position` of a document, before the activation.
template <class T>
__device__ float sum_at(const CausalConvParams& p, int64_t document, int64_t channel, int64_t position) {
  const int64_t start = p.documents[document].begin;
  float sum = p.bias ? static_cast<float>(static_cast<const T*>(p.bias)[channel]) : 0.0f;
  for (int64_t i = p.width - 1; i >= 0; --i) {
    const float tap = static_cast<float>(static_cast<const T*>(p.weight)[channel * p.width + p.width - 1 - i]);
    const int64_t at = position - i;
    const T x = at >= 0 ? static_cast<const T*>(p.x)[(start + at) * p.x_row + channel]
                        : static_cast<const T*>(p.initial_state)[state_at(p, document, channel, static_cast<int>(-at))];
    sum += tap * static_cast<float>(x);
  }
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads) conv_initial_state_kernel(CausalConvBackwardParams p) {
  const int64_t states = p.width - 1;
  const int64_t count = p.documents.num_documents * p.channels * states;
  for (int64_t i = thread_id(); i < count; i += thread_count()) {
    const int64_t document = i / (p.channels * states);
    const int64_t channel = i / states % p.channels;
    const Interval<int64_t> rows = p.documents[document];
    const int64_t back = states - i % states;  // rows before the first
    float gradient = 0.0f;
    for (int64_t tap = back; tap < p.width && tap - back < rows.size(); ++tap) {
      const int64_t position = tap - back;
      float d = static_cast<float>(static_cast<const T*>(p.dout)[(rows.begin + position) * p.dout_row + channel]);
      if (p.silu) d *= silu_slope<T>(sum_at<T>(p, document, channel, position));
      gradient += d * static_cast<float>(static_cast<const T*>(p.weight)[channel * p.width + p.width - 1 - tap]);
    }
    const int64_t place = states - back - rows.size();  // in the final state
    if (p.dfinal_state && place >= 0) {
      const int64_t at = (document * p.channels + channel) * states + place;
      gradient += static_cast<float>(static_cast<const T*>(p.dfinal_state)[at]);
    }
    static_cast<T*>(p.dinitial_state)[i] = static_cast<T>(gradient);
  }
}

}  // namespace

}  // namespace conv

void launch_causal_conv1d_backward_cuda(const CausalConvBackwardParams& p, const CudaLaunch& launch) {
  const int64_t bytes = p.dtype == DType::kFloat32 ? 4 : 2;
  const bool vectors = conv::has_vectors(p.x, p.x_row, bytes) && conv::has_vectors(p.dout, p.dout_row, bytes) &&
                       conv::has_vectors(p.dx, p.channels, bytes);
  conv::dispatch_conv<8>(p, vectors, [&](auto zero, auto vec, auto taps) {
    using T = decltype(zero);
    const cudaStream_t stream = stream_of(launch);
    if (p.channels == 0) return;
    const int64_t grid =
        causal_conv1d_partial_sums(p.documents.total) * ceil_div(p.channels, int64_t{conv::kThreads} * vec);
    if (p.documents.total > 0) {
      constexpr int kRings = 2 * conv::Walk<T, vec, taps>::Ring::kBytes;
      const auto kernel = conv::conv_backward_kernel<T, vec, taps>;
      kernel<<<static_cast<unsigned>(grid), conv::kThreads, kRings, stream>>>(p, launch.fault);
      check_launch("conv_backward_kernel");
    }
    const auto of_sums = conv::conv_sums_kernel<T>;
    of_sums<<<static_cast<unsigned>(ceil_div((p.width + 1) * p.channels, kWarp)), 256, 0, stream>>>(p);
    check_launch("conv_sums_kernel");
    if (p.dinitial_state && p.width > 1) {
      const int64_t states = p.documents.num_documents * p.channels * (p.width - 1);
      const auto of_states = conv::conv_initial_state_kernel<T>;
      of_states<<<grid_for(states, conv::kThreads), conv::kThreads, 0, stream>>>(p);
      check_launch("conv_initial_state_kernel");
    }
  });
}

}  // namespace packing_ops
