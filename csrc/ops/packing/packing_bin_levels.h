// Open bins by a level, which is their free capacity or their cost so far: finds the lowest one.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <utility>
#include <vector>

namespace packing_ops {

// A set of integers below `size` that finds the next larger one: 64 children per node, one bit each.
class BitTree {
 public:
  explicit BitTree(int64_t size) {
    do {
      size = size / 64 + 1;
      levels_.emplace_back(size, 0);
    } while (size > 1);
  }

  bool contains(int64_t i) const { return levels_[0][i / 64] >> (i % 64) & 1; }

  void insert(int64_t i) {
    for (auto& level : levels_) {
      level[i / 64] |= uint64_t{1} << (i % 64);
      i /= 64;
    }
  }

  void erase(int64_t i) {
    for (auto& level : levels_) {
      level[i / 64] &= ~(uint64_t{1} << (i % 64));
      if (level[i / 64]) return;
      i /= 64;
    }
  }

  // The smallest member >= i, or -1.
  int64_t at_or_after(int64_t i) const {
    for (size_t level = 0; level < levels_.size(); ++level) {
      if (i / 64 >= static_cast<int64_t>(levels_[level].size())) return -1;
      const uint64_t after = levels_[level][i / 64] & (~uint64_t{0} << (i % 64));
      if (after) {
        i = i / 64 * 64 + __builtin_ctzll(after);
        while (level-- > 0) i = i * 64 + __builtin_ctzll(levels_[level][i]);
        return i;
      }
      i = i / 64 + 1;
    }
    return -1;
  }

 private:
  std::vector<std::vector<uint64_t>> levels_;
};

struct LeveledBin {
  int64_t level;
  int32_t bin;  // -1: there is no bin
};

// Levels 0 to `highest`, each a heap of bins with the lowest index on top (a skew heap: two links per bin).
class BinLevels {
 public:
  explicit BinLevels(int64_t highest) : used_(highest + 1), roots_(new int32_t[highest + 1]) {}

  // Removes the first bin of the lowest level >= min_level.
  LeveledBin take(int64_t min_level) {
    const int64_t level = used_.at_or_after(min_level);
    if (level < 0) return {0, -1};
    const int32_t bin = roots_[level];
    roots_[level] = merge(links_[bin].left, links_[bin].right);
    if (roots_[level] < 0) used_.erase(level);
    return {level, bin};
  }

  void put(LeveledBin put) {
    if (put.bin >= static_cast<int32_t>(links_.size())) links_.resize(put.bin + 1);
    links_[put.bin] = {-1, -1};
    if (used_.contains(put.level)) {
      roots_[put.level] = merge(roots_[put.level], put.bin);
    } else {
      used_.insert(put.level);
      roots_[put.level] = put.bin;
    }
  }

 private:
  struct Links {
    int32_t left = -1;
    int32_t right = -1;
  };

  int32_t merge(int32_t a, int32_t b) {
    int32_t root = -1;
    int32_t* link = &root;
    while (a >= 0 && b >= 0) {
      if (b < a) std::swap(a, b);
      // The lower index stays on top; its right side moves to the left and the rest merges there.
      *link = a;
      Links& links = links_[a];
      const int32_t rest = links.right;
      links.right = links.left;
      link = &links.left;
      a = rest;
    }
    *link = a >= 0 ? a : b;
    return root;
  }

  BitTree used_;
  std::unique_ptr<int32_t[]> roots_;  // [highest + 1], those of used levels
  std::vector<Links> links_;          // [bins]
};

// Levels 0 to `highest`, each a stack: the bin that was added last is the first to go. Cheaper than a heap where many
// bins share a level.
class BinStacks {
 public:
  explicit BinStacks(int64_t highest) : used_(highest + 1), tops_(new int32_t[highest + 1]) {}

  LeveledBin take_lowest() {
    const int64_t level = used_.at_or_after(0);
    if (level < 0) return {0, -1};
    const int32_t bin = tops_[level];
    tops_[level] = below_[bin];
    if (tops_[level] < 0) used_.erase(level);
    return {level, bin};
  }

  void put(LeveledBin put) {
    if (put.bin >= static_cast<int32_t>(below_.size())) below_.resize(put.bin + 1);
    if (used_.contains(put.level)) {
      below_[put.bin] = tops_[put.level];
    } else {
      below_[put.bin] = -1;
      used_.insert(put.level);
    }
    tops_[put.level] = put.bin;
  }

 private:
  BitTree used_;
  std::unique_ptr<int32_t[]> tops_;  // [highest + 1], those of used levels
  std::vector<int32_t> below_;       // [bins], the next one of its stack
};

// BinLevels for levels too many for an array.
class ManyBinLevels {
 public:
  explicit ManyBinLevels(int64_t) {}

  LeveledBin take(int64_t min_level) {
    const auto found = bins_.lower_bound({min_level, -1});
    if (found == bins_.end()) return {0, -1};
    const LeveledBin taken{found->first, found->second};
    bins_.erase(found);
    return taken;
  }

  void put(LeveledBin put) { bins_.emplace(put.level, put.bin); }

 private:
  std::set<std::pair<int64_t, int32_t>> bins_;
};

}  // namespace packing_ops
