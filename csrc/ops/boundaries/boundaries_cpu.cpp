// The specification: one plain loop per op.
#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_set>

#include "core/error.h"
#include "host/parallel.h"
#include "host/scalar.h"
#include "ops/boundaries/boundaries.h"

namespace packing_ops {

namespace {

constexpr int64_t kGrain = 16384;  // slots a thread should have before a second one helps

// f(document, segment) for every document, in parallel, threads balanced by documents of `features` numbers a slot.
template <class F>
void for_each_document(const Documents& documents, int64_t features, const F& f) {
  const int64_t per_document = documents.total * features / std::max<int64_t>(documents.num_documents, 1) + 1;
  parallel_for(0, documents.num_documents, std::max<int64_t>(1, kGrain / per_document),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) f(i, documents[i]);
               });
}

template <class F>
void for_each_document(const Documents& documents, const F& f) {
  for_each_document(documents, 1, f);
}

void copy_labels(const LabelsParams& p) {
  if (p.out.data == p.labels.data) return;
  for (int64_t t = 0; t < p.documents.total; ++t) p.out.set(t, p.labels[t]);
}

}  // namespace

void launch_cu_seqlens_from_lengths_cpu(const CuSeqlensFromLengthsParams& p) {
  int64_t sum = 0;
  p.cu_seqlens[0] = 0;
  for (int64_t i = 0; i < p.num_documents; ++i) {
    const int64_t length = p.lengths[i];
    check(length >= 0, "lengths: expected no negative length, got ", length, " at index ", i);
    sum += length;
    check(sum <= std::numeric_limits<int32_t>::max(), "lengths: expected a sum that fits int32, got ", sum,
          " at index ", i);
    p.cu_seqlens[i + 1] = static_cast<int32_t>(sum);
  }
}

void launch_position_ids_cpu(const SlotParams& p) {
  const auto fill = [&](int64_t start, int64_t end) {
    for (int64_t t = start; t < end; ++t) p.position_ids[t] = t - start;
  };
  for_each_document(p.documents, [&](int64_t, Segment s) { fill(s.start, s.end); });
  fill(p.documents.end(), p.documents.total);
}

void launch_seq_idx_cpu(const SlotParams& p) {
  const auto fill = [&](int64_t i, Segment s) { std::fill(p.seq_idx + s.start, p.seq_idx + s.end, int32_t(i)); };
  for_each_document(p.documents, fill);
  fill(p.documents.num_documents, {p.documents.end(), p.documents.total});
}

void launch_cu_seqlens_from_position_ids_cpu(const RunsParams& p) {
  int64_t count = 0;
  for (int64_t t = 0; t < p.size; ++t) {
    if (t == 0 || p.values[t] <= p.values[t - 1]) p.cu_seqlens[count++] = static_cast<int32_t>(t);
  }
  std::fill(p.cu_seqlens + count, p.cu_seqlens + p.size + 1, static_cast<int32_t>(p.size));
  *p.count = count;
}

void launch_prompt_end_indices_cpu(const RunsParams& p) {
  std::unordered_set<int64_t> seen;
  int64_t count = 0;
  for (int64_t i = 0; i < p.size; ++i) {
    if (i > 0 && p.values[i] == p.values[i - 1]) continue;
    check(seen.insert(p.values[i]).second, "uids: expected equal uids next to each other, but ", p.values[i],
          " comes back at index ", i);
    if (i > 0) p.ends[count++] = i;
  }
  if (p.size > 0) p.ends[count++] = p.size;
  std::fill(p.ends + count, p.ends + p.size, p.size);
  *p.count = count;
}

void launch_mask_boundary_labels_cpu(const LabelsParams& p) {
  copy_labels(p);
  for_each_document(p.documents, [&](int64_t, Segment s) {
    if (s.start < s.end) p.out.set(s.start, p.ignore_index);
  });
}

void launch_mask_boundary_labels_shifted_cpu(const LabelsParams& p) {
  for_each_document(p.documents, [&](int64_t, Segment s) {
    if (s.start < s.end) p.out.set(s.end - 1, p.ignore_index);
  });
}

void launch_shift_labels_cpu(const LabelsParams& p) {
  for_each_document(p.documents, [&](int64_t, Segment s) {
    for (int64_t t = s.start; t < s.end; ++t) p.out.set(t, t + 1 < s.end ? p.labels[t + 1] : p.ignore_index);
  });
  for (int64_t t = p.documents.end(); t < p.documents.total; ++t) p.out.set(t, p.ignore_index);
}

void launch_count_target_tokens_cpu(const LabelsParams& p) {
  int64_t count = 0;
  for (int64_t i = 0; i < p.documents.num_documents; ++i) {
    const Segment s = p.documents[i];
    for (int64_t t = s.start + 1; t < s.end; ++t) count += p.labels[t] != p.ignore_index;
  }
  *p.count = count;
}

namespace {

// The sums of `width` neighbouring features of a document, at most kWidth. Compensated, so that a document of 100k
// tokens loses no digits.
template <int kWidth, class T, class Sum = accumulate_t<T>>
void sum_features(const SegmentSumParams& p, int64_t i, Segment s, int64_t first, int width) {
  const bool* mask = static_cast<const bool*>(p.mask);
  const T* values = static_cast<const T*>(p.values) + first;
  Sum sums[kWidth] = {}, carries[kWidth] = {};
  int64_t kept = 0;
  for (int64_t t = s.start; t < s.end; ++t) {
    if (mask && !mask[t]) continue;
    ++kept;
    for (int f = 0; f < width; ++f) {
      const Sum term = static_cast<Sum>(values[t * p.features + f]);
      const Sum sum = sums[f], next = sum + term;
      carries[f] += std::abs(sum) >= std::abs(term) ? (sum - next) + term : (term - next) + sum;
      sums[f] = next;
    }
  }
  Sum* out = static_cast<Sum*>(p.sums) + i * p.features + first;
  for (int f = 0; f < width; ++f) {
    if (std::isfinite(static_cast<double>(sums[f]))) sums[f] += carries[f];
    out[f] = p.average ? sums[f] / static_cast<Sum>(std::max<int64_t>(kept, 1)) : sums[f];
  }
}

}  // namespace

void launch_segment_sum_cpu(const SegmentSumParams& p) {
  dispatch_float(p.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kWidth = 16;
    for_each_document(p.documents, p.features, [&](int64_t i, Segment s) {
      if (p.features == 1) return sum_features<1, T>(p, i, s, 0, 1);
      for (int64_t first = 0; first < p.features; first += kWidth) {
        sum_features<kWidth, T>(p, i, s, first, static_cast<int>(std::min<int64_t>(kWidth, p.features - first)));
      }
    });
  });
}

void launch_segment_sum_backward_cpu(const SegmentSumParams& p) {
  const bool* mask = static_cast<const bool*>(p.mask);
  dispatch_float(p.dtype, [&](auto element) {
    using T = decltype(element);
    using Sum = accumulate_t<T>;
    T* out = static_cast<T*>(p.grad_values);
    for_each_document(p.documents, p.features, [&](int64_t i, Segment s) {
      int64_t kept = s.end - s.start;
      if (p.average && mask) kept = std::count(mask + s.start, mask + s.end, true);
      const Sum count = p.average ? static_cast<Sum>(std::max<int64_t>(kept, 1)) : Sum(1);
      for (int64_t f = 0; f < p.features; ++f) {
        const T share = static_cast<T>(static_cast<const Sum*>(p.grad)[i * p.features + f] / count);
        for (int64_t t = s.start; t < s.end; ++t) out[t * p.features + f] = mask && !mask[t] ? T(Sum(0)) : share;
      }
    });
    std::fill(out + p.documents.end() * p.features, out + p.documents.total * p.features, static_cast<T>(Sum(0)));
  });
}

void launch_gae_cpu(const GaeParams& p) {
  const bool* mask = static_cast<const bool*>(p.mask);
  dispatch_float(p.dtype, [&](auto element) {
    using T = decltype(element);
    using Sum = accumulate_t<T>;
    const T* rewards = static_cast<const T*>(p.rewards);
    const T* values = static_cast<const T*>(p.values);
    Sum* advantages = static_cast<Sum*>(p.advantages);
    Sum* returns = static_cast<Sum*>(p.returns);
    const auto set = [&](int64_t t, double value, double ret) {
      returns[t] = static_cast<Sum>(ret);
      advantages[t] = static_cast<Sum>(ret - value);
    };
    for_each_document(p.documents, [&](int64_t i, Segment s) {
      // double: rounding errors do not add up over 100k steps, and it is as fast.
      double next = p.bootstrap ? static_cast<const Sum*>(p.bootstrap)[i] : Sum(0);
      for (int64_t t = s.end; t-- > s.start;) {
        if (mask && !mask[t]) {
          set(t, 0, 0);
          continue;
        }
        const double value = static_cast<Sum>(values[t]);
        const double ret = static_cast<Sum>(rewards[t]) + p.gamma * next;
        set(t, value, ret);
        next = p.lam * ret + (1 - p.lam) * value;
      }
    });
    for (int64_t t = p.documents.end(); t < p.documents.total; ++t) set(t, 0, 0);
  });
}

void launch_block_causal_mask_cpu(const BlockCausalMaskParams& p) {
  const int64_t total = p.documents.total;
  const auto rows_of = [&](auto visible, auto hidden, auto* mask) {
    const auto fill = [&](Segment s) {
      for (int64_t i = s.start; i < s.end; ++i) {
        const int64_t first = p.window > 0 ? std::max(s.start, i - p.window + 1) : s.start;
        std::fill_n(mask + i * total, total, hidden);
        std::fill(mask + i * total + first, mask + i * total + i + 1, visible);
      }
    };
    for_each_document(p.documents, [&](int64_t, Segment s) { fill(s); });
    fill({p.documents.end(), total});
  };
  if (p.dtype == DType::kBool) return rows_of(true, false, static_cast<bool*>(p.mask));
  dispatch_float(p.dtype, [&](auto element) {
    using T = decltype(element);
    rows_of(static_cast<T>(0.0f), static_cast<T>(-std::numeric_limits<float>::infinity()), static_cast<T*>(p.mask));
  });
}

}  // namespace packing_ops
