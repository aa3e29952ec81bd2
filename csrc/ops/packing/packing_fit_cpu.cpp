// The strategies that fill bins one piece after another. fit_balanced is in another file.
#include <algorithm>
#include <limits>

#include "ops/packing/packing_bin_levels.h"
#include "ops/packing/packing_free_capacity.h"
#include "ops/packing/packing_plan.h"

namespace packing_ops {

namespace {

// A table as long as the capacity pays when it is not much longer than the input.
bool worth_a_table(int64_t capacity, int64_t count) {
  return capacity <= 8 * count + 4096;
}

// No first-fit packing has more bins: of the open ones that are not full, at most one is half empty.
int64_t max_bins(const Pieces& pieces, int64_t max_size) {
  int64_t num_overlong = 0;
  int64_t sum = 0;
  for (int64_t i = 0; i < pieces.count; ++i) {
    const bool overlong = pieces.units[i] > pieces.capacity;
    num_overlong += overlong;
    sum += overlong ? 0 : pieces.units[i];
  }
  const int64_t half_full = pieces.capacity > 0 ? sum / pieces.capacity * 2 + 2 : 0;
  return std::min(pieces.count, num_overlong + half_full + pieces.count / max_size + 1);
}

void open_for_overlong(Assignment& out, int64_t position) {
  const int32_t bin = out.open();
  out.sizes[bin] = 1;
  out.bin_of[position] = bin;
}

template <class Units>
void fit_first_in(const Pieces& pieces, Assignment& out) {
  FreeCapacityTree<Units> tree(max_bins(pieces, out.max_size), static_cast<Units>(pieces.capacity));
  for (int64_t i = 0; i < pieces.count; ++i) {
    const bool overlong = pieces.units[i] > pieces.capacity;
    const Units units = overlong ? static_cast<Units>(pieces.capacity) : static_cast<Units>(pieces.units[i]);
    const int64_t bin = overlong ? static_cast<int64_t>(out.sizes.size()) : tree.first_bin(units);
    if (bin == static_cast<int64_t>(out.sizes.size())) out.open();
    const int64_t block = bin / tree.kFan;
    Units& free_capacity = tree.free_capacity(block)[bin % tree.kFan];
    out.bin_of[i] = static_cast<int32_t>(bin);
    ++out.sizes[bin];
    free_capacity = overlong || out.full(bin) ? Units(-1) : free_capacity - units;
    tree.update(block);
  }
}

// Pieces of one length need one sweep over the bins: a bin that is passed does not fit the next one either.
template <class Units>
void fit_first_decreasing_in(const Pieces& pieces, const Runs& sorted, Assignment& out) {
  FreeCapacityTree<Units> tree(max_bins(pieces, out.max_size), static_cast<Units>(pieces.capacity));
  for (const Run& run : sorted.runs) {
    int64_t position = run.pieces.begin;
    if (run.units > pieces.capacity) {
      for (; position < run.pieces.end; ++position) {
        const int64_t bin = static_cast<int64_t>(out.sizes.size());
        open_for_overlong(out, position);
        tree.free_capacity(bin / tree.kFan)[bin % tree.kFan] = Units(-1);
        tree.update(bin / tree.kFan);
      }
      continue;
    }
    const Units units = static_cast<Units>(run.units);
    int64_t block = 0;
    while (position < run.pieces.end) {
      block = tree.next_block(block, units);
      Units* free_capacity = tree.free_capacity(block);
      for (uint32_t fits = tree.fitting(block, units); fits && position < run.pieces.end; fits &= fits - 1) {
        const int64_t slot = __builtin_ctz(fits);
        const int32_t bin = static_cast<int32_t>(block * tree.kFan + slot);
        if (bin == static_cast<int32_t>(out.sizes.size())) out.open();
        Units left = free_capacity[slot];
        int32_t size = out.sizes[bin];
        while (left >= units && position < run.pieces.end && size < out.max_size) {
          out.bin_of[position++] = bin;
          left -= units;
          ++size;
        }
        out.sizes[bin] = size;
        free_capacity[slot] = size < out.max_size ? left : Units(-1);
      }
      tree.update(block);
    }
  }
}

template <class Levels>
void fit_best_decreasing_in(const Pieces& pieces, const Runs& sorted, Assignment& out) {
  Levels bins(pieces.capacity);  // by free capacity
  for (const Run& run : sorted.runs) {
    int64_t position = run.pieces.begin;
    while (position < run.pieces.end) {
      if (run.units > pieces.capacity) {
        open_for_overlong(out, position++);
        continue;
      }
      auto [free_capacity, bin] = bins.take(run.units);
      if (bin < 0) {
        free_capacity = pieces.capacity;
        bin = out.open();
      }
      // The tightest bin that fits stays the tightest one while it fits.
      while (free_capacity >= run.units && position < run.pieces.end && !out.full(bin)) {
        out.bin_of[position++] = bin;
        free_capacity -= run.units;
        ++out.sizes[bin];
      }
      if (!out.full(bin)) bins.put({free_capacity, bin});
    }
  }
}

bool fits_int32(int64_t capacity) {
  return capacity < std::numeric_limits<int32_t>::max();
}

}  // namespace

void fit_next(const Pieces& pieces, Assignment& out) {
  int64_t free_capacity = -1;
  for (int64_t i = 0; i < pieces.count; ++i) {
    const int64_t units = pieces.units[i];
    if (units > free_capacity || out.full(static_cast<int32_t>(out.sizes.size()) - 1)) {
      out.open();
      free_capacity = pieces.capacity;
    }
    free_capacity -= units;  // negative after an overlong piece: nothing follows it
    out.bin_of[i] = static_cast<int32_t>(out.sizes.size()) - 1;
    ++out.sizes.back();
  }
}

void fit_first(const Pieces& pieces, Assignment& out) {
  fits_int32(pieces.capacity) ? fit_first_in<int32_t>(pieces, out) : fit_first_in<int64_t>(pieces, out);
}

void fit_first_decreasing(const Pieces& pieces, const Runs& sorted, Assignment& out) {
  fits_int32(pieces.capacity) ? fit_first_decreasing_in<int32_t>(pieces, sorted, out)
                              : fit_first_decreasing_in<int64_t>(pieces, sorted, out);
}

void fit_best_decreasing(const Pieces& pieces, const Runs& sorted, Assignment& out) {
  worth_a_table(pieces.capacity, pieces.count) ? fit_best_decreasing_in<BinLevels>(pieces, sorted, out)
                                               : fit_best_decreasing_in<ManyBinLevels>(pieces, sorted, out);
}

}  // namespace packing_ops
