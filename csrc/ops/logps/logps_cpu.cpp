// The specification: row by row, in pieces of kPiece logits converted to the accumulation type.
#include <cmath>
#include <type_traits>

#include "core/error.h"
#include "ops/logps/logps.h"
#include "ops/logps/logps_softmax.h"

namespace packing_ops {

namespace {

// other in place of the values whose bit is 0; from: the first one's column, a multiple of 32.
template <class Real>
PACKING_OPS_INLINE void mask_values(const LogpsChunkParams& p, int64_t row, int64_t from, int64_t count, Real other,
                                    Real* __restrict z) {
  if (!p.mask) return;
  const uint32_t* words = p.mask + row * ((p.columns + 31) / 32) + from / 32;
  for (int64_t first = 0; first < count; first += 32) {
    const uint32_t word = words[first / 32];
    const int64_t size = std::min<int64_t>(32, count - first);
    if (word == ~0u) continue;
    if (word == 0) {
      std::fill(z + first, z + first + size, other);
      continue;
    }
    for (int64_t j = 0; j < size; ++j) z[first + j] = (word >> j & 1) != 0 ? z[first + j] : other;
  }
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
  const Real inner = static_cast<Real>(p.inner);
  if constexpr (std::is_same_v<Real, double>) {
    for (int64_t j = 0; j < count; ++j) z[j] = std::tanh(inner * z[j]);
    return;
  }
  for (int64_t j = 0; j < count; ++j)
    z[j] = 2 * inner * z[j] > Real(80) ? Real(80) : 2 * inner * z[j];  // tanh is 1 there
  fast_exp(z, count, scratch);
  for (int64_t j = 0; j < count; ++j) {
    // Near 0 the difference of ones loses what a softcap multiplies: tanh's series there.
    const Real x = z[j] / 2, s = x * x;
    const Real series =
        1 + s * (Real(-1.0 / 3) +
                 s * (Real(2.0 / 15) +
                      s * (Real(-17.0 / 315) +
                           s * (Real(62.0 / 2835) + s * (Real(-1382.0 / 155925) + s * Real(21844.0 / 6081075))))));
    z[j] = s < Real(0.16) ? x * series : Real(1) - Real(2) / (Real(1) + scratch[j]);
  }
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
      mask_values(p, row, from, count, -kInfinity<Real>, z);
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
      mask_values(p, row, from, count, Real(0), z);
      piece.store(z, scale, first, count, p.logits);
    }
  }
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

void launch_logps_allowed_cpu(const LogpsAllowedParams& p) {
  for (int64_t i = 0; i < p.size; ++i) {
    const int64_t id = p.ids[i];
    check(id >= 0 && id < p.vocab, "allowed_ids: expected 0 to ", p.vocab - 1, ", got ", id, " at index ", i);
    p.checked_ids[i] = static_cast<int32_t>(id);
  }
  check(p.offsets[0] == 0, "allowed_offsets: expected to start at 0, got ", p.offsets[0]);
  for (int64_t t = 1; t <= p.total; ++t) {
    check(p.offsets[t] >= p.offsets[t - 1], "allowed_offsets: expected never to decrease, got ", p.offsets[t],
          " after ", p.offsets[t - 1], " at index ", t);
  }
  check(p.offsets[p.total] == p.size, "allowed_offsets: expected to end at the ", p.size, " allowed_ids, got ",
        p.offsets[p.total]);
  for (int64_t t = 0; t <= p.total; ++t) p.checked_offsets[t] = p.offsets[std::min(t + p.ahead, p.total)];
  for (int64_t t = 0; t < p.total; ++t) {
    const int32_t* begin = p.checked_ids + p.checked_offsets[t];
    const int32_t* end = p.checked_ids + p.checked_offsets[t + 1];
    check(p.targets[t] < 0 || begin == end || std::find(begin, end, p.targets[t]) != end,
          "allowed_ids: expected each label among the ids that it was drawn from, got others for label ", p.targets[t],
          " at index ", t + p.ahead);
  }
}

void launch_logps_allowed_mask_cpu(const LogpsMaskParams& p) {
  for_rows(p.rows, p.columns, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Interval<int64_t> set = p.set_of(row);
      uint32_t* words = p.mask + row * p.words;
      std::fill(words, words + p.words, set.empty() ? ~0u : 0u);
      for (int64_t i = set.begin; i < set.end; ++i) {
        const int64_t column = p.ids[i] - p.first;
        if (p.has_column(column)) words[column / 32] |= 1u << column % 32;
      }
    }
  });
}

void launch_logps_chunk_cpu(const LogpsChunkParams& p) {
  dispatch_float(p.dtype, [&](auto element) {
    const auto piece = logits_of<decltype(element)>();
    for_rows(p.rows, p.columns, [&](int64_t begin, int64_t end) {
      p.weighted ? sum_rows<true>(p, piece, begin, end) : sum_rows<false>(p, piece, begin, end);
    });
  });
}

void launch_logps_chunk_backward_cpu(const LogpsChunkParams& p) {
  dispatch_float(p.dtype, [&](auto element) {
    const auto piece = logits_of<decltype(element)>();
    for_rows(p.rows, p.columns, [&](int64_t begin, int64_t end) { grad_rows(p, piece, begin, end); });
  });
}

}  // namespace packing_ops
