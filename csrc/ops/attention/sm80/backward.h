// Shapes of the backward, and the instances that exist: a small .cu file each, for both half types.
#pragma once

#include <cuda_runtime.h>

#include "ops/attention/sm80/args.h"

namespace packing_ops::sm80 {

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

// Documents of several key tiles.
template <class T, int kDim, bool kTransform, Room kRoom>
void run_backward(const Args& args, cudaStream_t stream);

// Documents of one. kKeys is backward_keys or backward_small_keys.
template <class T, int kDim, int kKeys, bool kTransform, Room kRoom>
void run_backward_single(const Args& args, cudaStream_t stream);

// Before both: row_stats, zeros where no unit writes, and zeros for args.order.
template <class T>
void run_row_stats(const Args& args, cudaStream_t stream);

// After it: dsinks.
void run_sinks_backward(const Args& args, cudaStream_t stream);

}  // namespace packing_ops::sm80
