// How the CPU kernel thinks of a packing. Lengths are counted in units of `alignment` tokens from here on, so that
// rounding up happens once and the capacity is a whole number of units.
#pragma once

#include <cstdint>
#include <vector>

#include "core/interval.h"
#include "ops/packing/packing.h"

namespace packing_ops {

inline int64_t units_of(int64_t length, int64_t alignment) {
  return alignment == 1 ? length : length / alignment + (length % alignment != 0);
}

// What is packed, in order of arrival: the sequences, or parts of them.
struct Pieces {
  int64_t count = 0;
  int64_t capacity = 0;            // units of one bin
  int64_t longest = 0;             // units; over the capacity only for pieces that get a separate bin
  const int64_t* units = nullptr;  // [count], of the longest side; into the lengths themselves or into `memory`
  std::vector<int64_t> memory;
  std::vector<int64_t> side_units;  // [count, sides], or empty for one side
  // [count], or empty where piece i is just sequence i. With several sides nothing is cut, and lengths stay empty.
  std::vector<int64_t> items;
  std::vector<int64_t> starts;
  std::vector<int64_t> lengths;
  std::vector<int64_t> overlong_items;
};

// Pieces of equal length next to each other, longest first.
struct Run {
  int64_t units;
  Interval<int64_t> pieces;  // of Runs::order
};

struct Runs {
  std::vector<int32_t> order;  // [count] pieces
  std::vector<Run> runs;
};

// What a strategy decides: the bin of the i-th piece that it looked at.
struct Assignment {
  std::vector<int32_t> bin_of;  // [count]
  std::vector<int32_t> sizes;   // [bins], pieces in each
  int64_t max_size = 0;

  int32_t open() {
    sizes.push_back(0);
    return static_cast<int32_t>(sizes.size()) - 1;
  }
  bool full(int32_t bin) const { return sizes[bin] >= max_size; }
};

struct PackPlan {
  Pieces pieces;
  std::vector<int32_t> placed;          // [count] pieces, bin by bin, in the order in which they were put there
  std::vector<Interval<int64_t>> bins;  // the pieces of each: placed[begin:end]
  PackCounts counts;
};

// packing_pieces_cpu.cpp
void make_pieces(const PackParams& p, Pieces& pieces, PackCounts& counts);
Runs longest_first(const Pieces& pieces, bool higher_index_first);

// packing_fit_cpu.cpp
void fit_next(const Pieces& pieces, Assignment& out);
void fit_first(const Pieces& pieces, Assignment& out);
void fit_first_decreasing(const Pieces& pieces, const Runs& sorted, Assignment& out);
void fit_best_decreasing(const Pieces& pieces, const Runs& sorted, Assignment& out);

// packing_sides_cpu.cpp: sequences with several lengths (sides), such as chosen and rejected tokens.
void make_sides(const PackParams& p, const std::vector<int32_t>& arrival, Pieces& pieces, PackCounts& counts);
int64_t fewest_bins_of_sides(const PackParams& p, const Pieces& pieces);
void fit_sides(const PackParams& p, const Pieces& pieces, const Runs& sorted, Assignment& out);

// packing_cpu.cpp: `bins` raised to what min_bins and bins_multiple_of ask for.
int64_t bins_wanted(const PackParams& p, int64_t bins, int64_t pieces);

// packing_balance_cpu.cpp: check_costs before the others, so that no sum of costs is infinite.
void check_costs(const PackParams& p, const Pieces& pieces);
void fit_balanced(const PackParams& p, const Pieces& pieces, const Runs& sorted, int64_t lower_bound, Assignment& out);
void even_bins(const PackParams& p, PackPlan& plan);
void deal_bins(const PackParams& p, PackPlan& plan);

}  // namespace packing_ops
