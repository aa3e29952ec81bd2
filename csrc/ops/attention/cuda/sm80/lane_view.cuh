// Addresses that a lane gives ldmatrix: 16x16 blocks of a tile in shared memory.
#pragma once

#include "ops/attention/cuda/smem_tile.cuh"

namespace packing_ops::attention::sm80 {

// Order of the four 8x8 matrices of ldmatrix.x4 in a 16x16 block: down the rows first, for A and transposed B, or along
// the columns first, for B and transposed A.
enum class Lanes { kRowsFirst, kColumnsFirst };

// Where a lane reads in the 16x16 block at the start of a tile.
struct LaneOffset {
  uint32_t full;
  uint32_t half;  // in a panel of 32 columns

  __device__ explicit LaneOffset(Lanes lanes) {
    const int lane = threadIdx.x & 31;
    const int row = lanes == Lanes::kRowsFirst ? lane & 15 : (lane & 7) + ((lane >> 4) << 3);
    const int c = lanes == Lanes::kRowsFirst ? lane >> 4 : (lane >> 3) & 1;
    full = row * 128 + ((c ^ (row & 7)) << 4);
    half = row * 64 + ((c ^ ((row >> 1) & 3)) << 4);
  }
};

// One lane's addresses for 16x16 blocks of a tile from first_row on; rows and columns in steps of 16 (rows of 8 with
// kColumnsFirst too).
template <int kRows, int kDim>
struct LaneView {
  using T = Tile<kRows, kDim>;
  uint32_t full;
  uint32_t half;

  __device__ LaneView(T tile, LaneOffset lane, int first_row)
      : full(tile.base + first_row * 128 + lane.full),
        half(tile.base + T::kFullPanels * kRows * 128 + first_row * 64 + lane.half) {}
  __device__ LaneView(T tile, Lanes lanes, int first_row) : LaneView(tile, LaneOffset(lanes), first_row) {}
  // Block of 16 columns `column`, `row` rows further down (a multiple of 8).
  __device__ uint32_t at(int row, int column) const {
    if (T::kHalfPanel && column / 4 == T::kFullPanels) return (half ^ ((column & 1) << 5)) + row * 64;
    return (full ^ ((column & 3) << 5)) + (column / 4) * kRows * 128 + row * 128;
  }
};

}  // namespace packing_ops::attention::sm80
