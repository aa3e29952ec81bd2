// Sequences with several lengths (sides), such as the chosen and rejected tokens of a preference pair. A bin has the
// full capacity for each side. Where one length is needed, it is the longest side's.
#include <algorithm>

#include "ops/packing/packing_plan.h"

namespace packing_ops {

namespace {

// Finds the first bin with room on all sides. Leaves: of every bin its free capacity per side, and the minimum over its
// sides; -1 of bins that are closed or not open yet. Above them a tree of fan-out kFan, whose nodes hold the maximum of
// each of these numbers over their children. If one maximum is too small, no bin below the node has room. If all are
// large enough they may still be from different bins, so the search may fail below a node and go on at the next one.
// The minimum over the sides skips nodes in which every bin is full on one side or another.
class SideCapacityTree {
 public:
  SideCapacityTree(int64_t max_bins, int64_t sides, int64_t capacity)
      : sides_(sides), width_(sides + 1), capacity_(capacity) {
    int64_t nodes = max_bins;
    do {
      nodes = (nodes + kFan - 1) / kFan * kFan;
      levels_.emplace_back(nodes * width_, int64_t{-1});
      nodes /= kFan;
    } while (nodes > 1);
  }

  int64_t bins() const { return bins_; }

  void open() {
    set(bins_++, [&](int64_t) { return capacity_; });
  }

  bool fits(int64_t bin, const int64_t* units) const { return passes(0, bin, units, min_of(units)); }

  // The first bin with room, or the number of bins.
  int64_t first_bin(const int64_t* units) const {
    const int64_t bin = search(levels_.size() - 1, 0, units, min_of(units));
    return bin < 0 ? bins_ : bin;
  }

  void take(int64_t bin, const int64_t* units) {
    const int64_t* free_capacity = levels_[0].data() + bin * width_;
    set(bin, [&](int64_t side) { return free_capacity[side] - units[side]; });
  }

  void close(int64_t bin) {
    set(bin, [](int64_t) { return int64_t{-1}; });
  }

 private:
  static constexpr int64_t kFan = 16;

  int64_t min_of(const int64_t* values) const { return *std::min_element(values, values + sides_); }

  bool passes(size_t level, int64_t index, const int64_t* units, int64_t min_units) const {
    const int64_t* node = levels_[level].data() + index * width_;
    if (node[sides_] < min_units) return false;
    for (int64_t side = 0; side < sides_; ++side) {
      if (node[side] < units[side]) return false;
    }
    return true;
  }

  // The first bin with room among the children of one node of the level above, -1 if no bin has.
  int64_t search(size_t level, int64_t group, const int64_t* units, int64_t min_units) const {
    for (int64_t index = group * kFan; index < (group + 1) * kFan; ++index) {
      if (!passes(level, index, units, min_units)) continue;
      const int64_t bin = level == 0 ? index : search(level - 1, index, units, min_units);
      if (bin >= 0) return bin;
    }
    return -1;
  }

  template <class CapacityOf>
  void set(int64_t bin, const CapacityOf& capacity_of) {
    int64_t* free_capacity = levels_[0].data() + bin * width_;
    for (int64_t side = 0; side < sides_; ++side) free_capacity[side] = capacity_of(side);
    free_capacity[sides_] = min_of(free_capacity);
    for (size_t level = 1; level < levels_.size(); ++level) {
      bin /= kFan;
      const int64_t* children = levels_[level - 1].data() + bin * kFan * width_;
      int64_t* node = levels_[level].data() + bin * width_;
      bool changed = false;
      for (int64_t k = 0; k < width_; ++k) {
        int64_t largest = children[k];
        for (int64_t child = 1; child < kFan; ++child) largest = std::max(largest, children[child * width_ + k]);
        changed |= node[k] != largest;
        node[k] = largest;
      }
      if (!changed) return;
    }
  }

  int64_t sides_;
  int64_t width_;
  int64_t capacity_;
  int64_t bins_ = 0;
  std::vector<std::vector<int64_t>> levels_;  // [nodes, sides + 1]: bins, then nodes of kFan bins, of kFan^2, ...
};

}  // namespace

void make_sides(const PackParams& p, const std::vector<int32_t>& arrival, Pieces& pieces, PackCounts& counts) {
  for (const int64_t i : arrival) {
    int64_t longest = 0;
    int64_t tokens = 0;
    int64_t slots = 0;
    for (int64_t side = 0; side < p.sides; ++side) {
      const int64_t units = units_of(p.lengths[i * p.sides + side], p.alignment);
      longest = std::max(longest, units);
      tokens += p.lengths[i * p.sides + side];
      slots += std::max(p.capacity, units * p.alignment);
    }
    if (longest > pieces.capacity) {  // dropped, or in a bin without others: check_lengths has refused the others
      pieces.overlong_items.push_back(i);
      if (p.overlong == Overlong::kDrop) {
        counts.lost_tokens += tokens;
        continue;
      }
      counts.own_slots += slots;
    }
    pieces.items.push_back(i);
    pieces.memory.push_back(longest);
    for (int64_t side = 0; side < p.sides; ++side) {
      pieces.side_units.push_back(units_of(p.lengths[i * p.sides + side], p.alignment));
    }
  }
  std::sort(pieces.overlong_items.begin(), pieces.overlong_items.end());
  pieces.count = static_cast<int64_t>(pieces.items.size());
  pieces.units = pieces.memory.data();
}

// Lower bound on the number of bins: fewest_bins of each side, of which the largest counts.
int64_t fewest_bins_of_sides(const PackParams& p, const Pieces& pieces) {
  std::vector<int64_t> sum(p.sides, 0);
  std::vector<int64_t> over_half(p.sides, 0);
  int64_t num_overlong = 0;
  for (int64_t i = 0; i < pieces.count; ++i) {
    if (pieces.units[i] > pieces.capacity) {
      ++num_overlong;
      continue;
    }
    for (int64_t side = 0; side < p.sides; ++side) {
      const int64_t units = pieces.side_units[i * p.sides + side];
      sum[side] += units;
      over_half[side] += units > pieces.capacity - units;
    }
  }
  const int64_t shared = pieces.count - num_overlong;
  int64_t fewest = shared > 0 ? (shared - 1) / p.max_sequences_per_bin + 1 : 0;
  for (int64_t side = 0; side < p.sides; ++side) {
    const int64_t by_tokens = sum[side] > 0 ? (sum[side] - 1) / pieces.capacity + 1 : 0;
    fewest = std::max({fewest, by_tokens, over_half[side]});
  }
  return num_overlong + fewest;
}

// ffd and first_fit: the first bin with room on all sides; next_fit: the last bin, or a new one.
void fit_sides(const PackParams& p, const Pieces& pieces, const Runs& sorted, Assignment& out) {
  SideCapacityTree tree(pieces.count, p.sides, pieces.capacity);
  for (int64_t position = 0; position < pieces.count; ++position) {
    const int64_t piece = sorted.order.empty() ? position : sorted.order[position];
    const int64_t* units = pieces.side_units.data() + piece * p.sides;
    const bool overlong = pieces.units[piece] > pieces.capacity;
    const int64_t bins = tree.bins();
    int64_t bin = bins;
    if (!overlong && p.strategy == PackStrategy::kNextFit && bins > 0 && tree.fits(bins - 1, units)) bin = bins - 1;
    if (!overlong && p.strategy != PackStrategy::kNextFit) bin = tree.first_bin(units);
    if (bin == bins) {
      out.open();
      tree.open();
    }
    out.bin_of[position] = static_cast<int32_t>(bin);
    ++out.sizes[bin];
    overlong || out.full(static_cast<int32_t>(bin)) ? tree.close(bin) : tree.take(bin, units);
  }
}

}  // namespace packing_ops
