// The strategies that fill bins one piece after another. fit_balanced has its own file.
#include <algorithm>
#include <limits>

#include "ops/packing/packing_bin_levels.h"
#include "ops/packing/packing_plan.h"
#include "ops/packing/packing_room_tree.h"

namespace packing_ops {

namespace {

// A table as long as the capacity pays when it is not much longer than the input.
bool worth_a_table(int64_t capacity, int64_t count) {
  return capacity <= 8 * count + 4096;
}

// No first-fit packing has more bins: of the open ones with room for a piece, at most one is half empty.
int64_t most_bins(const Pieces& pieces, int64_t max_size) {
  int64_t own = 0;
  int64_t sum = 0;
  for (int64_t i = 0; i < pieces.count; ++i) {
    const bool overlong = pieces.units[i] > pieces.capacity;
    own += overlong;
    sum += overlong ? 0 : pieces.units[i];
  }
  const int64_t half_full = pieces.capacity > 0 ? sum / pieces.capacity * 2 + 2 : 0;
  return std::min(pieces.count, own + half_full + pieces.count / max_size + 1);
}

void open_own(Assignment& out, int64_t position) {
  const int32_t bin = out.open();
  out.sizes[bin] = 1;
  out.bin_of[position] = bin;
}

template <class Room>
void fit_first_in(const Pieces& pieces, Assignment& out) {
  RoomTree<Room> tree(most_bins(pieces, out.max_size), static_cast<Room>(pieces.capacity));
  for (int64_t i = 0; i < pieces.count; ++i) {
    const bool own = pieces.units[i] > pieces.capacity;
    const Room units = own ? static_cast<Room>(pieces.capacity) : static_cast<Room>(pieces.units[i]);
    const int64_t bin = own ? static_cast<int64_t>(out.sizes.size()) : tree.first_bin(units);
    if (bin == static_cast<int64_t>(out.sizes.size())) out.open();
    const int64_t block = bin / tree.kFan;
    Room& room = tree.rooms(block)[bin % tree.kFan];
    out.bin_of[i] = static_cast<int32_t>(bin);
    ++out.sizes[bin];
    room = own || out.full(bin) ? Room(-1) : room - units;
    tree.update(block);
  }
}

// Pieces of one length need one sweep over the bins: a bin that is passed does not fit the next one either.
template <class Room>
void fit_first_decreasing_in(const Pieces& pieces, const Runs& sorted, Assignment& out) {
  RoomTree<Room> tree(most_bins(pieces, out.max_size), static_cast<Room>(pieces.capacity));
  for (const Run& run : sorted.runs) {
    int64_t position = run.begin;
    if (run.units > pieces.capacity) {
      for (; position < run.end; ++position) {
        const int64_t bin = static_cast<int64_t>(out.sizes.size());
        open_own(out, position);
        tree.rooms(bin / tree.kFan)[bin % tree.kFan] = Room(-1);
        tree.update(bin / tree.kFan);
      }
      continue;
    }
    const Room units = static_cast<Room>(run.units);
    int64_t block = 0;
    while (position < run.end) {
      block = tree.next_block(block, units);
      Room* rooms = tree.rooms(block);
      for (uint32_t fits = tree.fitting(block, units); fits && position < run.end; fits &= fits - 1) {
        const int64_t slot = __builtin_ctz(fits);
        const int32_t bin = static_cast<int32_t>(block * tree.kFan + slot);
        if (bin == static_cast<int32_t>(out.sizes.size())) out.open();
        Room room = rooms[slot];
        int32_t size = out.sizes[bin];
        while (room >= units && position < run.end && size < out.max_size) {
          out.bin_of[position++] = bin;
          room -= units;
          ++size;
        }
        out.sizes[bin] = size;
        rooms[slot] = size < out.max_size ? room : Room(-1);
      }
      tree.update(block);
    }
  }
}

template <class Levels>
void fit_best_decreasing_in(const Pieces& pieces, const Runs& sorted, Assignment& out) {
  Levels bins(pieces.capacity);  // by room
  for (const Run& run : sorted.runs) {
    int64_t position = run.begin;
    while (position < run.end) {
      if (run.units > pieces.capacity) {
        open_own(out, position++);
        continue;
      }
      auto [room, bin] = bins.take(run.units);
      if (bin < 0) {
        room = pieces.capacity;
        bin = out.open();
      }
      // The tightest bin that fits stays the tightest one while it fits.
      while (room >= run.units && position < run.end && !out.full(bin)) {
        out.bin_of[position++] = bin;
        room -= run.units;
        ++out.sizes[bin];
      }
      if (!out.full(bin)) bins.put({room, bin});
    }
  }
}

bool fits_int32(int64_t capacity) {
  return capacity < std::numeric_limits<int32_t>::max();
}

}  // namespace

void fit_next(const Pieces& pieces, Assignment& out) {
  int64_t room = -1;
  for (int64_t i = 0; i < pieces.count; ++i) {
    const int64_t units = pieces.units[i];
    if (units > room || out.full(static_cast<int32_t>(out.sizes.size()) - 1)) {
      out.open();
      room = pieces.capacity;
    }
    room -= units;  // an overlong piece leaves a negative room: nothing follows it
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
