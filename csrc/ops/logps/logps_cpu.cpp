// The specification: row by row, in pieces of kPiece logits converted to the accumulation type.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "host/fast_exp.h"
#include "host/parallel.h"
#include "host/scalar.h"
#include "ops/logps/logps.h"

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

  // The same sums relative to a larger max. Columns that are all -inf add nothing.
  Sums with_max(Real larger) const {
    if (max == larger || sum == Real(0)) return {larger, sum, weighted};
    const Real scale = std::exp(max - larger);
    return {larger, scale * sum, scale == Real(0) ? Real(0) : scale * (weighted + (max - larger) * sum)};
  }
  Sums operator+(const Sums& other) const {
    const Real larger = max > other.max ? max : other.max;
    const Sums a = with_max(larger);
    const Sums b = other.with_max(larger);
    return {larger, a.sum + b.sum, a.weighted + b.weighted};
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

template <class Real>
PACKING_OPS_INLINE void scale_logits(const Real* bias, Real inv_temperature, int64_t count, Real* z) {
  if (bias) {
    for (int64_t j = 0; j < count; ++j) z[j] += bias[j];
  }
  for (int64_t j = 0; j < count; ++j) z[j] *= inv_temperature;
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

// z and scratch hold bit_ceil(count) values; both are overwritten.
template <bool kEntropy, class Real>
PACKING_OPS_INLINE Sums<Real> sums_of(Real* __restrict z, int64_t count, Real* __restrict scratch) {
  const auto sum = [](Real a, Real b) { return a + b; };
  const auto size = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(count)));
  std::fill(z + count, z + size, -kInfinity<Real>);                                                   // weighs nothing
  for (int64_t j = 0; j < size; ++j) scratch[j] = z[j] > -kInfinity<Real> ? z[j] : -kInfinity<Real>;  // no NaN
  Sums<Real> sums;
  sums.max = fold(scratch, size, [](Real a, Real b) { return a > b ? a : b; });
  const Real shift = sums.max == -kInfinity<Real> ? Real(0) : sums.max;
  for (int64_t j = 0; j < size; ++j) z[j] -= shift;
  fast_exp(z, size, scratch);
  if constexpr (kEntropy) {
    for (int64_t j = 0; j < size; ++j) z[j] = scratch[j] == Real(0) ? Real(0) : scratch[j] * z[j];
    sums.weighted = fold(z, size, sum);
  }
  sums.sum = fold(scratch, size, sum);
  return sums;
}

template <bool kEntropy, class Real>
PACKING_OPS_MULTIVERSION void sum_rows(const LogpsChunkParams& p, const Logits<Real>& piece, int64_t begin,
                                       int64_t end) {
  alignas(64) Real z[kPiece];
  alignas(64) Real scratch[kPiece];
  const Real inv_temperature = static_cast<Real>(p.inv_temperature);
  for (int64_t row = begin; row < end; ++row) {
    if (p.targets[row] < 0) continue;
    Sums<Real> sums{static_cast<Real*>(p.max)[row], static_cast<Real*>(p.sum)[row],
                    kEntropy ? static_cast<Real*>(p.weighted)[row] : Real(0)};
    const int64_t target = p.targets[row] - p.first;
    for (int64_t from = 0; from < p.columns; from += kPiece) {
      const int64_t count = std::min(kPiece, p.columns - from);
      piece.load(p.logits, row * p.row_stride + from, count, z);
      scale_logits(p.bias ? static_cast<const Real*>(p.bias) + from : nullptr, inv_temperature, count, z);
      if (target >= from && target < from + count) static_cast<Real*>(p.chosen)[row] = z[target - from];
      sums = sums + sums_of<kEntropy>(z, count, scratch);
    }
    static_cast<Real*>(p.max)[row] = sums.max;
    static_cast<Real*>(p.sum)[row] = sums.sum;
    if constexpr (kEntropy) static_cast<Real*>(p.weighted)[row] = sums.weighted;
  }
}

// With P = exp(z - lse), the entropy H, and chosen 1 at the target, else 0:
// d(z) = grad_logps * (chosen - P) - grad_entropy * P * (log P + H).
template <class Real>
PACKING_OPS_MULTIVERSION void grad_rows(const LogpsChunkParams& p, const Logits<Real>& piece, int64_t begin,
                                        int64_t end) {
  alignas(64) Real z[kPiece];
  alignas(64) Real weights[kPiece];
  const bool entropy = p.grad_entropy;
  const Real inv_temperature = static_cast<Real>(p.inv_temperature);
  for (int64_t row = begin; row < end; ++row) {
    const Real grad = static_cast<const Real*>(p.grad_logps)[row];
    const Real grad_entropy = entropy ? static_cast<const Real*>(p.grad_entropy)[row] : Real(0);
    const bool zero = p.targets[row] < 0 || (grad == Real(0) && grad_entropy == Real(0));
    const Real lse = static_cast<const Real*>(p.lse)[row];
    const Real plain = entropy ? grad + grad_entropy * static_cast<const Real*>(p.entropy)[row] : grad;
    const int64_t target = p.targets[row] - p.first;
    for (int64_t from = 0; from < p.columns; from += kPiece) {
      const int64_t count = std::min(kPiece, p.columns - from);
      const int64_t first = row * p.row_stride + from;
      if (zero) {
        std::fill(z, z + count, Real(0));
        piece.store(z, Real(1), first, count, p.logits);
        continue;
      }
      piece.load(p.logits, first, count, z);
      scale_logits(p.bias ? static_cast<const Real*>(p.bias) + from : nullptr, inv_temperature, count, z);
      for (int64_t j = 0; j < count; ++j) z[j] -= lse;
      fast_exp(z, count, weights);
      if (entropy) {
        for (int64_t j = 0; j < count; ++j) {
          const Real slope = plain + grad_entropy * z[j];
          z[j] = weights[j] == Real(0) ? Real(0) : -weights[j] * slope;
        }
      } else {
        for (int64_t j = 0; j < count; ++j) z[j] = -weights[j] * plain;
      }
      if (target >= from && target < from + count) z[target - from] += grad;
      piece.store(z, inv_temperature, first, count, p.logits);
    }
  }
}

template <class Rows>
void for_rows(const LogpsChunkParams& p, const Rows& rows) {
  parallel_for(0, p.rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, p.columns)), rows);
}

}  // namespace

void launch_logps_targets_cpu(const LogpsTargetsParams& p) {
  std::fill(p.targets, p.targets + p.documents.total, -1);
  for (int64_t i = 0; i < p.documents.num_documents; ++i) {
    const Interval<int64_t> s = p.documents[i];
    for (int64_t t = s.begin; t + 1 < s.end; ++t) {
      const int64_t label = p.labels[t + 1];
      if (label == p.ignore_index) continue;
      check(label >= 0 && label < p.vocab, "labels: expected 0 to ", p.vocab - 1, " or ignore_index=", p.ignore_index,
            ", got ", label, " at index ", t + 1);
      p.targets[t] = static_cast<int32_t>(label);
    }
  }
}

void launch_logps_chunk_cpu(const LogpsChunkParams& p) {
  dispatch_float(p.dtype, [&](auto element) {
    const auto piece = logits_of<decltype(element)>();
    for_rows(p, [&](int64_t begin, int64_t end) {
      p.weighted ? sum_rows<true>(p, piece, begin, end) : sum_rows<false>(p, piece, begin, end);
    });
  });
}

void launch_logps_chunk_backward_cpu(const LogpsChunkParams& p) {
  dispatch_float(p.dtype, [&](auto element) {
    const auto piece = logits_of<decltype(element)>();
    for_rows(p, [&](int64_t begin, int64_t end) { grad_rows(p, piece, begin, end); });
  });
}

}  // namespace packing_ops
