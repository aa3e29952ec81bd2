// From lengths to pieces: checks, overlong sequences, order.
#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "core/error.h"
#include "ops/packing/packing_plan.h"

namespace packing_ops {

namespace {

constexpr int64_t kMaxPieces = std::numeric_limits<int32_t>::max() - 1;

// The index of lengths[i] in an error text: of several sides the sequence and the side.
std::string index_text(const PackParams& p, int64_t i) {
  if (p.sides == 1) return "index " + std::to_string(i);
  return "[" + std::to_string(i / p.sides) + ", " + std::to_string(i % p.sides) + "]";
}

[[noreturn]] void fail_overlong(const PackParams& p) {
  int64_t i = 0;
  while (units_of(p.lengths[i], p.alignment) <= p.capacity / p.alignment) ++i;
  const int64_t length = p.lengths[i];
  const char* policies = p.sides == 1 ? "'own', 'split', 'truncate' or 'drop'" : "'own' or 'drop'";
  std::string rounded;
  if (length <= p.capacity) rounded = " after rounding up to a multiple of alignment=" + std::to_string(p.alignment);
  fail("lengths: expected at most capacity=", p.capacity, rounded, ", got ", length, " at ", index_text(p, i),
       ", which exceeds bin capacity; overlong=", policies, " accepts it");
}

struct Scan {
  int64_t shortest = 0;
  int64_t longest = 0;
  int64_t sum = 0;
};

template <class Int>
Scan scan(const Int* lengths, int64_t count) {
  Int shortest = 0;
  Int longest = 0;
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    shortest = std::min(shortest, lengths[i]);
    longest = std::max(longest, lengths[i]);
    sum += static_cast<uint64_t>(lengths[i]);
  }
  return {shortest, longest, static_cast<int64_t>(sum)};
}

// Checks every length. Sums of aligned lengths fit int64 afterwards.
Scan check_lengths(const PackParams& p) {
  check(p.num_sequences <= kMaxPieces, "lengths: expected at most ", kMaxPieces, " sequences, got ", p.num_sequences);
  const int64_t count = p.num_sequences * p.sides;
  const Scan found = p.lengths.is_int64 ? scan(static_cast<const int64_t*>(p.lengths.data), count)
                                        : scan(static_cast<const int32_t*>(p.lengths.data), count);
  for (int64_t i = 0; found.shortest < 0 && i < count; ++i) {
    check(p.lengths[i] >= 0, "lengths: expected no negative length, got ", p.lengths[i], " at ", index_text(p, i));
  }
  if (p.overlong == Overlong::kError && units_of(found.longest, p.alignment) > p.capacity / p.alignment) {
    fail_overlong(p);
  }
  int64_t sum = 0;
  if (found.longest <= std::numeric_limits<int64_t>::max() / std::max<int64_t>(count, 1) - p.alignment) return found;
  for (int64_t i = 0; i < count; ++i) {
    int64_t aligned = 0;
    const bool over = __builtin_mul_overflow(units_of(p.lengths[i], p.alignment), p.alignment, &aligned) ||
                      __builtin_add_overflow(sum, aligned, &sum);
    check(!over, "lengths: expected a sum that fits int64, got more at ", index_text(p, i));
  }
  return found;
}

// splitmix64: the same numbers on every machine and in every version.
struct Random {
  uint64_t state;

  uint64_t below(uint64_t bound) {
    uint64_t z = state += 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    z ^= z >> 31;
    return static_cast<uint64_t>((static_cast<unsigned __int128>(z) * bound) >> 64);
  }
};

std::vector<int32_t> arrival_order(const PackParams& p) {
  std::vector<int32_t> order(p.num_sequences);
  std::iota(order.begin(), order.end(), 0);
  Random random{p.seed};
  for (int64_t i = p.num_sequences; p.shuffle && i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  return order;
}

// Sequences as they are, in their order: nothing to remember but the units.
void keep_sequences(const PackParams& p, Pieces& pieces) {
  pieces.count = p.num_sequences;
  if (p.alignment == 1 && p.lengths.is_int64) {
    pieces.units = static_cast<const int64_t*>(p.lengths.data);
    return;
  }
  pieces.memory.resize(pieces.count);
  for (int64_t i = 0; i < pieces.count; ++i) pieces.memory[i] = units_of(p.lengths[i], p.alignment);
  pieces.units = pieces.memory.data();
}

void cut_sequences(const PackParams& p, Pieces& pieces, PackCounts& counts) {
  const auto add = [&](int64_t item, int64_t start, int64_t length) {
    pieces.items.push_back(item);
    pieces.starts.push_back(start);
    pieces.lengths.push_back(length);
    pieces.memory.push_back(units_of(length, p.alignment));
  };
  const int64_t max_tokens = pieces.capacity * p.alignment;
  for (const int64_t i : arrival_order(p)) {
    const int64_t length = p.lengths[i];
    if (units_of(length, p.alignment) <= pieces.capacity) {
      add(i, 0, length);
      continue;
    }
    pieces.overlong_items.push_back(i);
    const bool cuts = p.overlong == Overlong::kSplit || p.overlong == Overlong::kTruncate;
    check(!cuts || max_tokens > 0, "alignment: expected at most capacity=", p.capacity, " to cut lengths[", i,
          "]=", length, ", got ", p.alignment);
    switch (p.overlong) {
      case Overlong::kError:  // check_lengths has raised it
        break;
      case Overlong::kOwn:
        add(i, 0, length);
        counts.own_slots += pieces.memory.back() * p.alignment;
        break;
      case Overlong::kSplit:
        check((length - 1) / max_tokens < kMaxPieces - static_cast<int64_t>(pieces.items.size()),
              "lengths: expected at most ", kMaxPieces, " pieces after splitting, got more at index ", i);
        for (int64_t start = 0; start < length; start += std::min(max_tokens, length - start)) {
          add(i, start, std::min(max_tokens, length - start));
        }
        break;
      case Overlong::kTruncate:
        add(i, 0, max_tokens);
        counts.lost_tokens += length - max_tokens;
        break;
      case Overlong::kDrop:
        counts.lost_tokens += length;
        break;
    }
  }
  std::sort(pieces.overlong_items.begin(), pieces.overlong_items.end());
  pieces.count = static_cast<int64_t>(pieces.items.size());
  pieces.units = pieces.memory.data();
}

// L1 of the bin-packing literature and the pieces of which no two share a bin, whichever says more.
int64_t fewest_bins(const PackParams& p, const Pieces& pieces) {
  int64_t num_overlong = 0;
  int64_t sum = 0;
  int64_t over_half = 0;
  for (int64_t i = 0; i < pieces.count; ++i) {
    const int64_t units = pieces.units[i];
    const bool overlong = units > pieces.capacity;
    num_overlong += overlong;
    sum += overlong ? 0 : units;
    over_half += !overlong && units > pieces.capacity - units;
  }
  const int64_t shared = pieces.count - num_overlong;
  const int64_t by_tokens = sum > 0 ? (sum - 1) / pieces.capacity + 1 : 0;
  const int64_t by_count = shared > 0 ? (shared - 1) / p.max_sequences_per_bin + 1 : 0;
  return num_overlong + std::max({by_tokens, by_count, over_half});
}

}  // namespace

void make_pieces(const PackParams& p, Pieces& pieces, PackCounts& counts) {
  const Scan found = check_lengths(p);
  pieces.capacity = p.capacity / p.alignment;
  const bool fits = units_of(found.longest, p.alignment) <= pieces.capacity;
  if (p.sides > 1) {
    make_sides(p, arrival_order(p), pieces, counts);
  } else {
    fits && !p.shuffle ? keep_sequences(p, pieces) : cut_sequences(p, pieces, counts);
  }
  for (int64_t i = 0; i < pieces.count; ++i) pieces.longest = std::max(pieces.longest, pieces.units[i]);
  counts.pieces = pieces.count;
  counts.overlong = static_cast<int64_t>(pieces.overlong_items.size());
  counts.tokens = found.sum - counts.lost_tokens;
  counts.lower_bound = p.sides > 1 ? fewest_bins_of_sides(p, pieces) : fewest_bins(p, pieces);
}

// A table of all lengths sorts in linear time; it is not worth it when it is much longer than the input.
Runs longest_first(const Pieces& pieces, bool higher_index_first) {
  Runs sorted;
  sorted.order.resize(pieces.count);
  if (pieces.longest <= 4 * pieces.count + 1024) {
    std::vector<int32_t> next(pieces.longest + 1, 0);
    for (int64_t i = 0; i < pieces.count; ++i) ++next[pieces.units[i]];
    int64_t begin = 0;
    for (int64_t units = pieces.longest; units >= 0; --units) {
      const int64_t end = begin + next[units];
      if (end > begin) sorted.runs.push_back({units, {begin, end}});
      next[units] = static_cast<int32_t>(begin);
      begin = end;
    }
    for (int64_t k = 0; k < pieces.count; ++k) {
      const int64_t i = higher_index_first ? pieces.count - 1 - k : k;
      sorted.order[next[pieces.units[i]]++] = static_cast<int32_t>(i);
    }
    return sorted;
  }
  std::vector<std::pair<int64_t, int64_t>> keys(pieces.count);
  for (int64_t i = 0; i < pieces.count; ++i) keys[i] = {-pieces.units[i], higher_index_first ? -i : i};
  std::sort(keys.begin(), keys.end());
  for (int64_t k = 0; k < pieces.count; ++k) {
    sorted.order[k] = static_cast<int32_t>(std::abs(keys[k].second));
    if (k == 0 || keys[k].first != keys[k - 1].first) sorted.runs.push_back({-keys[k].first, {k, k}});
    sorted.runs.back().pieces.end = k + 1;
  }
  return sorted;
}

}  // namespace packing_ops
