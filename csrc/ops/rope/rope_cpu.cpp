// The specification. Every pair (x1, x2) of a head becomes
//   (x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2)
// in float (double for double), where cos1, sin1 are the table's entries for the first element and cos2, sin2 for the
// second (the same ones in a table of one entry per pair). Conjugated, it is the transpose of that 2x2 matrix.
#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/interval.h"
#include "host/parallel.h"
#include "host/scalar.h"
#include "ops/rope/rope.h"

namespace packing_ops {

namespace {

constexpr int64_t kGrain = 16384;  // elements a thread should have before a second one helps
constexpr int64_t kPairs = 64;     // pairs that go through the buffers at a time
constexpr int64_t kLanes = 16;     // rotated together, the last ones padded: no result depends on a loop's remainder

template <class Real>
struct Pairs {
  alignas(64) Real first[kPairs];
  alignas(64) Real second[kPairs];
};

// The 2x2 matrix of every pair, as coefficients of (x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2).
template <class Real>
struct Angles {
  Pairs<Real> cos;
  Pairs<Real> sin;
};

PACKING_OPS_INLINE int64_t position_of(const RopeParams& p, int64_t row, int64_t b, int64_t t) {
  return p.position_ids[row * p.position_row + b * p.position_batch + t * p.position_token];
}

// Called before anything is written.
void check_positions(const RopeParams& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int64_t b = 0; b < p.position_batches; ++b) {
      for (int64_t t = 0; t < p.seqlen; ++t) {
        const int64_t position = position_of(p, row, b, t);
        check(position >= 0 && position < p.max_positions, "position_ids: expected 0 to ", p.max_positions - 1,
              " (cos has ", p.max_positions, " rows), got ", position, " at index ",
              (row * p.position_batches + b) * p.seqlen + t);
      }
    }
  }
}

PACKING_OPS_INLINE int64_t table_offset(const RopeParams& p, const RopeTable& table, int64_t row, int64_t b,
                                        int64_t t) {
  if (p.position_ids.data) return position_of(p, row, b, t) * table.token;
  return row * table.row + b * table.batch + t * table.token;
}

// Pairs from .. to of `x`; kStep elements from one pair to the next, `apart` from the first element to the second.
template <int kStep, class T, class Real>
PACKING_OPS_INLINE void load_pairs(const T* x, int64_t apart, int64_t from, int64_t to, Pairs<Real>& pairs) {
  for (int64_t i = from; i < to; ++i) pairs.first[i] = static_cast<Real>(x[i * kStep]);
  for (int64_t i = from; i < to; ++i) pairs.second[i] = static_cast<Real>(x[i * kStep + apart]);
}

template <int kStep, class T, class Real>
PACKING_OPS_INLINE void store_pairs(const Pairs<Real>& pairs, int64_t apart, int64_t count, T* x) {
  for (int64_t i = 0; i < count; ++i) x[i * kStep] = static_cast<T>(pairs.first[i]);
  for (int64_t i = 0; i < count; ++i) x[i * kStep + apart] = static_cast<T>(pairs.second[i]);
}

template <int kStep, class Entry, class Real>
void read_entries(const RopeParams& p, const RopeTable& table, int64_t offset, int64_t begin, int64_t from, int64_t to,
                  Pairs<Real>& out) {
  const Entry* entries = static_cast<const Entry*>(table.data) + offset;
  if (p.full_table) {
    load_pairs<kStep>(entries + begin * kStep, kStep == 2 ? 1 : p.rotary_dim / 2, from, to, out);
  } else {
    load_pairs<1>(entries + begin, 0, from, to, out);
  }
}

template <int kStep, class Real>
void read_table(const RopeParams& p, const RopeTable& table, int64_t offset, int64_t begin, int64_t from, int64_t to,
                Pairs<Real>& out) {
  switch (p.table_dtype) {
    case DType::kFloat64:
      return read_entries<kStep, double>(p, table, offset, begin, from, to, out);
    case DType::kBFloat16:
      return read_entries<kStep, BFloat16>(p, table, offset, begin, from, to, out);
    case DType::kFloat16:
      return read_entries<kStep, Half>(p, table, offset, begin, from, to, out);
    default:
      return read_entries<kStep, float>(p, table, offset, begin, from, to, out);
  }
}

// Pairs begin .. begin + count of token (b, t), section by section.
template <int kStep, class Real>
void read_angles(const RopeParams& p, int64_t b, int64_t t, int64_t begin, int64_t count, Angles<Real>& angles) {
  int64_t from = 0;
  for (int64_t section = 0; section < p.num_sections && from < count; ++section) {
    const int64_t to = std::min(count, p.section_ends[section] - begin);
    if (to <= from) continue;
    const int64_t row = section % p.rows;
    read_table<kStep>(p, p.cos, table_offset(p, p.cos, row, b, t), begin, from, to, angles.cos);
    read_table<kStep>(p, p.sin, table_offset(p, p.sin, row, b, t), begin, from, to, angles.sin);
    from = to;
  }
  if (!p.conjugate) return;
  for (int64_t i = 0; i < count; ++i) {
    const Real first = angles.sin.first[i];
    angles.sin.first[i] = -angles.sin.second[i];
    angles.sin.second[i] = -first;
  }
}

// The one loop that computes: always whole groups of kLanes.
template <class Real>
PACKING_OPS_INLINE void rotate(const Angles<Real>& angles, int64_t count, const Pairs<Real>& in, Pairs<Real>& out) {
  for (int64_t group = 0; group < count; group += kLanes) {
    for (int64_t i = group; i < group + kLanes; ++i) {
      out.first[i] = in.first[i] * angles.cos.first[i] - in.second[i] * angles.sin.first[i];
      out.second[i] = in.second[i] * angles.cos.second[i] + in.first[i] * angles.sin.second[i];
    }
  }
}

// These pairs of every head of token (b, t).
template <class T, int kStep, class Real>
PACKING_OPS_INLINE void rotate_heads(const RopeParams& p, const RopeHeads& x, int64_t b, int64_t t,
                                     Interval<int64_t> pairs, const Angles<Real>& angles, Pairs<Real>& in,
                                     Pairs<Real>& out) {
  const int64_t apart = kStep == 2 ? 1 : p.rotary_dim / 2;
  const T* from = static_cast<const T*>(x.in) + b * x.in_batch + t * x.in_token + pairs.begin * kStep;
  T* to = static_cast<T*>(x.out) + b * x.out_batch + t * x.out_token + pairs.begin * kStep;
  for (int64_t h = 0; h < x.num_heads; ++h) {
    load_pairs<kStep>(from + h * x.in_head, apart, 0, pairs.size(), in);
    rotate(angles, pairs.size(), in, out);
    store_pairs<kStep>(out, apart, pairs.size(), to + h * x.out_head);
  }
}

// The elements that partial rotary does not change.
template <class T>
PACKING_OPS_INLINE void copy_rest(const RopeParams& p, const RopeHeads& x, int64_t b, int64_t t) {
  const int64_t bytes = (p.head_dim - p.rotary_dim) * static_cast<int64_t>(sizeof(T));
  if (bytes == 0 || x.in == x.out) return;
  const T* from = static_cast<const T*>(x.in) + b * x.in_batch + t * x.in_token + p.rotary_dim;
  T* to = static_cast<T*>(x.out) + b * x.out_batch + t * x.out_token + p.rotary_dim;
  for (int64_t h = 0; h < x.num_heads; ++h) std::memcpy(to + h * x.out_head, from + h * x.in_head, bytes);
}

// kStep: 1 for pairs (i, i + rotary_dim / 2), 2 for pairs (2i, 2i + 1).
template <class T, int kStep>
PACKING_OPS_MULTIVERSION void rotate_tokens(const RopeParams& p, int64_t first, int64_t last) {
  using Real = accumulate_t<T>;
  Angles<Real> angles = {};
  Pairs<Real> in = {};
  Pairs<Real> out;
  const int64_t num_pairs = p.rotary_dim / 2;
  for (int64_t token = first; token < last; ++token) {
    const int64_t b = token / p.seqlen;
    const int64_t t = token % p.seqlen;
    for (int64_t begin = 0; begin < num_pairs; begin += kPairs) {
      const int64_t count = std::min(kPairs, num_pairs - begin);
      read_angles<kStep>(p, b, t, begin, count, angles);
      for (const RopeHeads* x : {&p.q, &p.k})
        rotate_heads<T, kStep>(p, *x, b, t, {begin, begin + count}, angles, in, out);
    }
    for (const RopeHeads* x : {&p.q, &p.k}) copy_rest<T>(p, *x, b, t);
  }
}

}  // namespace

void launch_rope_qk_cpu(const RopeParams& p) {
  if (p.position_ids.data) check_positions(p);
  const int64_t per_token = std::max<int64_t>(1, (p.q.num_heads + p.k.num_heads) * p.head_dim);
  const int64_t grain = std::max<int64_t>(1, kGrain / per_token);
  dispatch_float(p.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(0, p.batch * p.seqlen, grain, [&](int64_t first, int64_t last) {
      p.interleaved ? rotate_tokens<T, 2>(p, first, last) : rotate_tokens<T, 1>(p, first, last);
    });
  });
}

}  // namespace packing_ops
