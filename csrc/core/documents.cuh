// Device side of documents.h: walking the slots or the documents of a packed row.
#pragma once

#include <cstdint>

#include "core/documents.h"
#include "core/fault.h"

namespace packing_ops {

constexpr int kWarp = 32;

// The grid checks cu_seqlens together, each entry once; it costs no extra launch.
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

// The segment of a document index, the padding after the last document included.
__device__ inline Interval<int64_t> segment_at(const Documents& documents, int64_t i) {
  return i == documents.num_documents ? Interval<int64_t>{documents.end(), documents.total} : documents[i];
}

// The documents that a block's tile of slots touches. The whole block searches together: two dependent loads for up to
// 65k documents, and the entries that every slot then needs are in shared memory.
template <int kThreads>
class TileDocuments {
 public:
  __device__ TileDocuments(const Documents& documents, int32_t* window) : documents_(documents), window_(window) {}

  __device__ void find(int first_slot, int last_slot) {
    const int32_t* cu_seqlens = documents_.cu_seqlens;
    const int count = static_cast<int>(documents_.num_documents) + 1;
    int low = 0;
    int range = count;
    while (range > kThreads) {
      const int step = (range + kThreads - 1) / kThreads;
      const int offset = static_cast<int>(threadIdx.x) * step;
      const int before = __syncthreads_count(offset < range && cu_seqlens[low + offset] <= first_slot);
      const int next = low + (before > 0 ? before - 1 : 0) * step;
      range = low + range - next < step ? low + range - next : step;
      low = next;
    }
    for (int i = static_cast<int>(threadIdx.x); i < 2 * kThreads; i += kThreads) {
      window_[i] = low + i < count ? cu_seqlens[low + i] : INT32_MAX;
    }
    const int thread = static_cast<int>(threadIdx.x);
    const int before = __syncthreads_count(thread < range && window_[thread] <= first_slot);
    int inside = __syncthreads_count(window_[thread] <= last_slot);
    inside += __syncthreads_count(window_[thread + kThreads] <= last_slot);
    first_ = low + (before > 0 ? before - 1 : 0);
    last_ = low + inside - 1;
    // A tile of more documents than the window holds reads cu_seqlens itself.
    const bool fits = inside < 2 * kThreads;
    if (!fits) last_ = count - 1;
    if (last_ < first_) last_ = first_;
    entries_ = fits ? window_ - low : cu_seqlens;
  }

  __device__ int document_of(int t) const { return document_from(t, first_); }

  // As document_of, for a slot known not to be before document `first`.
  __device__ int document_from(int t, int first) const {
    int last = last_;
    while (first < last) {
      const int mid = first + (last - first + 1) / 2;
      if (entries_[mid] <= t) {
        first = mid;
      } else {
        last = mid - 1;
      }
    }
    return first;
  }

  // In 32 bits, as cu_seqlens: half the registers and instructions matter in a memory-bound kernel.
  __device__ Interval<int> segment(int i) const {
    const int start = clamp(entries_[i]);
    if (i == documents_.num_documents) return {start, static_cast<int>(documents_.total)};
    const int end = clamp(entries_[i + 1]);
    return {start, end < start ? start : end};
  }

 private:
  __device__ int clamp(int value) const {
    const int total = static_cast<int>(documents_.total);
    return value < 0 ? 0 : (value > total ? total : value);
  }

  const Documents& documents_;
  int32_t* window_;  // shared, [2 * kThreads]
  const int32_t* entries_ = nullptr;
  int first_ = 0;
  int last_ = 0;
};

// out[t] = value(t, input, document, segment) for every slot, where input = value.load(t) is fetched before the search
// for documents. Two neighbouring slots a thread, so that int64 goes out in 16-byte stores.
template <int kThreads, int kPairs, class Out, class Value>
__device__ void fill_slots(const Documents& documents, Out* out, const Value& value) {
  struct alignas(2 * sizeof(Out)) Pair {
    Out first, second;
  };
  constexpr int kTile = 2 * kThreads * kPairs;
  __shared__ int32_t window[2 * kThreads];
  TileDocuments<kThreads> tile(documents, window);
  const int total = static_cast<int>(documents.total);
  for (int64_t start = int64_t{blockIdx.x} * kTile; start < total; start += int64_t{gridDim.x} * kTile) {
    const int base = static_cast<int>(start);
    const int end = total - base > kTile ? base + kTile : total;
    const auto slot = [&](int i) { return base + 2 * static_cast<int>(threadIdx.x + i * kThreads); };
    decltype(value.load(0)) inputs[kPairs][2];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (slot(i) < end) inputs[i][0] = value.load(slot(i));
      if (slot(i) + 1 < end) inputs[i][1] = value.load(slot(i) + 1);
    }
    tile.find(base, end - 1);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int t = slot(i);
      if (t >= end) break;
      int document = tile.document_of(t);
      Interval<int> segment = tile.segment(document);
      const Out here = value(t, inputs[i][0], document, segment);
      if (t + 1 >= end) {
        out[t] = here;
        break;
      }
      if (t + 1 >= segment.end) {
        document = tile.document_from(t + 1, document);
        segment = tile.segment(document);
      }
      *reinterpret_cast<Pair*>(out + t) = Pair{here, value(t + 1, inputs[i][1], document, segment)};
    }
    __syncthreads();
  }
}

// x -> a * x + b: a step of a recurrence, or several in a row.
template <class T>
struct Affine {
  T a;
  T b;

  __device__ T operator()(T x) const { return a * x + b; }
  __device__ Affine then(const Affine& next) const { return {next.a * a, next(b)}; }
};

// The threads that share one document, and how they add. The order depends only on the group's size.
struct WarpGroup {
  static constexpr int kSize = kWarp;
  int rank;

  template <class T>
  __device__ T sum(T value) const {
    for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
  }

  // The threads' steps in the order of their ranks: those before this one's into `before`, all of them into `all`.
  template <class T>
  __device__ void scan(Affine<T> step, Affine<T>& before, Affine<T>& all) const {
    constexpr unsigned kAll = 0xffffffffu;
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const Affine<T> earlier{__shfl_up_sync(kAll, step.a, offset), __shfl_up_sync(kAll, step.b, offset)};
      if (rank >= offset) step = earlier.then(step);
    }
    before = {__shfl_up_sync(kAll, step.a, 1), __shfl_up_sync(kAll, step.b, 1)};
    if (rank == 0) before = {T(1), T(0)};
    all = {__shfl_sync(kAll, step.a, kWarp - 1), __shfl_sync(kAll, step.b, kWarp - 1)};
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

  template <class T>
  __device__ void scan(Affine<T> step, Affine<T>& before, Affine<T>& all) const {
    __shared__ Affine<T> of_warp[kThreads / kWarp];
    Affine<T> warp_steps;
    WarpGroup{rank % kWarp}.scan(step, before, warp_steps);
    __syncthreads();
    if (rank % kWarp == 0) of_warp[rank / kWarp] = warp_steps;
    __syncthreads();
    all = {T(1), T(0)};
    for (int i = 0; i < kThreads / kWarp; ++i) {
      if (i == rank / kWarp) before = all.then(before);
      all = all.then(of_warp[i]);
    }
  }
};

// body(i, segment, group) for i in [0, count): a warp for a short document, the whole block for a long one. Which of
// the two depends only on the document's length. Of the grid's two rows the first takes the short documents, the
// second the long ones, a block each, so that neither waits for the other.
template <int kThreads, class Body>
__device__ void for_each_document(const Documents& documents, int64_t count, const Body& body) {
  constexpr int kWarps = kThreads / kWarp;
  constexpr int64_t kLong = 512;
  if (blockIdx.y == 0) {
    const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
    for (int64_t i = warp; i < count; i += int64_t{gridDim.x} * kWarps) {
      const Interval<int64_t> segment = segment_at(documents, i);
      if (segment.size() <= kLong) body(i, segment, WarpGroup{static_cast<int>(threadIdx.x % kWarp)});
    }
  } else {
    for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
      const Interval<int64_t> segment = segment_at(documents, i);
      if (segment.size() > kLong) body(i, segment, BlockGroup<kThreads>{static_cast<int>(threadIdx.x)});
    }
  }
}

}  // namespace packing_ops
