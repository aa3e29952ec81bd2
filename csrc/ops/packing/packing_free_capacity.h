// The free capacity of every bin under a tree of maxima: finds the first bin that still fits, in O(log bins).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace packing_ops {

// Sixteen children per node: with 32-bit units one cache line, compared in a few vector instructions.
// A closed bin has free capacity -1. Bins that are not open yet have the whole capacity, so the first one that fits is
// either an open bin or the next one to open.
template <class Units>
class FreeCapacityTree {
 public:
  static constexpr int64_t kFan = 16;

  FreeCapacityTree(int64_t bins, Units capacity) {
    int64_t size = bins;
    do {
      const int64_t padded = (size + kFan - 1) / kFan * kFan;
      levels_.emplace_back(padded, Units(-1));
      std::fill_n(levels_.back().begin(), size, capacity);
      size = padded / kFan;
    } while (size > 1);
  }

  Units* free_capacity(int64_t block) { return levels_[0].data() + block * kFan; }

  // Bit i: bin block * kFan + i fits.
  uint32_t fitting(int64_t block, Units units) const { return fitting(0, block, units); }

  // The first block of bins, at or after `block`, that has one that fits. There must be one.
  int64_t next_block(int64_t block, Units units) const {
    if (levels_.size() == 1) return 0;
    size_t level = 1;
    int64_t index = block;
    uint32_t found = 0;
    while (true) {
      found = fitting(level, index / kFan, units) & (~0u << (index % kFan));
      if (found) break;
      index = index / kFan + 1;
      ++level;
    }
    index = index / kFan * kFan + first_bit(found);
    while (--level > 0) index = index * kFan + first_bit(fitting(level, index, units));
    return index;
  }

  int64_t first_bin(Units units) const {
    int64_t index = 0;
    for (size_t level = levels_.size(); level-- > 0;) index = index * kFan + first_bit(fitting(level, index, units));
    return index;
  }

  // After free capacities of a block shrank: its maximum, and those above while they change.
  void update(int64_t block) {
    for (size_t level = 1; level < levels_.size(); ++level) {
      const Units largest = max_of(levels_[level - 1].data() + block * kFan);
      if (levels_[level][block] == largest) return;
      levels_[level][block] = largest;
      block /= kFan;
    }
  }

 private:
  static int64_t first_bit(uint32_t bits) { return __builtin_ctz(bits); }

  uint32_t fitting(size_t level, int64_t block, Units units) const {
    const Units* free_capacity = levels_[level].data() + block * kFan;
    uint32_t bits = 0;
    for (int64_t i = 0; i < kFan; ++i) bits |= static_cast<uint32_t>(free_capacity[i] >= units) << i;
    return bits;
  }

  static Units max_of(const Units* values) {
    Units largest = values[0];
    for (int64_t i = 1; i < kFan; ++i) largest = values[i] > largest ? values[i] : largest;
    return largest;
  }

  std::vector<std::vector<Units>> levels_;  // bins, then maxima of kFan, of kFan^2, ...
};

}  // namespace packing_ops
