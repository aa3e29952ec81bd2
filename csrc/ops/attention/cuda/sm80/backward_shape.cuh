// How a block of the backward shares out a step, and what it notes of one.
#pragma once

#include "ops/attention/cuda/dq_ring.cuh"
#include "ops/attention/cuda/sm80/backward.h"
#include "ops/attention/cuda/smem_tile.cuh"

namespace packing_ops::attention::sm80 {

// Rows are a unit's packed rows, kRows at a time. Of s [rows, keys] a warp takes kScoreRows rows and two blocks of 16
// keys that lie half the tile apart, so that a short document's blocks spread over the warps; of dk and dv the same two
// blocks and kColumns columns; of dq kQueryRows rows and kQueryColumns columns. kSingle: the tile holds all keys of its
// document, so that rowsum(dout * out) = rowsum(p * dp) needs no pass over out; where 16 rows a warp make the step
// (kWholeRows) a warp has all keys of its rows and the sum needs nobody else.
template <int kDim_, int kKeys_, bool kSingle_, Room kRoom>
struct BackwardShape {
  static constexpr int kDim = kDim_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kRows = backward_rows(kDim_, kRoom);
  static constexpr int kWarps = kRoom == Room::kSmall ? 4 : kDim <= 128 ? kKeys / 16 : 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = backward_stages(kDim, kRoom);
  static constexpr int kScoreTiles = backward_score_tiles(kDim, kRoom);
  static constexpr bool kAhead = kScoreTiles > 1;  // scores are a step ahead of the sums
  static constexpr bool kSingle = kSingle_;
  static constexpr int kKeyWarps = kKeys / 32;
  static constexpr int kParts = kWarps / kKeyWarps;  // warps that share two blocks of keys
  static constexpr bool kWholeRows = kSingle && 16 * kWarps == kRows;
  // At least 16, and then the last parts have none.
  static constexpr int kScoreRows = kWholeRows || kRows / kParts < 16 ? 16 : kRows / kParts;
  static constexpr int kScoreBlocks = kWholeRows ? kKeys / 16 : 2;
  static constexpr int kScoreApart = kWholeRows ? 1 : kKeyWarps;  // blocks between two of a warp's
  static constexpr int kColumns = kDim / kParts;
  static constexpr int kQueryRows = kDim / (kWarps / 2) % 16 == 0 ? 32 : 16;
  static constexpr int kQueryColumns = kDim / (kWarps / (kRows / kQueryRows));
  using TileK = Tile<kKeys, kDim>;
  using TileQ = Tile<kRows, kDim>;
  static constexpr int kScoreColumns = kKeys < 64 ? 64 : kKeys;  // whole panels, as store expects
  using TileS = Tile<kRows, kScoreColumns>;
  static constexpr int kStageBytes = 2 * TileQ::kBytes + kRows * 8;
  static constexpr int kTiles = backward_shared(kDim, kKeys, kRoom);
  static_assert(kTiles == 2 * TileK::kBytes + kStages * kStageBytes + 2 * kScoreTiles * TileS::kBytes);
  static constexpr int kRowSums = kSingle && !kWholeRows ? kKeyWarps * kRows * 4 : 0;  // [key warps, rows] floats
  static constexpr int kShared = kTiles + kRowSums;
};

// A row tile as a unit of keys meets it, in three registers.
struct Met {
  uint32_t packed = 0;
  Turn turn;  // at its dq

  Met() = default;
  // Blocks: of 16 keys, those of the unit that some row sees.
  __device__ Met(int rows, int first_block, int end_block, Turn turn, bool last, bool alone)
      : packed(rows | first_block << 8 | end_block << 12 | static_cast<uint32_t>(last) << 16 |
               static_cast<uint32_t>(alone) << 17),
        turn(turn) {}
  __device__ int rows() const { return packed & 255; }
  __device__ int first_block() const { return packed >> 8 & 15; }
  __device__ int end_block() const { return packed >> 12 & 15; }
  __device__ bool last() const { return packed >> 16 & 1; }  // nobody adds to its dq after
  __device__ bool alone() const { return packed >> 17; }     // nor before
  __device__ bool sees(int block) const { return block >= first_block() && block < end_block(); }
};

}  // namespace packing_ops::attention::sm80
