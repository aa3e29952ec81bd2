// Sequences that take of several budgets at once. Their length, where one number is asked for, is their longest side.
#include <algorithm>

#include "ops/packing/packing_plan.h"

namespace packing_ops {

namespace {

// What is left of every budget of every bin, and for each block of bins the most that one of them has left of each: a
// block where one side is too small is passed as a whole.
class SideRooms {
 public:
  SideRooms(int64_t sides, int64_t capacity) : sides_(sides), capacity_(capacity) {}

  void open() {
    if (bins_ % kBlock == 0) most_.insert(most_.end(), sides_, capacity_);
    rooms_.insert(rooms_.end(), sides_, capacity_);
    update(bins_++);
  }

  bool fits(int64_t bin, const int64_t* units) const { return all_fit(rooms_.data() + bin * sides_, units); }

  // The first bin with room, or the number of bins.
  int64_t first_bin(const int64_t* units) const {
    for (int64_t first = 0; first < bins_; first += kBlock) {
      if (!all_fit(most_.data() + first / kBlock * sides_, units)) continue;
      const int64_t end = std::min(first + kBlock, bins_);
      for (int64_t bin = first; bin < end; ++bin) {
        if (fits(bin, units)) return bin;
      }
    }
    return bins_;
  }

  void take(int64_t bin, const int64_t* units) {
    for (int64_t side = 0; side < sides_; ++side) rooms_[bin * sides_ + side] -= units[side];
    update(bin);
  }

  void close(int64_t bin) {
    std::fill_n(rooms_.begin() + bin * sides_, sides_, int64_t{-1});
    update(bin);
  }

 private:
  static constexpr int64_t kBlock = 64;

  bool all_fit(const int64_t* rooms, const int64_t* units) const {
    for (int64_t side = 0; side < sides_; ++side) {
      if (rooms[side] < units[side]) return false;
    }
    return true;
  }

  void update(int64_t bin) {
    const int64_t block = bin / kBlock;
    const int64_t end = std::min((block + 1) * kBlock, static_cast<int64_t>(rooms_.size()) / sides_);
    for (int64_t side = 0; side < sides_; ++side) {
      int64_t most = -1;
      for (int64_t k = block * kBlock; k < end; ++k) most = std::max(most, rooms_[k * sides_ + side]);
      most_[block * sides_ + side] = most;
    }
  }

  int64_t sides_;
  int64_t capacity_;
  int64_t bins_ = 0;
  std::vector<int64_t> rooms_;  // [bins, sides]
  std::vector<int64_t> most_;   // [blocks, sides]
};

}  // namespace

void make_sides(const PackParams& p, const std::vector<int32_t>& arrival, Pieces& pieces, PackCounts& counts) {
  for (const int64_t i : arrival) {
    int64_t longest = 0;
    int64_t tokens = 0;
    int64_t slots = 0;
    for (int64_t side = 0; side < p.sides; ++side) {
      const int64_t own = units_of(p.lengths[i * p.sides + side], p.alignment);
      longest = std::max(longest, own);
      tokens += p.lengths[i * p.sides + side];
      slots += std::max(p.capacity, own * p.alignment);
    }
    if (longest > pieces.capacity) {  // check_lengths has raised Overlong::kError
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

// As for one length, of the budget that asks for most bins.
int64_t fewest_bins_of_sides(const PackParams& p, const Pieces& pieces) {
  std::vector<int64_t> sum(p.sides, 0);
  std::vector<int64_t> over_half(p.sides, 0);
  int64_t own = 0;
  for (int64_t i = 0; i < pieces.count; ++i) {
    if (pieces.units[i] > pieces.capacity) {
      ++own;
      continue;
    }
    for (int64_t side = 0; side < p.sides; ++side) {
      const int64_t units = pieces.side_units[i * p.sides + side];
      sum[side] += units;
      over_half[side] += units > pieces.capacity - units;
    }
  }
  const int64_t shared = pieces.count - own;
  int64_t fewest = shared > 0 ? (shared - 1) / p.max_sequences_per_bin + 1 : 0;
  for (int64_t side = 0; side < p.sides; ++side) {
    const int64_t by_tokens = sum[side] > 0 ? (sum[side] - 1) / pieces.capacity + 1 : 0;
    fewest = std::max({fewest, by_tokens, over_half[side]});
  }
  return own + fewest;
}

// ffd and first_fit: the first bin with room on all sides; next_fit: the last one.
void fit_sides(const PackParams& p, const Pieces& pieces, const Runs& sorted, Assignment& out) {
  SideRooms rooms(p.sides, pieces.capacity);
  for (int64_t position = 0; position < pieces.count; ++position) {
    const int64_t piece = sorted.order.empty() ? position : sorted.order[position];
    const int64_t* units = pieces.side_units.data() + piece * p.sides;
    const bool own = pieces.units[piece] > pieces.capacity;
    const int64_t bins = static_cast<int64_t>(out.sizes.size());
    int64_t bin = bins;
    if (!own && p.strategy == PackStrategy::kNextFit && bins > 0 && rooms.fits(bins - 1, units)) bin = bins - 1;
    if (!own && p.strategy != PackStrategy::kNextFit) bin = rooms.first_bin(units);
    if (bin == bins) {
      out.open();
      rooms.open();
    }
    out.bin_of[position] = static_cast<int32_t>(bin);
    ++out.sizes[bin];
    own || out.full(static_cast<int32_t>(bin)) ? rooms.close(bin) : rooms.take(bin, units);
  }
}

}  // namespace packing_ops
