// What the CPU kernels of this family share: rows of logits in pieces of the accumulation type, and the sums of an
// online softmax.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "host/fast_exp.h"
#include "host/parallel.h"
#include "host/scalar.h"

namespace packing_ops {

namespace {

constexpr int64_t kGrain = 16384;  // logits per thread below which another thread does not pay
constexpr int64_t kPiece = 1024;   // a power of two

template <class Real>
constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

// Online softmax: the statistics of some columns of a row.
template <class Real>
struct Sums {
  Real max = -kInfinity<Real>;
  Real sum = 0;       // of exp(z - max)
  Real weighted = 0;  // of exp(z - max) * (z - max)
  Real squares = 0;   // of exp(2 * (z - max))
  Real total = 0;     // of z
  Real top1 = -1;     // entry of the first z that is max

  // The same sums relative to a larger max. Columns that are all -inf add nothing.
  Sums with_max(Real larger) const {
    if (max == larger || sum == Real(0)) return {larger, sum, weighted, squares, total, top1};
    const Real scale = std::exp(max - larger);
    return {larger,
            scale * sum,
            scale == Real(0) ? Real(0) : scale * (weighted + (max - larger) * sum),
            scale * scale * squares,
            total,
            top1};
  }
  Sums operator+(const Sums& other) const {
    const Real larger = max > other.max ? max : other.max;
    const Sums a = with_max(larger);
    const Sums b = other.with_max(larger);
    return {larger,
            a.sum + b.sum,
            a.weighted + b.weighted,
            a.squares + b.squares,
            a.total + b.total,
            other.max > max ? other.top1 : top1};
  }
};

// A piece of a row and the accumulation type: all that knows the dtype of the logits, so that there is one copy of the
// arithmetic for all of them.
template <class T>
PACKING_OPS_MULTIVERSION void load_piece(const void* logits, int64_t first, int64_t count, accumulate_t<T>* z) {
  const T* from = static_cast<const T*>(logits) + first;
  for (int64_t j = 0; j < count; ++j) z[j] = static_cast<accumulate_t<T>>(from[j]);
}

template <class T>
PACKING_OPS_MULTIVERSION void store_piece(const accumulate_t<T>* z, accumulate_t<T> factor, int64_t first,
                                          int64_t count, void* logits) {
  T* to = static_cast<T*>(logits) + first;
  for (int64_t j = 0; j < count; ++j) to[j] = static_cast<T>(z[j] * factor);
}

template <class Real>
struct Logits {
  void (*load)(const void*, int64_t, int64_t, Real*);
  void (*store)(const Real*, Real, int64_t, int64_t, void*);
};

template <class T>
Logits<accumulate_t<T>> logits_of() {
  return {load_piece<T>, store_piece<T>};
}

// Tree reduction of 2^n values in place: the second half is folded into the first, in whole vectors.
template <class Real, class Operation>
PACKING_OPS_INLINE Real fold(Real* values, int64_t size, const Operation& operation) {
  for (int64_t half = size / 2; half > 0; half /= 2) {
    const Real* second = values + half;
    for (int64_t j = 0; j < half; ++j) values[j] = operation(values[j], second[j]);
  }
  return values[0];
}

// z and scratch hold bit_ceil(count) values; both are overwritten. The first of them is entry `first`.
template <bool kMore, class Real>
PACKING_OPS_INLINE Sums<Real> sums_of(Real* __restrict z, int64_t count, Real* __restrict scratch, int64_t first) {
  const auto sum = [](Real a, Real b) { return a + b; };
  const auto size = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(count)));
  Sums<Real> sums;
  if constexpr (kMore) {
    std::copy(z, z + count, scratch);
    std::fill(scratch + count, scratch + size, Real(0));
    sums.total = fold(scratch, size, sum);
  }
  std::fill(z + count, z + size, -kInfinity<Real>);                                                   // weighs nothing
  for (int64_t j = 0; j < size; ++j) scratch[j] = z[j] > -kInfinity<Real> ? z[j] : -kInfinity<Real>;  // no NaN
  sums.max = fold(scratch, size, [](Real a, Real b) { return a > b ? a : b; });
  if constexpr (kMore) {
    const Real* found = std::find(z, z + count, sums.max);
    if (found != z + count) sums.top1 = static_cast<Real>(first + (found - z));
  }
  const Real shift = sums.max == -kInfinity<Real> ? Real(0) : sums.max;
  for (int64_t j = 0; j < size; ++j) z[j] -= shift;
  fast_exp(z, size, scratch);
  if constexpr (kMore) {
    for (int64_t j = 0; j < size; ++j) z[j] = scratch[j] == Real(0) ? Real(0) : scratch[j] * z[j];
    sums.weighted = fold(z, size, sum);
    for (int64_t j = 0; j < size; ++j) z[j] = scratch[j] * scratch[j];
    sums.squares = fold(z, size, sum);
  }
  sums.sum = fold(scratch, size, sum);
  return sums;
}

// part(begin, end) for parts of the rows.
template <class Rows>
void for_rows(int64_t rows, int64_t columns, const Rows& part) {
  parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns)), part);
}

}  // namespace

}  // namespace packing_ops
