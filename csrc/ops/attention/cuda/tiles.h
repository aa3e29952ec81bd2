// Which tiles for this GPU, head_dim and class of document: every choice of the plan and of the kernels.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace packing_ops::attention {

// Rows are a document's (token, head of the group) pairs: row r is token r / group, head r % group.
struct AttentionTiles {
  int32_t group = 1;
  int32_t forward_rows = 128;   // rows of a forward unit
  int32_t forward_keys = 64;    // keys that it takes at a time
  int32_t short_rows = 64;      // rows of a short document's unit
  int32_t short_most = 128;     // keys of a short document, -1: there are none
  int32_t whole_most = 128;     // keys and tokens of one that is a single unit, -1: there are none
  int32_t backward_rows = 64;   // rows that a backward unit takes at a time
  int32_t backward_keys = 128;  // keys of a backward unit
  int32_t small_keys = 64;      // documents of at most so many keys get smaller backward units; 0 = none

  // The backward's key tiles all start at a long document's last row, the first tile ahead, so that its rows are read
  // from L2. Of a short one they start where causal attention lets them, the last tile ahead, and nobody waits.
  PACKING_OPS_HOST_DEVICE bool start_at_last_row(int32_t tokens) const {
    constexpr int64_t kLong = 32;
    return static_cast<int64_t>(tokens) * group > kLong * backward_rows;
  }
};

// The tiles of the kernels that serve this group and head_dim on this GPU.
AttentionTiles attention_tiles(int64_t group, int64_t head_dim, int device);

// --- forward, mma.sync ---

// The instance for a head_dim; columns above head_dim are zeros.
constexpr int padded_dim(int64_t head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 96 ? 96 : head_dim <= 128 ? 128 : head_dim <= 192 ? 192 : 256;
}
constexpr int forward_rows(int padded) {
  return padded <= 128 ? 128 : 64;
}
constexpr int forward_keys(int padded) {
  return padded <= 128 ? 64 : 32;
}

// Documents of at most so many keys times heads of a group get smaller units, four to a multiprocessor.
constexpr int kShortMost = 512;
constexpr bool has_short_forward(int padded) {
  return padded <= 128;
}
constexpr int kShortRows = 64;
constexpr int kShortKeys = 32;

// Documents of at most so many keys and tokens are a single unit where a block may take enough shared memory (sm_90,
// sm_100) for a ring of key tiles, and for 16 rows of q for each of the warps that compute.
constexpr int kWholeMost = 128;
constexpr int kWholeRows = 16;
constexpr int kWholeWarps = 15;
constexpr int whole_tiles(int padded) {
  return 10 * 128 / padded;
}
constexpr int whole_shared(int padded) {
  return (2 * whole_tiles(padded) * kShortKeys + kWholeWarps * kWholeRows) * padded * 2 + 128;
}
constexpr int kWholeRing = 2048;  // bytes beside these, at most
bool has_whole_forward(int padded, int device);

// --- forward, wgmma ---

// A unit is two tiles of packed rows. A tile starts at a whole token, so that it is one box of q.
constexpr int kTileRows = 64;
constexpr int kMostTileGroup = kTileRows;
constexpr int tile_tokens(int64_t group) {
  return static_cast<int>(kTileRows / group);
}
// By geometry and device alone, so that a document's bits do not depend on what it is packed with. The plan of every
// call with this geometry has these units, also where scores are transformed or the dtype is float32, which mma.sync
// and fp32/ serve.
bool has_wgmma_forward(int64_t group, int64_t head_dim, int device);

// --- backward, mma.sync ---

// What the shared memory of a block has room for. Up to head_dim 192: kLarge (227 KiB: sm_90, sm_100) three row tiles,
// and for documents of several key tiles the scores of one of them beside the sums of the one before; kMedium (163 KiB:
// sm_80) two row tiles; kSmall (99 KiB: sm_86, sm_89, sm_120) one, and narrower tiles of keys. Above 192 two, one, and
// half of one.
enum class Room { kSmall, kMedium, kLarge };
constexpr bool has_small_room(int padded) {
  return padded > 64;  // which does with kMedium there
}
Room backward_room(int padded, int device);

constexpr int backward_rows(int padded, Room room) {
  return padded == 256 && room == Room::kSmall ? 32 : 64;
}
constexpr int backward_keys(int padded, Room room) {
  return (padded <= 128 ? 128 : 64) / (room == Room::kSmall ? 2 : 1);
}
// Documents of one key tile have a kernel of their own; of at most so many keys with smaller blocks, two to a
// multiprocessor.
constexpr int backward_small_keys(int padded, Room room) {
  return padded <= 128 && room != Room::kSmall ? 64 : 0;
}

// Row tiles that lie in shared memory at once, and tiles of scores.
constexpr int backward_stages(int padded, Room room) {
  const int stages = room == Room::kSmall ? 1 : room == Room::kMedium ? 2 : 3;
  return padded == 256 && stages > 1 ? stages - 1 : stages;
}
constexpr int backward_score_tiles(int padded, Room room) {
  return padded < 256 && room == Room::kLarge ? 2 : 1;
}
// Bytes of a block's tiles.
constexpr int backward_shared(int padded, int keys, Room room) {
  const int rows = backward_rows(padded, room);
  const int scores = 2 * rows * (keys < 64 ? 64 : keys) * 2;
  const int stage = 2 * rows * padded * 2 + rows * 8;
  return 2 * keys * padded * 2 + backward_score_tiles(padded, room) * scores + backward_stages(padded, room) * stage;
}
// The room that documents of one key tile take of it: their scores are no step ahead.
constexpr Room backward_single_room(int padded, Room room) {
  return backward_score_tiles(padded, room) > 1 ? Room::kMedium : room;
}

// Bytes that a block on the device may take, or PACKING_OPS_SHARED_MEMORY where that is less: what a smaller GPU does
// can be tried on a larger one.
int64_t shared_memory_of_block(int device);

}  // namespace packing_ops::attention
