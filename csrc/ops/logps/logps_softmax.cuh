// The arithmetic of a softmax that goes over columns in parts, and where its vectors are in a row. One block has one
// row; the order of its sums depends only on the columns, not on how many there are next to them, nor on their
// alignment.
#pragma once

#include "core/accumulate.h"
#include "core/documents.cuh"
#include "core/launch.cuh"
#include "core/ptx/mma.cuh"
#include "core/vec.cuh"

namespace packing_ops {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kUnroll = 4;  // vectors in flight per thread, in backward
// Columns of one sum, as in logps_cpu.cpp. Sums of a row are added one by one in their order: chunks that begin at a
// multiple of kGrain give equal bits.
constexpr int kGrain = 1024;
constexpr int kHeld = 64;  // sums of a row that wait in shared memory

// Half types: powers of 2 by the approximate instruction, whose error is far below their rounding; else powers of e.
template <class T>
constexpr bool kBinary = sizeof(T) == 2;

// Exponents to base e times this are exponents to the base that power_of takes.
template <class T>
constexpr accumulate_t<T> kLogE = kBinary<T> ? 1.4426950408889634 : 1;

template <class T>
__device__ accumulate_t<T> power_of(accumulate_t<T> exponent) {
  if constexpr (kBinary<T>) {
    return ptx::exp2_approx(exponent);
  } else if constexpr (sizeof(T) == 4) {
    return expf(exponent);
  } else {
    return exp(exponent);
  }
}

template <class Real>
__device__ constexpr Real infinity() {
  return static_cast<Real>(__builtin_huge_val());
}

// To the precision of T.
template <class T>
__device__ accumulate_t<T> tanh_of(accumulate_t<T> x) {
  if constexpr (kBinary<T>) {
    return 1.0f - __fdividef(2.0f, 1.0f + ptx::exp2_approx(2.0f * kLogE<T> * x));
  } else {
    return tanh(x);
  }
}

// Online softmax, the statistics of some columns of a row. With exponents e = factor * (z - max): sum of power_of(e),
// weighted, the sum of power_of(e) * e, and squares, the sum of power_of(e)^2. total: of z; top1: entry of the first
// max.
template <class T>
struct Sums {
  using Real = accumulate_t<T>;
  Real max, sum, weighted, squares, total, top1;

  // The same sums over a larger max. Columns that are all -inf weigh nothing.
  __device__ Sums with_max(Real larger, Real factor) const {
    if (max == larger || sum == Real(0)) return {larger, sum, weighted, squares, total, top1};
    const Real below = (max - larger) * factor;
    const Real scale = power_of<T>(below);
    return {larger, scale * sum, scale == Real(0) ? Real(0) : scale * (weighted + below * sum), scale * scale * squares,
            total,  top1};
  }
  template <bool kMore>
  __device__ void add(Real exponent) {
    const Real weight = power_of<T>(exponent);
    sum += weight;
    if (!kMore) return;
    weighted += weight == Real(0) ? Real(0) : weight * exponent;
    squares += weight * weight;
  }
  __device__ Sums plus(const Sums& other, Real factor) const {
    const Real larger = max > other.max ? max : other.max;
    const Sums a = with_max(larger, factor);
    const Sums b = other.with_max(larger, factor);
    return {larger,
            a.sum + b.sum,
            a.weighted + b.weighted,
            a.squares + b.squares,
            a.total + b.total,
            other.max > max ? other.top1 : top1};
  }
};

__device__ inline float max_of(float a, float b) {
  return fmaxf(a, b);
}
__device__ inline double max_of(double a, double b) {
  return fmax(a, b);
}

// Where the vectors of a row begin and end; the few elements before and after them go one by one.
template <class T>
struct Row {
  static constexpr int kVec = 16 / sizeof(T);
  using Vector = Vec<T, kVec>;
  int before, vectors, columns;

  __device__ Row(const T* row, int columns) : columns(columns) {
    const int apart = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    before = apart == 0 ? 0 : kVec - apart;
    if (before > columns) before = columns;
    vectors = (columns - before) / kVec;
  }
  // The column of the i-th element outside of the vectors.
  __device__ int single(int i) const { return i < before ? i : i + vectors * kVec; }
  __device__ int singles() const { return columns - vectors * kVec; }
  __device__ int column(int vector) const { return before + vector * kVec; }
};

__device__ inline bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0;
}

// Whether vectors of 16 bytes that are aligned in one are so in the other.
__device__ inline bool same_alignment(const void* a, const void* b) {
  return is_aligned(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(a) ^ reinterpret_cast<uintptr_t>(b)));
}

// values += bias, read in vectors of up to 16 bytes, to which it is aligned.
template <class Real, int kCount>
__device__ void add_bias(const Real* bias, Real (&values)[kCount]) {
  constexpr int kMost = 16 / sizeof(Real);
  constexpr int kVec = kCount < kMost ? kCount : kMost;
#pragma unroll
  for (int i = 0; i < kCount; i += kVec) {
    const auto loaded = *reinterpret_cast<const Vec<Real, kVec>*>(bias + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) values[i + j] += loaded.get(j);
  }
}

// What scaling.alter makes of one logit.
template <class Scaling, class Real>
__device__ Real altered(const Scaling& scaling, Real logit, int column) {
  Real one[1] = {logit};
  scaling.alter(one, column);
  return one[0];
}

// Vectors of kGrain columns that one lane of a warp loads.
template <class T>
constexpr int kGrainVectors = kGrain / (kWarp * Row<T>::kVec);

template <class T>
using Grain = accumulate_t<T>[kGrainVectors<T>][Row<T>::kVec];

// Lane by lane the values of kGrain columns from first on, and their sum. Scaling::alter(values, column): adds the
// bias to a vector of logits. Scaling::allowed<n>(column): a bit for each of n columns, the first one lowest; -inf
// where it is 0. Which lane has which columns does not depend on their alignment.
template <class T, bool kMore, class Scaling>
__device__ accumulate_t<T> load_grain(const T* logits, int first, int columns, const Scaling& scaling,
                                      Grain<T>& values) {
  using Real = accumulate_t<T>;
  using Vector = typename Row<T>::Vector;
  constexpr int kVec = Row<T>::kVec;
  constexpr int kVectors = kGrainVectors<T>;
  const int begin = first + static_cast<int>(threadIdx.x) % kWarp * kVec;
  Real total = 0;
  if (first + kGrain <= columns && is_aligned(logits) && is_aligned(scaling.bias)) {
    Vector loaded[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      loaded[u] = *reinterpret_cast<const Vector*>(logits + begin + u * kWarp * kVec);
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int column = begin + u * kWarp * kVec;
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[u][i] = loaded[u].get(i);
      scaling.alter(values[u], column);
      const uint32_t allowed = scaling.template allowed<kVec>(column);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if ((allowed >> i & 1) == 0) values[u][i] = -infinity<Real>();
        if (kMore) total += values[u][i];
      }
    }
  } else {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int column = begin + u * kWarp * kVec + i;
        const bool inside = column < columns;
        const bool counts = inside && (scaling.template allowed<1>(column) & 1) != 0;
        values[u][i] = counts ? altered(scaling, static_cast<Real>(logits[column]), column) : -infinity<Real>();
        if (kMore && inside) total += values[u][i];
      }
    }
  }
  return total;
}

template <class T>
__device__ accumulate_t<T> max_of_grain(const Grain<T>& values) {
  accumulate_t<T> max = -infinity<accumulate_t<T>>();
#pragma unroll
  for (int u = 0; u < kGrainVectors<T>; ++u) {
#pragma unroll
    for (int i = 0; i < Row<T>::kVec; ++i) max = max_of(max, values[u][i]);
  }
  return max;
}

// The statistics of kGrain columns from first on, by one warp; the same in each lane. top1 is a column.
template <class T, bool kMore, class Scaling>
__device__ Sums<T> sums_of_grain(const T* logits, int first, int columns, const Scaling& scaling,
                                 accumulate_t<T> factor) {
  using Real = accumulate_t<T>;
  constexpr int kVec = Row<T>::kVec;
  constexpr int kVectors = kGrainVectors<T>;
  Grain<T> values;
  Sums<T> sums{-infinity<Real>(), 0, 0, 0, 0, 0};
  sums.total = load_grain<T, kMore>(logits, first, columns, scaling, values);
  sums.max = max_of_grain<T>(values);
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sums.max = max_of(sums.max, __shfl_xor_sync(0xffffffffu, sums.max, offset));
  }
  const Real shift = sums.max == -infinity<Real>() ? Real(0) : sums.max;
  int top1 = columns;
#pragma unroll
  for (int u = kVectors - 1; u >= 0; --u) {
#pragma unroll
    for (int i = kVec - 1; i >= 0; --i) {
      const int column = first + (u * kWarp + static_cast<int>(threadIdx.x) % kWarp) * kVec + i;
      if (kMore && values[u][i] == sums.max) top1 = column;
    }
  }
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) sums.template add<kMore>((values[u][i] - shift) * factor);
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sums.sum += __shfl_xor_sync(0xffffffffu, sums.sum, offset);
    if (!kMore) continue;
    sums.weighted += __shfl_xor_sync(0xffffffffu, sums.weighted, offset);
    sums.squares += __shfl_xor_sync(0xffffffffu, sums.squares, offset);
    sums.total += __shfl_xor_sync(0xffffffffu, sums.total, offset);
    top1 = min(top1, __shfl_xor_sync(0xffffffffu, top1, offset));
  }
  sums.top1 = static_cast<Real>(top1);
  return sums;
}

template <class T, int kVec>
__device__ void set_zero(Vec<T, kVec>& vector) {
  vector = {};
}

// f(element type) for a floating dtype.
template <class F>
void dispatch_logits(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat64:
      return f(double{});
    case DType::kBFloat16:
      return f(__nv_bfloat16{});
    case DType::kFloat16:
      return f(__half{});
    default:
      return f(float{});
  }
}

}  // namespace packing_ops
