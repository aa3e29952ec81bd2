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

constexpr int kGroup = 4;  // rows that are computed together

// A block's run of rows and its thread's channels. Neighbouring blocks have neighbouring channels of the same rows, so
// that whole rows are in flight. A thread past the last channel must neither load nor store.
struct Tile {
  int64_t index, channel;
  bool exists;

  __device__ Tile(int64_t channels, int of_block, int vec) {
    const int64_t parts = (channels + of_block - 1) / of_block;
    index = blockIdx.x / parts;
    channel = blockIdx.x % parts * of_block + threadIdx.x * vec;
    exists = channel < channels;
  }
};

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

// A thread's channels of successive rows on their way into shared memory, kStages groups of them at once: they take no
// registers. Every group ends with a commit.
template <class T, int kVec, int kThreads, int kStages>
class RowRing {
 public:
  static constexpr int kBytes = kStages * kGroup * kThreads * sizeof(Vec<T, kVec>);  // of the block's memory

  __device__ RowRing(const void* rows, int64_t row, int64_t first, int64_t channel, int count, uint8_t* memory)
      : next_(static_cast<const T*>(rows) + first * row + channel),
        row_(row),
        slots_(reinterpret_cast<Vec<T, kVec>*>(memory) + threadIdx.x),
        left_(count) {}

  // Row i of the oldest group, which has arrived.
  __device__ __forceinline__ const Vec<T, kVec>& operator[](int i) const {
    return slots_[(stage_ * kGroup + i) * kThreads];
  }

  // Loads the next group in place of the oldest, as far as rows are left.
  __device__ __forceinline__ void start() {
    if (left_ >= kGroup) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) start_row(i);
    } else {
#pragma unroll 1
      for (int i = 0; i < left_; ++i) start_row(i);
    }
    ptx::cp_async_commit();
    left_ -= kGroup;
    stage_ = stage_ + 1 < kStages ? stage_ + 1 : 0;
  }

 private:
  __device__ __forceinline__ void start_row(int i) {
    Vec<T, kVec>* const to = slots_ + (stage_ * kGroup + i) * kThreads;
    if constexpr (sizeof(*to) == 8) ptx::cp_async_8(ptx::shared_address(to), next_, true);
    if constexpr (sizeof(*to) == 4) ptx::cp_async_4(ptx::shared_address(to), next_, true);
    if constexpr (sizeof(*to) == 2) *to = *reinterpret_cast<const Vec<T, kVec>*>(next_);
    next_ += row_;
  }

  const T* next_;
  int64_t row_;
  Vec<T, kVec>* slots_;
  int left_;
  int stage_ = 0;
};

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
    // A channel's taps in one load, where they are so many and begin at a multiple of their bytes.
    constexpr int kAtOnce = kTaps * sizeof(T) <= 16 && kTaps % 2 == 0 ? kTaps : 1;
    using Several = Vec<T, kAtOnce>;
    const bool at_once = p.width == kAtOnce && reinterpret_cast<uintptr_t>(weight) % sizeof(Several) == 0;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      bias[v] = biases ? static_cast<float>(biases[channel + v]) : 0.0f;
      if (at_once) {
        const Several several = reinterpret_cast<const Several*>(weight)[v];
#pragma unroll
        for (int i = 0; i < kTaps; ++i) at[i][v] = i < kAtOnce ? several.get(kAtOnce - 1 - i) : 0.0f;
        continue;
      }
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

// rows[i]: the row i + 1 before `first`, zeros before the first row of all.
template <class T, int kVec, int kTaps>
__device__ __forceinline__ void load_rows_before(const CausalConvParams& p, int64_t first, int64_t channel,
                                                 float (&rows)[kTaps - 1][kVec]) {
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) {
    Vec<T, kVec> x{};
    if (i + 1 < p.width && i < first) {
      x = *reinterpret_cast<const Vec<T, kVec>*>(static_cast<const T*>(p.x) + (first - 1 - i) * p.x_row + channel);
    }
    unpack_row(x, rows[i]);
  }
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
