// Device side of segment.h: walking the slots or the documents of a packed row.
#pragma once

#include "core/fault.h"
#include "core/segment.h"

namespace packing_ops {

constexpr int kWarp = 32;

// The grid checks cu_seqlens together, each entry once; it costs no launch of its own.
__device__ inline void flag_cu_seqlens(const Documents& documents, const FaultFlag& fault) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i <= documents.num_documents;
       i += step) {
    const int32_t value = documents.cu_seqlens[i];
    if (i == 0 && value != 0) fault.raise(Fault::kCuSeqlensStart, 0);
    if (i > 0 && value < documents.cu_seqlens[i - 1]) fault.raise(Fault::kCuSeqlensOrder, i);
    if (value > documents.total) fault.raise(Fault::kCuSeqlensTotal, i);
  }
}

// Documents::document_of by a whole warp: 32 probes a step, so 100k documents take four loads instead of seventeen.
__device__ inline int64_t document_of_by_warp(const Documents& documents, int64_t t) {
  const int lane = threadIdx.x % kWarp;
  int64_t low = 0;
  int64_t high = documents.num_documents + 1;
  while (high - low > 1) {
    const int64_t step = (high - low + kWarp - 1) / kWarp;
    const int64_t probe = low + lane * step;
    const bool at_or_before = probe < high && documents.cu_seqlens[probe] <= t;
    const unsigned before = __ballot_sync(0xffffffffu, at_or_before);
    const int last = before == 0 ? 0 : 31 - __clz(static_cast<int>(before));
    const int64_t found = low + last * step;
    high = found + step < high ? found + step : high;
    low = found;
  }
  return low;
}

// Documents::document_of within [first, last], where the slot is known to lie.
__device__ inline int64_t document_between(const Documents& documents, int64_t t, int64_t first, int64_t last) {
  while (first < last) {
    const int64_t mid = (first + last + 1) / 2;
    if (documents.cu_seqlens[mid] <= t) {
      first = mid;
    } else {
      last = mid - 1;
    }
  }
  return first;
}

// The segment of a document index, the padding after the last document included.
__device__ inline Segment segment_at(const Documents& documents, int64_t i) {
  return i == documents.num_documents ? Segment{documents.end(), documents.total} : documents[i];
}

// value(t, document, segment) for every slot, stored to out. Two neighbouring slots a thread, so that int64 goes out in
// 16-byte stores; the two ends of a block's tile are searched by a warp each, every slot only between them.
template <int kThreads, int kPairs, class Out, class Value>
__device__ void fill_slots(const Documents& documents, Out* out, const Value& value) {
  struct alignas(2 * sizeof(Out)) Pair {
    Out first, second;
  };
  constexpr int64_t kTile = int64_t{2} * kThreads * kPairs;
  __shared__ int64_t ends[2];
  for (int64_t base = blockIdx.x * kTile; base < documents.total; base += gridDim.x * kTile) {
    const int64_t tile_end = base + kTile < documents.total ? base + kTile : documents.total;
    const int warp = threadIdx.x / kWarp;
    if (warp < 2) {
      const int64_t found = document_of_by_warp(documents, warp == 0 ? base : tile_end - 1);
      if (threadIdx.x % kWarp == 0) ends[warp] = found;
    }
    __syncthreads();
    const int64_t first = ends[0];
    const int64_t last = ends[1] < first ? first : ends[1];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int64_t t = base + 2 * (threadIdx.x + int64_t{i} * kThreads);
      if (t >= tile_end) break;
      int64_t document = document_between(documents, t, first, last);
      Segment segment = segment_at(documents, document);
      const Out here = value(t, document, segment);
      if (t + 1 >= tile_end) {
        out[t] = here;
        break;
      }
      if (t + 1 >= segment.end) {
        document = document_between(documents, t + 1, document, last);
        segment = segment_at(documents, document);
      }
      *reinterpret_cast<Pair*>(out + t) = Pair{here, value(t + 1, document, segment)};
    }
    __syncthreads();
  }
}

// The threads that share one document, and how they add. The order depends on the group's size alone.
struct WarpGroup {
  static constexpr int kSize = kWarp;
  int rank;

  template <class T>
  __device__ T sum(T value) const {
    for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
  }
};

template <int kThreads>
struct BlockGroup {
  static constexpr int kSize = kThreads;
  int rank;

  template <class T>
  __device__ T sum(T value) const {
    __shared__ T of_warp[kThreads / kWarp];
    value = WarpGroup{rank % kWarp}.sum(value);
    __syncthreads();
    if (rank % kWarp == 0) of_warp[rank / kWarp] = value;
    __syncthreads();
    T total = of_warp[0];
    for (int i = 1; i < kThreads / kWarp; ++i) total += of_warp[i];
    return total;
  }
};

// body(i, segment, group) for i in [0, count): a warp for a short document, the whole block for a long one. Which of
// the two depends on the document's own length alone.
template <int kThreads, class Body>
__device__ void for_each_document(const Documents& documents, int64_t count, const Body& body) {
  constexpr int kWarps = kThreads / kWarp;
  constexpr int64_t kLong = 4096;
  for (int64_t base = int64_t{blockIdx.x} * kWarps; base < count; base += int64_t{gridDim.x} * kWarps) {
    const int64_t own = base + threadIdx.x / kWarp;
    if (own < count) {
      const Segment segment = segment_at(documents, own);
      if (segment.end - segment.start <= kLong) body(own, segment, WarpGroup{static_cast<int>(threadIdx.x % kWarp)});
    }
    for (int64_t i = base; i < base + kWarps && i < count; ++i) {
      const Segment segment = segment_at(documents, i);
      if (segment.end - segment.start > kLong) body(i, segment, BlockGroup<kThreads>{static_cast<int>(threadIdx.x)});
    }
  }
}

}  // namespace packing_ops
