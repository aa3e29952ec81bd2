// The two steps of packing.h. A strategy says which bin each piece goes to; here the pieces of a bin are joined.
#include <algorithm>

#include "core/error.h"
#include "ops/packing/packing_plan.h"

namespace packing_ops {

namespace {

Assignment assign(const PackParams& p, const Pieces& pieces, const Runs& sorted, int64_t lower_bound) {
  Assignment out;
  out.bin_of.resize(pieces.count);
  out.max_size = p.max_sequences_per_bin;
  if (p.sides > 1) {
    fit_sides(p, pieces, sorted, out);
    return out;
  }
  switch (p.strategy) {
    case PackStrategy::kFirstFitDecreasing:
      fit_first_decreasing(pieces, sorted, out);
      break;
    case PackStrategy::kBestFitDecreasing:
      fit_best_decreasing(pieces, sorted, out);
      break;
    case PackStrategy::kBalanced:
      fit_balanced(p, pieces, sorted, lower_bound, out);
      break;
    case PackStrategy::kNextFit:
      fit_next(pieces, out);
      break;
    case PackStrategy::kFirstFit:
      fit_first(pieces, out);
      break;
  }
  return out;
}

// The pieces of every bin next to each other, in the order in which they were put there.
void group_by_bin(const Assignment& assignment, const Runs& sorted, PackPlan& plan) {
  const int64_t bins = static_cast<int64_t>(assignment.sizes.size());
  std::vector<int64_t> next(bins);
  int64_t begin = 0;
  for (int64_t bin = 0; bin < bins; ++bin) {
    next[bin] = begin;
    plan.bins.push_back({begin, begin + assignment.sizes[bin]});
    begin = plan.bins.back().end;
  }
  plan.placed.resize(plan.pieces.count);
  const bool arrival = sorted.order.empty();
  for (int64_t i = 0; i < plan.pieces.count; ++i) {
    plan.placed[next[assignment.bin_of[i]]++] = arrival ? static_cast<int32_t>(i) : sorted.order[i];
  }
}

// While bins are missing, the bin with the most pieces (the later one of equals) gives its last ones, one to each new
// bin, until it has one left.
void add_missing_bins(int64_t missing, std::vector<Interval<int64_t>>& bins) {
  if (missing <= 0) return;
  const int64_t count = static_cast<int64_t>(bins.size());
  std::vector<std::pair<int64_t, int64_t>> givers(count);
  for (int64_t bin = 0; bin < count; ++bin) givers[bin] = {bins[bin].size(), bin};
  std::make_heap(givers.begin(), givers.end());
  while (missing > 0) {
    std::pop_heap(givers.begin(), givers.end());
    const int64_t giver = givers.back().second;
    givers.pop_back();
    for (; missing > 0 && bins[giver].size() > 1; --missing) {
      const int64_t last = --bins[giver].end;
      bins.push_back({last, last + 1});
    }
  }
}

}  // namespace

int64_t bins_wanted(const PackParams& p, int64_t bins, int64_t pieces) {
  if (pieces == 0 && p.min_bins == 1) return 0;
  const int64_t min_bins = std::max(bins, p.min_bins);
  const int64_t rest = min_bins % p.bins_multiple_of;
  int64_t wanted = min_bins;
  const bool over = rest != 0 && __builtin_add_overflow(min_bins, p.bins_multiple_of - rest, &wanted);
  check(!over && wanted <= pieces, "min_bins, bins_multiple_of: expected at most as many bins as sequences, got ",
        pieces, " sequences for at least ", min_bins, " bins in multiples of ", p.bins_multiple_of,
        ". Cannot create bins without a sequence");
  return wanted;
}

void launch_plan_bins_cpu(const PackParams& p) {
  PackPlan& plan = *p.plan;
  make_pieces(p, plan.pieces, plan.counts);
  if (p.balance || p.strategy == PackStrategy::kBalanced) check_costs(p, plan.pieces);
  const bool keeps_order = p.strategy == PackStrategy::kNextFit || p.strategy == PackStrategy::kFirstFit;
  const Runs sorted = keeps_order ? Runs{} : longest_first(plan.pieces, p.higher_index_first);
  group_by_bin(assign(p, plan.pieces, sorted, plan.counts.lower_bound), sorted, plan);
  const int64_t bins = static_cast<int64_t>(plan.bins.size());
  add_missing_bins(bins_wanted(p, bins, plan.pieces.count) - bins, plan.bins);
  if (p.strategy == PackStrategy::kBalanced) even_bins(p, plan);
  if (p.balance) deal_bins(p, plan);
  plan.counts.bins = static_cast<int64_t>(plan.bins.size());
}

void launch_write_bins_cpu(const PackParams& p) {
  const PackPlan& plan = *p.plan;
  const Pieces& pieces = plan.pieces;
  int64_t k = 0;
  p.bin_offsets[0] = 0;
  for (size_t r = 0; r < plan.bins.size(); ++r) {
    for (int64_t from = plan.bins[r].begin; from < plan.bins[r].end; ++from, ++k) {
      const int64_t piece = plan.placed[from];
      p.item_indices[k] = pieces.items.empty() ? piece : pieces.items[piece];
      p.starts[k] = pieces.starts.empty() ? 0 : pieces.starts[piece];
      if (p.sides > 1) {
        for (int64_t side = 0; side < p.sides; ++side) {
          p.piece_lengths[k * p.sides + side] = p.lengths[pieces.items[piece] * p.sides + side];
        }
        continue;
      }
      p.piece_lengths[k] = pieces.items.empty() ? p.lengths[piece] : pieces.lengths[piece];
    }
    p.bin_offsets[r + 1] = k;
  }
  std::copy(pieces.overlong_items.begin(), pieces.overlong_items.end(), p.overlong_items);
  p.counts[0] = plan.counts.tokens;
  p.counts[1] = plan.counts.lost_tokens;
  p.counts[2] = plan.counts.own_slots;
  p.counts[3] = plan.counts.lower_bound;
}

void launch_pack_ffd_cpu(const PackFfdParams& p) {
  PackPlan plan;
  PackParams all;
  all.lengths = p.lengths;
  all.num_sequences = p.num_sequences;
  all.capacity = p.capacity;
  all.alignment = p.alignment;
  all.max_sequences_per_bin = std::max<int64_t>(p.num_sequences, 1);
  all.higher_index_first = p.ties_last;
  all.plan = &plan;
  launch_plan_bins_cpu(all);
  std::fill(p.bin_offsets, p.bin_offsets + p.num_sequences + 1, p.num_sequences);
  int64_t k = 0;
  for (size_t r = 0; r < plan.bins.size(); ++r) {
    p.bin_offsets[r] = k;
    for (int64_t from = plan.bins[r].begin; from < plan.bins[r].end; ++from) p.item_indices[k++] = plan.placed[from];
  }
  *p.num_bins = plan.counts.bins;
}

}  // namespace packing_ops
