// Shapes of the backward, and the instances that exist: one small .cu file each.
#pragma once

#include <cuda_runtime.h>

#include "ops/attention/sm80/args.h"

namespace packing_ops::sm80 {

constexpr int kBackwardRows = 64;

// What the shared memory of a block has room for, mostly: kSmall (99 KiB: sm_86, sm_89, sm_120) narrower tiles of keys,
// one row tile at a time; kMedium (163 KiB: sm_80) the next row tile on its way; kLarge (227 KiB: sm_90, sm_100) for
// documents of several key tiles the scores of the next row tile too, beside the sums of this one.
enum class Room { kSmall, kMedium, kLarge };
constexpr bool has_small_room(int padded) {  // 64 does with kMedium everywhere, 256 is not built for less
  return padded == 96 || padded == 128 || padded == 192;
}
constexpr bool has_large_room(int padded) {
  return padded < 256;
}
Room backward_room(int padded, int device);

constexpr int backward_keys(int padded, Room room = Room::kMedium) {
  return (padded <= 128 ? 128 : 64) / (room == Room::kSmall ? 2 : 1);
}
// Documents of one key tile have a kernel of their own; of at most so many keys with smaller blocks, two to a
// multiprocessor.
constexpr int backward_small_keys(int padded) {
  return padded <= 128 ? 64 : 0;
}

// Row tiles that lie in shared memory at once, and tiles of scores.
constexpr int backward_stages(Room room) {
  return room == Room::kSmall ? 1 : room == Room::kMedium ? 2 : 3;
}
constexpr int backward_score_tiles(Room room) {
  return room == Room::kLarge ? 2 : 1;
}
// Bytes of a block's tiles.
constexpr int backward_shared(int padded, int keys, Room room) {
  const int scores = 2 * kBackwardRows * (keys < 64 ? 64 : keys) * 2;
  const int stage = 2 * kBackwardRows * padded * 2 + kBackwardRows * 8;
  return 2 * keys * padded * 2 + backward_score_tiles(room) * scores + backward_stages(room) * stage;
}

// Documents of several key tiles.
template <class T, int kDim, bool kTransform, Room kRoom = Room::kMedium>
void run_backward(const Args& args, cudaStream_t stream);

// Documents of one. kKeys is backward_keys or backward_small_keys of the padded head_dim.
template <class T, int kDim, int kKeys, bool kTransform, Room kRoom = Room::kMedium>
void run_backward_single(const Args& args, cudaStream_t stream);

// Before both: row_stats, zeros where no unit writes, and zeros for args.order.
template <class T>
void run_row_stats(const Args& args, cudaStream_t stream);

// After it: dsinks.
void run_sinks_backward(const Args& args, cudaStream_t stream);

}  // namespace packing_ops::sm80
