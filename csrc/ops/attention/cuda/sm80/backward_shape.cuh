// How the warps of a backward block share a step, and what a unit keeps of a row tile.
#pragma once

#include "ops/attention/cuda/dq_ring.cuh"
#include "ops/attention/cuda/sm80/backward.h"
#include "ops/attention/cuda/smem_tile.cuh"

namespace packing_ops::attention::sm80 {

// A step takes kRows packed rows. A warp's share of
//   s [rows, keys]: kScoreRows rows and two blocks of 16 keys
//   dk, dv:         the same two blocks and kColumns, kColumnsV columns
//   dq:             kQueryRows rows and kQueryColumns columns
// The two blocks are half a tile apart, so that the keys of a short document are spread over the warps.
//
// kSingle: the tile holds all keys of its document, so rowsum(dout * out) = rowsum(p * dp) is computed without reading
// out. kWarpOwnsRow: a warp has all keys of its 16 rows, so that sum needs no other warp.
template <int kDim_, int kKeys_, bool kSingle_, SmemTier kTier, int kDimV_ = kDim_>
struct BackwardShape {
  static constexpr int kDim = kDim_;
  static constexpr int kDimV = kDimV_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kRows = backward_rows(kDim_, kTier);
  static constexpr int kWarps = is_wide(kDim) ? 8 : kTier == SmemTier::k99KB ? 4 : kDim <= 128 ? kKeys / 16 : 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = backward_stages(kDim, kTier);
  static constexpr int kScoreTiles = backward_score_tiles(kDim, kTier);
  static constexpr bool kScoresAhead = kScoreTiles > 1;  // p and ds are computed one step ahead of dk, dv, dq
  static constexpr bool kSingle = kSingle_;
  static constexpr int kKeyWarps = kKeys / 32;
  static constexpr int kParts = kWarps / kKeyWarps;  // warps that share the same two blocks of keys
  static constexpr bool kWarpOwnsRow = kSingle && 16 * kWarps == kRows;
  // At least the 16 rows of an mma, even if then the last of these warps have no rows.
  static constexpr int kScoreRows = kWarpOwnsRow || kRows / kParts < 16 ? 16 : kRows / kParts;
  // Wide rows: half of the warps compute a block of s each, the other half one of dp.
  static constexpr bool kSplitScores = is_wide(kDim);
  static constexpr int kScoreBlocks = kWarpOwnsRow ? kKeys / 16 : kSplitScores ? 1 : 2;
  static constexpr int kScoreBlockStride = kWarpOwnsRow ? 1 : kKeyWarps;  // blocks between two of a warp's
  static constexpr int kColumns = kDim / kParts;
  static constexpr int kColumnsV = kDimV / kParts;
  static constexpr int kQueryRows = kRows >= 32 && kDim / (kWarps / 2) % 16 == 0 ? 32 : 16;
  static constexpr int kQueryColumns = kDim / (kWarps / (kRows / kQueryRows));
  using TileK = Tile<kKeys, kDim>;
  using TileV = Tile<kKeys, kDimV>;
  using TileQ = Tile<kRows, kDim>;
  using TileDout = Tile<kRows, kDimV>;
  static constexpr int kScoreColumns = backward_score_columns(kDim, kKeys);
  using TileS = Tile<kRows, kScoreColumns>;
  static constexpr int kKeyBytes = TileK::kBytes + TileV::kBytes;
  static constexpr int kStageBytes = TileQ::kBytes + TileDout::kBytes + kRows * 8;
  static constexpr int kTiles = backward_shared(kDim, kDimV, kKeys, kTier);
  static_assert(kTiles == kKeyBytes + kStages * kStageBytes + 2 * kScoreTiles * TileS::kBytes);
  static constexpr int kRowSums = kSingle && !kWarpOwnsRow ? kKeyWarps * kRows * 4 : 0;  // [key warps, rows] floats
  static constexpr int kShared = kTiles + kRowSums;
};

// A warp's part of a step's scores: some blocks of keys.
struct ScoreBlock {
  int first_row;      // of the row tile
  int32_t first_key;  // of the key tile, in the document
  int tile_key;       // of the block, in the key tile
  bool masked;        // some of it
};

template <int kBlocks>
__device__ __forceinline__ void clear(float (&sums)[2][kBlocks][4]) {
#pragma unroll
  for (int c = 0; c < 2; ++c)
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[c][n][i] = 0.f;
}

// What a unit keeps of one step (its row tile and this key tile), in three registers.
struct RowTileVisit {
  uint32_t packed = 0;
  DqTicket ticket;  // of its partial dq

  RowTileVisit() = default;
  // first_block, end_block: blocks of 16 keys of the unit that are visible to some row.
  __device__ RowTileVisit(int rows, int first_block, int end_block, DqTicket ticket, bool is_last, bool is_only)
      : packed(rows | first_block << 8 | end_block << 12 | static_cast<uint32_t>(is_last) << 16 |
               static_cast<uint32_t>(is_only) << 17),
        ticket(ticket) {}
  __device__ int rows() const { return packed & 255; }
  __device__ int first_block() const { return packed >> 8 & 15; }
  __device__ int end_block() const { return packed >> 12 & 15; }
  __device__ bool is_last() const { return packed >> 16 & 1; }  // key tile in the order of dq's sum
  __device__ bool is_only() const { return packed >> 17; }      // no partial dq
  __device__ bool attends_to(int block) const { return block >= first_block() && block < end_block(); }
};

}  // namespace packing_ops::attention::sm80
