// The arithmetic of a softmax that goes over columns in parts, and where its vectors lie in a row.
#pragma once

#include "core/accumulate.h"
#include "core/documents.cuh"
#include "core/ptx/mma.cuh"
#include "core/vec.cuh"

namespace packing_ops {

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
// weighted, the sum of power_of(e) * e, and squares, that of power_of(e)^2. total: of z; top1: entry of the first max.
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

}  // namespace packing_ops
