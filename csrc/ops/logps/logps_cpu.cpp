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

// f(logit + bias) in place of each logit.
template <class Real>
PACKING_OPS_INLINE void bound_logits(const LogpsChunkParams& p, int64_t from, int64_t count, Real* __restrict z,
                                     Real* __restrict scratch) {
  if (p.bias) {
    const Real* bias = static_cast<const Real*>(p.bias) + from;
    for (int64_t j = 0; j < count; ++j) z[j] += bias[j];
  }
  if (p.inner == 0) return;
  const Real twice = static_cast<Real>(2 * p.inner);
  for (int64_t j = 0; j < count; ++j) z[j] = twice * z[j] > Real(80) ? Real(80) : twice * z[j];  // tanh is 1 there
  fast_exp(z, count, scratch);
  for (int64_t j = 0; j < count; ++j) z[j] = Real(1) - Real(2) / (Real(1) + scratch[j]);
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

template <bool kMore, class Real>
PACKING_OPS_MULTIVERSION void sum_rows(const LogpsChunkParams& p, const Logits<Real>& piece, int64_t begin,
                                       int64_t end) {
  alignas(64) Real z[kPiece];
  alignas(64) Real scratch[kPiece];
  const auto at = [](void* rows, int64_t row) -> Real& { return static_cast<Real*>(rows)[row]; };
  for (int64_t row = begin; row < end; ++row) {
    if (p.targets[row] < 0) continue;
    const Real scale = static_cast<const Real*>(p.scales)[row];
    Sums<Real> sums{at(p.max, row), at(p.sum, row)};
    if constexpr (kMore) {
      sums = {sums.max, sums.sum, at(p.weighted, row), at(p.squares, row), at(p.total, row), at(p.top1, row)};
    }
    const int64_t target = p.targets[row] - p.first;
    for (int64_t from = 0; from < p.columns; from += kPiece) {
      const int64_t count = std::min(kPiece, p.columns - from);
      piece.load(p.logits, row * p.row_stride + from, count, z);
      bound_logits(p, from, count, z, scratch);
      for (int64_t j = 0; j < count; ++j) z[j] *= scale;
      if (target >= from && target < from + count) at(p.chosen, row) = z[target - from];
      sums = sums + sums_of<kMore>(z, count, scratch, p.first + from);
    }
    at(p.max, row) = sums.max;
    at(p.sum, row) = sums.sum;
    if constexpr (kMore) {
      at(p.weighted, row) = sums.weighted;
      at(p.squares, row) = sums.squares;
      at(p.total, row) = sums.total;
      at(p.top1, row) = sums.top1;
    }
  }
}

// What the gradient of a row is made of: see LogpsChunkParams.
template <class Real>
struct Slopes {
  Real lse, grad, plain, by_log = 0, by_p = 0, even = 0;

  Slopes(const LogpsChunkParams& p, int64_t row) {
    const auto at = [row](const void* rows) { return static_cast<const Real*>(rows)[row]; };
    lse = at(p.lse);
    grad = at(p.grad);
    plain = at(p.plain);
    if (!p.by_log) return;
    by_log = at(p.by_log);
    by_p = at(p.by_p);
    even = at(p.even);
  }
  bool all_zero() const {
    return grad == Real(0) && plain == Real(0) && by_log == Real(0) && by_p == Real(0) && even == Real(0);
  }
};

// d(z) in place of z.
template <bool kMore, class Real>
PACKING_OPS_INLINE void grad_of_z(const Slopes<Real>& of, int64_t count, Real* __restrict z, Real* __restrict weights) {
  for (int64_t j = 0; j < count; ++j) z[j] -= of.lse;
  fast_exp(z, count, weights);
  for (int64_t j = 0; j < count; ++j) {
    if constexpr (kMore) {
      const Real slope = of.plain + of.by_log * z[j] - of.by_p * weights[j];
      z[j] = (weights[j] == Real(0) ? Real(0) : -weights[j] * slope) + of.even;
    } else {
      z[j] = -weights[j] * of.plain;
    }
  }
}

template <class Real>
PACKING_OPS_MULTIVERSION void grad_rows(const LogpsChunkParams& p, const Logits<Real>& piece, int64_t begin,
                                        int64_t end) {
  alignas(64) Real z[kPiece];
  alignas(64) Real bounded[kPiece];
  alignas(64) Real weights[kPiece];
  const Real inner = static_cast<Real>(p.inner);
  for (int64_t row = begin; row < end; ++row) {
    const Slopes<Real> of(p, row);
    const bool zero = p.targets[row] < 0 || of.all_zero();
    const Real scale = static_cast<const Real*>(p.scales)[row];
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
      bound_logits(p, from, count, z, weights);
      if (inner != Real(0)) std::copy(z, z + count, bounded);
      for (int64_t j = 0; j < count; ++j) z[j] *= scale;
      p.by_log ? grad_of_z<true>(of, count, z, weights) : grad_of_z<false>(of, count, z, weights);
      if (target >= from && target < from + count) z[target - from] += of.grad;
      if (inner != Real(0)) {
        for (int64_t j = 0; j < count; ++j) z[j] *= inner * (Real(1) - bounded[j] * bounded[j]);
      }
      piece.store(z, scale, first, count, p.logits);
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

void launch_logps_rows_cpu(const LogpsRowsParams& p) {
  int64_t count = 0;
  for (int64_t t = 0; t < p.total; ++t) {
    if (p.targets[t] < 0) continue;
    if (count < p.size) p.rows[count] = t;
    ++count;
  }
  check(count <= p.size, "max_targets: expected at least the ", count, " slots with a target, got ", p.size);
  std::fill(p.rows + count, p.rows + p.size, -1);
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
