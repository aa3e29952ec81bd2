// Tile shapes, pipeline stages, and which of them serve a GPU, head_dim and class of document. The plan and the kernels
// take them from here and from nowhere else.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace packing_ops::attention {

// Whose kernels serve the half types: the folder of that name. float32 has fp32/ everywhere.
enum class Kernels : uint8_t { kSm80, kSm90 };

// Tile sizes of one call. Rows are packed GQA rows: row r is token r / group, head r % group of the kv head's group.
struct AttentionTiles {
  int32_t group = 1;
  int32_t forward_rows = 128;        // rows of a forward tile
  int32_t forward_keys = 64;         // keys of a forward step
  bool forward_by_document = false;  // a document's forward tiles are next to each other in the plan
  Kernels kernels = Kernels::kSm80;
  int32_t short_rows = 64;          // rows of a tile of short rows
  int32_t short_max_keys = 128;     // maximum keys that a short row sees; -1: no such class
  int32_t resident_max_keys = 128;  // maximum keys that a resident row sees; -1: no such class
  int32_t backward_rows = 64;       // rows of a backward step
  int32_t backward_keys = 128;      // keys of a backward tile
  int32_t small_keys = 64;          // documents with at most small_keys keys use smaller backward tiles; 0: no document
  int32_t single_keys = 128;        // other documents with at most single_keys keys have one key tile and use the
                                    // backward without partial dq; 0: no document

  // Order of the backward in a document of several key tiles. Long: every key tile walks the row tiles from the last
  // one down, first key tile first, so that the tiles in flight read the same rows from L2. Short: from the first row
  // tile that attends to the key tile upwards, last key tile first, so that no tile waits for another's dq. By the
  // document's keys: a call with some of its queries has the order, and the bits, of one with all.
  PACKING_OPS_HOST_DEVICE bool start_at_last_row(int32_t keys) const {
    constexpr int64_t kLong = 32;
    return static_cast<int64_t>(keys) * group > kLong * backward_rows;
  }
};

// Only by group, head_dims and device, so that a document's bits do not depend on what it is packed with.
Kernels kernels_for(int64_t group, int64_t head_dim, int64_t head_dim_v, int device);

// The tiles for this group and these head_dims, of q and k and of v, on this GPU. packed_tokens: total_q *
// num_kv_heads, tokens of groups of q heads.
AttentionTiles attention_tiles(int64_t group, int64_t head_dim, int64_t head_dim_v, int64_t packed_tokens, int device);

// Shared memory that a block may have, which the backward's stages are chosen for:
//   k227KB  sm_90, sm_100          3 row tiles in flight; scores one step ahead (documents of several key tiles)
//   k163KB  sm_80                  2 row tiles
//   k99KB   sm_86, sm_89, sm_120   1 row tile, key tiles of half the size
// head_dim 256 has one row tile less, and half a row tile with k99KB; 512 has smaller tiles everywhere.
enum class SmemTier { k99KB, k163KB, k227KB };

// --- forward, mma.sync ---

// The instance for the head_dim of q and k, and v's; columns above them are zeros. Instances of two widths: 192
// and 128 (multi-head latent attention). A narrower v elsewhere, or a wider one, takes the instance of the wider of the
// two.
struct PaddedDims {
  int qk;
  int v;
};
constexpr int padded_dim(int64_t head_dim) {
  return head_dim <= 64    ? 64
         : head_dim <= 96  ? 96
         : head_dim <= 128 ? 128
         : head_dim <= 192 ? 192
         : head_dim <= 256 ? 256
                           : 512;
}
constexpr PaddedDims padded_dims(int64_t head_dim, int64_t head_dim_v) {
  const int padded = padded_dim(head_dim > head_dim_v ? head_dim : head_dim_v);
  return {padded, padded == 192 && head_dim_v <= 128 ? 128 : padded};
}
// Rows so wide that several warps share the columns of one.
constexpr bool is_wide(int padded) {
  return padded > 256;
}
constexpr int forward_rows(int padded, int padded_v) {
  return padded_v <= 128 ? 128 : 64;
}
constexpr int forward_keys(int padded) {
  return padded <= 128 ? 64 : 32;
}

// Which kernel serves a row depends on how far into its document the row sees, not on the document's length: a row's
// bits do not depend on what follows it. Short rows (keys * group up to this) get smaller tiles, four blocks to a
// multiprocessor.
constexpr int kShortMaxKeysTimesGroup = 512;
constexpr bool has_short_forward(int padded) {
  return padded <= 128;
}
constexpr int kShortRows = 64;
constexpr int kShortKeys = 32;

// Resident rows see up to kResidentMaxKeys keys: all of them are in shared memory, in a ring of key tiles, next to 16
// rows of q for each consumer warp. Where a block may have 227 KB.
constexpr int kResidentMaxKeys = 128;
constexpr int kResidentRowTile = 16;
constexpr int kResidentWarps = 15;
constexpr int resident_key_tiles(int padded) {
  return 10 * 128 / padded;
}
constexpr int resident_shared(int padded) {
  return (2 * resident_key_tiles(padded) * kShortKeys + kResidentWarps * kResidentRowTile) * padded * 2 + 128;
}
constexpr int kResidentRingBytes = 2048;  // at least sizeof(ResidentRing)
// Where a block may have so many bytes of shared memory.
constexpr bool has_resident_forward(int padded, int64_t bytes) {
  return has_short_forward(padded) && resident_shared(padded) + kResidentRingBytes <= bytes;
}

// Wide rows: warps of 16 rows and a share of the columns, as many as fit into a block with k163KB, or with k99KB.
constexpr int wide_forward_rows(SmemTier tier) {
  return tier == SmemTier::k99KB ? 32 : 64;
}
constexpr int wide_forward_keys(SmemTier tier) {
  return tier == SmemTier::k99KB ? 16 : 32;
}

// --- wgmma (sm90/) ---

// A forward unit is two or three tiles of packed rows, a backward step one or two. A tile starts at a whole token, so
// one TMA load brings it.
constexpr int kTileRows = 64;
// Panels of 64 columns in a tile of `columns`.
constexpr int wgmma_panels(int columns) {
  return (columns + 63) / 64;
}
constexpr int kMaxTileGroup = kTileRows;
constexpr int tile_tokens(int64_t group) {
  return static_cast<int>(kTileRows / group);
}
// The backward's instance for a head_dim.
constexpr int wgmma_backward_dim(int64_t head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 96 ? 96 : head_dim <= 128 ? 128 : head_dim <= 192 ? 192 : 256;
}
// Forward. A consumer warpgroup for each tile of a unit's rows: three as far as registers hold them, for two of them
// fill the tensor cores while one is in its softmax. With 65 to 128 columns two where three would make few units, of
// which a multiprocessor's last keeps the others waiting. A row's bits are the same in both.
constexpr int64_t kFewUnits = 512;
constexpr int wgmma_max_forward_tiles(int dim) {
  return dim <= 128 ? 3 : 2;
}
constexpr int wgmma_min_forward_tiles(int dim) {
  return dim == 64 ? 3 : 2;
}
constexpr int wgmma_forward_tiles(int dim, int64_t group, int64_t packed_tokens) {
  return packed_tokens < kFewUnits * 3 * tile_tokens(group) ? wgmma_min_forward_tiles(dim)
                                                            : wgmma_max_forward_tiles(dim);
}
// A step's keys: registers hold out and a step's scores.
constexpr int wgmma_forward_keys(int dim_v) {
  return dim_v <= 192 ? 128 : 64;
}
// Stages in shared memory: q of units, and tiles of k and v.
constexpr int wgmma_q_stages(int dim) {
  return dim <= 128 ? 2 : 1;
}
constexpr int wgmma_kv_stages(int dim) {
  return dim == 64 ? 6 : dim == 192 ? 3 : 4;
}
constexpr int kForwardUnitStages = 4;  // descriptions of units

// Backward. All of dk and dv of a unit must fit the consumer warpgroups' registers. Up to 128 columns they divide its
// keys. With 192 columns three warpgroups divide the three panels of 64 columns. With 256 two divide the rows of scores
// and the columns of sums.
constexpr bool wgmma_backward_by_panels(int dim) {
  return dim == 192;
}
constexpr bool wgmma_backward_by_columns(int dim) {
  return dim == 256;
}
constexpr int wgmma_backward_keys(int dim) {
  return wgmma_backward_by_columns(dim) ? 64 : wgmma_backward_by_panels(dim) ? 96 : 128;
}
// kv heads of a document whose units run at the same time: those of 8 q heads. With fewer, more units read the same
// rows and add to the same dq in L2; with 2 q heads they wait for each other's tickets.
constexpr int wgmma_backward_heads(int group) {
  return group < 8 ? 8 / group : 1;
}
constexpr int wgmma_row_tiles(int dim) {  // of a step
  return dim > 128 ? 1 : 128 / dim;
}
// Stages: descriptions of units, k and v of units, rows of steps (by panels only q has them all), descriptions of
// steps.
constexpr int kUnitStages = 2;
constexpr int kKvStages = 1;
constexpr int kRowStages = 2;
constexpr int kStepStages = 4;
// dq of steps. By columns it overwrites its step's q and dout.
constexpr int wgmma_dq_stages(int dim) {
  return dim == 64 || wgmma_backward_by_panels(dim) ? 1 : 2;
}

// --- backward, mma.sync ---

constexpr bool has_99kb_tier(int padded) {
  return padded > 64;  // head_dim 64 fits k163KB's tiles into 99 KB
}
constexpr int backward_rows(int padded, SmemTier tier) {
  if (is_wide(padded)) return tier == SmemTier::k99KB ? 16 : 32;
  return padded == 256 && tier == SmemTier::k99KB ? 32 : 64;
}
constexpr int backward_keys(int padded, SmemTier tier) {
  if (is_wide(padded)) return 32;
  return (padded <= 128 ? 128 : 64) / (tier == SmemTier::k99KB ? 2 : 1);
}
// Documents with at most backward_small_keys keys use smaller blocks, two to a multiprocessor; 0: no document. -1:
// documents of one key tile are treated like those of several, as wgmma treats those of more than 64 keys.
constexpr int backward_small_keys(int padded, SmemTier tier) {
  if (is_wide(padded)) return -1;
  return padded <= 128 && tier != SmemTier::k99KB ? 64 : 0;
}

// Row tiles in shared memory at once (pipeline stages), and score tiles (p and ds).
constexpr int backward_stages(int padded, SmemTier tier) {
  const int stages = tier == SmemTier::k99KB ? 1 : tier == SmemTier::k163KB ? 2 : 3;
  return padded >= 256 && stages > 1 ? stages - 1 : stages;
}
constexpr int backward_score_tiles(int padded, SmemTier tier) {
  return padded < 256 && tier == SmemTier::k227KB ? 2 : 1;
}
// Columns of a tile of scores: whole panels, except where shared memory is short.
constexpr int backward_score_columns(int padded, int keys) {
  return keys < 64 && !is_wide(padded) ? 64 : keys;
}
// Bytes of a block's tiles.
constexpr int backward_shared(int padded, int padded_v, int keys, SmemTier tier) {
  const int rows = backward_rows(padded, tier);
  const int scores = 2 * rows * backward_score_columns(padded, keys) * 2;
  const int stage = rows * (padded + padded_v) * 2 + rows * 8;
  return keys * (padded + padded_v) * 2 + backward_score_tiles(padded, tier) * scores +
         backward_stages(padded, tier) * stage;
}
// The tier of the instances for documents of one key tile: with k227KB they would only differ in scores one step ahead,
// which they do not need.
constexpr SmemTier backward_single_tier(int padded, SmemTier tier) {
  return backward_score_tiles(padded, tier) > 1 ? SmemTier::k163KB : tier;
}

// Bytes of shared memory that a block may have on this device, or PACKING_OPS_SHARED_MEMORY where that is less, so that
// a smaller GPU's kernels can be tried on a larger one. The variable is read at the first call.
int64_t max_shared_memory(int device);

}  // namespace packing_ops::attention
