// The choices of tiles.h that ask the GPU.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string_view>

#include "core/launch.cuh"
#include "ops/attention/cuda/persistent.cuh"
#include "ops/attention/cuda/tiles.h"

namespace packing_ops::attention {

int64_t shared_memory_of_block(int device) {
  static std::atomic<int64_t> found[kMaxDevices] = {};
  std::atomic<int64_t>& bytes = found[device % kMaxDevices];
  if (bytes.load(std::memory_order_relaxed) == 0) {
    int most = 0;
    check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "cudaDeviceGetAttribute");
    const char* limit = std::getenv("PACKING_OPS_SHARED_MEMORY");
    bytes = limit && *limit ? std::min<int64_t>(most, std::strtoll(limit, nullptr, 10)) : most;
  }
  return bytes.load(std::memory_order_relaxed);
}

Room backward_room(int padded, int device) {
  constexpr int kRowSums = 1024;  // BackwardShape::kRowSums, at most
  const int64_t bytes = shared_memory_of_block(device);
  const auto fits = [&](Room room) {
    return backward_shared(padded, backward_keys(padded, room), room) + kRowSums <= bytes;
  };
  if (fits(Room::kLarge)) return Room::kLarge;
  return fits(Room::kMedium) || !has_small_room(padded) ? Room::kMedium : Room::kSmall;
}

bool has_whole_forward(int padded, int device) {
  return has_short_forward(padded) && whole_shared(padded) + kWholeRing <= shared_memory_of_block(device);
}

bool has_wgmma_forward(int64_t group, int64_t head_dim, int device) {
#if defined(PACKING_OPS_SM90)
  static const bool off = [] {
    const char* value = std::getenv("PACKING_OPS_SM90");
    return value != nullptr && std::string_view(value) == "0";
  }();
  if (off || head_dim > 128 || group > kMostTileGroup) return false;
  int major = 0;
  int minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  return major == 9 && minor == 0 && shared_memory_of_block(device) >= 227 << 10;
#else
  return false;
#endif
}

AttentionTiles attention_tiles(int64_t group, int64_t head_dim, int device) {
  const int padded = padded_dim(head_dim);
  AttentionTiles tiles;
  tiles.group = static_cast<int32_t>(group);
  const bool wgmma = has_wgmma_forward(group, head_dim, device);
  tiles.forward_rows = wgmma ? 2 * tile_tokens(group) * tiles.group : forward_rows(padded);
  tiles.forward_keys = forward_keys(padded);
  tiles.short_rows = kShortRows;
  tiles.whole_most = has_whole_forward(padded, device) ? kWholeMost : -1;
  const int32_t short_most = has_short_forward(padded) && !wgmma ? kShortMost / tiles.group : -1;
  tiles.short_most = short_most > tiles.whole_most ? short_most : -1;
  const Room room = backward_room(padded, device);
  tiles.backward_rows = backward_rows(padded, room);
  tiles.backward_keys = backward_keys(padded, room);
  tiles.small_keys = backward_small_keys(padded, room);
  return tiles;
}

}  // namespace packing_ops::attention
