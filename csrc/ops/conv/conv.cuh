// What the kernels of causal_conv1d and its gradient share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/documents.cuh"
#include "core/launch.cuh"
#include "core/ptx/mma.cuh"
#include "core/vec.cuh"
#include "ops/conv/conv.h"

namespace packing_ops::conv {

constexpr int kAhead = 8;  // rows whose loads are in flight

// Where a row is in its document: rows before and after it there, 0 of either for a row of no document.
struct Place {
  int before, after;
  int document;  // num_documents after the last
};

// Of the rows first .. first + count that there are; by the whole block, which it synchronises.
template <int kThreads>
__device__ inline void find_places(const Documents& documents, int64_t first, int count, Place* places) {
  __shared__ int32_t window[2 * kThreads];
  TileDocuments<kThreads> tile(documents, window);
  const int64_t left = documents.total - first;
  if (left < count) count = static_cast<int>(left);
  tile.find(static_cast<int>(first), static_cast<int>(first) + count - 1);
  const int num_documents = static_cast<int>(documents.num_documents);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const int t = static_cast<int>(first) + i;
    const int document = tile.document_of(t);
    const Interval<int> rows = tile.segment(document);
    const bool inside = document < num_documents && t < rows.end;
    places[i] = {inside ? t - rows.begin : 0, inside ? rows.end - 1 - t : 0, inside ? document : num_documents};
  }
  __syncthreads();
}

// kVec neighbouring channels of a row as they are in memory, zeros without a row.
template <class T, int kVec>
__device__ __forceinline__ Vec<T, kVec> load_row(const void* rows, int64_t row, int64_t t, int64_t total,
                                                 int64_t channel) {
  Vec<T, kVec> x{};
  if (t >= 0 && t < total) {
    x = *reinterpret_cast<const Vec<T, kVec>*>(static_cast<const T*>(rows) + t * row + channel);
  }
  return x;
}

template <class T, int kVec>
__device__ __forceinline__ void store_row(const float (&values)[kVec], T* to) {
  Vec<T, kVec> x;
  if constexpr (kVec == 1) {
    x.set(0, values[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kVec; i += 2) x.set_pair(i, values[i], values[i + 1]);
  }
  *reinterpret_cast<Vec<T, kVec>*>(to) = x;
}

// Half types need no more than a few units in float32's last place.
template <class T>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (sizeof(T) == 4) return 1.0f / (1.0f + expf(-x));
  return ptx::rcp_approx(1.0f + ptx::exp2_approx(-1.44269504f * x));
}

// The taps of kVec channels by distance, kTaps of them, those past the width unused.
template <class T, int kVec, int kTaps>
struct Taps {
  float at[kTaps][kVec];
  float bias[kVec];

  __device__ Taps(const CausalConvParams& p, int64_t channel) {
    const T* weight = static_cast<const T*>(p.weight) + channel * p.width;
    const T* biases = static_cast<const T*>(p.bias);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      bias[v] = biases ? static_cast<float>(biases[channel + v]) : 0.0f;
#pragma unroll
      for (int i = 0; i < kTaps; ++i) {
        at[i][v] = i < p.width ? static_cast<float>(weight[v * p.width + p.width - 1 - i]) : 0.0f;
      }
    }
  }
};

// An entry of a state [num_documents, channels, width - 1] for the row `back` rows before a document's first.
__device__ __forceinline__ int64_t state_at(const CausalConvParams& p, int64_t document, int64_t channel, int back) {
  return (document * p.channels + channel) * (p.width - 1) + p.width - 1 - back;
}

// Whether `count` rows from `places` on are of one document, each with rows for all of kTaps taps.
template <int kTaps>
__device__ __forceinline__ bool are_inside(const CausalConvParams& p, const Place* places, int count) {
  const int document = places[0].document;
  return p.width == kTaps && places[0].before >= kTaps - 1 && document == places[count - 1].document &&
         document < p.documents.num_documents;
}

// The sums of a row before the activation, oldest term first. rows[i] is the row i + 1 before `x`, whatever document it
// is of; terms before the row's document are from the initial state, or are left out. kInside: no term
// does, and all taps are used.
template <bool kInside, class T, int kVec, int kTaps>
__device__ __forceinline__ void sum_row(const CausalConvParams& p, const Taps<T, kVec, kTaps>& taps, const Place& place,
                                        int64_t channel, const float (&x)[kVec], const float (&rows)[kTaps - 1][kVec],
                                        float (&sum)[kVec]) {
  const int width = static_cast<int>(p.width);
#pragma unroll
  for (int v = 0; v < kVec; ++v) sum[v] = taps.bias[v];
#pragma unroll
  for (int i = kTaps - 1; i > 0; --i) {
    if (!kInside && i >= width) continue;
    if (kInside || i <= place.before) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) sum[v] += taps.at[i][v] * rows[i - 1][v];
    } else if (p.initial_state && place.document < p.documents.num_documents) {  // not after the last document
      const T* state = static_cast<const T*>(p.initial_state);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        sum[v] += taps.at[i][v] * static_cast<float>(state[state_at(p, place.document, channel + v, i - place.before)]);
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kVec; ++v) sum[v] += taps.at[0][v] * x[v];
}

template <int kRows, int kVec>
__device__ __forceinline__ void push(const float (&x)[kVec], float (&rows)[kRows][kVec]) {
#pragma unroll
  for (int i = kRows - 1; i > 0; --i) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) rows[i][v] = rows[i - 1][v];
  }
#pragma unroll
  for (int v = 0; v < kVec; ++v) rows[0][v] = x[v];
}

template <class T, int kVec>
__device__ __forceinline__ void unpack_row(const Vec<T, kVec>& from, float (&to)[kVec]) {
#pragma unroll
  for (int v = 0; v < kVec; ++v) to[v] = from.get(v);
}

// Whether 16 bytes of a row can be moved at once: `row` elements apart, from `data` on.
inline bool has_vectors(const void* data, int64_t row, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row * bytes % 16 == 0;
}

// call(T{}, channels of a thread, taps) as constants. kBytes: of a thread's channels; half as many for more taps, which
// would not fit into registers.
template <int kBytes, class Call>
void dispatch_conv(const CausalConvParams& p, bool vectors, const Call& call) {
  const auto with_vec = [&](auto zero, auto taps) {
    constexpr int kVec = (taps > 4 ? kBytes / 2 : kBytes) / sizeof(zero);
    if (vectors) return call(zero, std::integral_constant<int, kVec>{}, taps);
    return call(zero, std::integral_constant<int, 1>{}, taps);
  };
  const auto with_taps = [&](auto zero) {
    if (p.width == 3) return with_vec(zero, std::integral_constant<int, 3>{});
    if (p.width <= 4) return with_vec(zero, std::integral_constant<int, 4>{});
    return with_vec(zero, std::integral_constant<int, 8>{});
  };
  if (p.dtype == DType::kBFloat16) return with_taps(__nv_bfloat16{});
  if (p.dtype == DType::kFloat16) return with_taps(__half{});
  with_taps(float{});
}

}  // namespace packing_ops::conv
