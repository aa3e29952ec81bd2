// The heuristics of tiles.h and tiers.h that depend on the GPU.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string_view>

#include "core/launch.cuh"
#include "ops/attention/cuda/persistent.cuh"
#include "ops/attention/cuda/tiers.h"

namespace packing_ops::attention {

int64_t max_shared_memory(int device) {
  static std::atomic<int64_t> found[kMaxDevices] = {};
  std::atomic<int64_t>& bytes = found[device % kMaxDevices];
  if (bytes.load(std::memory_order_relaxed) == 0) {
    int limit = 0;
    check_cuda(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "cudaDeviceGetAttribute");
    const char* wanted = std::getenv("PACKING_OPS_SHARED_MEMORY");
    bytes = wanted && *wanted ? std::min<int64_t>(limit, std::strtoll(wanted, nullptr, 10)) : limit;
  }
  return bytes.load(std::memory_order_relaxed);
}

Kernels kernels_for(int64_t group, int64_t head_dim, int64_t head_dim_v, int device) {
#if defined(PACKING_OPS_SM90)
  static const char* value = std::getenv("PACKING_OPS_SM90");
  static const bool wanted = value == nullptr || std::string_view(value) != "0";
  const bool served = group <= kMaxTileGroup && !is_wide(padded_dims(head_dim, head_dim_v).qk);
  if (!wanted || !served) return Kernels::kSm80;
  int major = 0;
  int minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  if (major == 9 && minor == 0 && max_shared_memory(device) >= 227 << 10) return Kernels::kSm90;
#endif
  return Kernels::kSm80;
}

AttentionTiles attention_tiles(int64_t group, int64_t head_dim, int64_t head_dim_v, int64_t packed_tokens, int device) {
  const auto [padded, padded_v] = padded_dims(head_dim, head_dim_v);
  AttentionTiles tiles;
  tiles.group = static_cast<int32_t>(group);
  tiles.kernels = kernels_for(group, head_dim, head_dim_v, device);
  const bool wgmma = tiles.kernels == Kernels::kSm90;
  tiles.forward_rows = wgmma ? wgmma_forward_tiles(padded, group, packed_tokens) * tile_tokens(group) * tiles.group
                             : forward_rows(padded, padded_v);
  tiles.forward_keys = forward_keys(padded);
  tiles.forward_by_document = wgmma;
  tiles.short_rows = kShortRows;
  const int64_t bytes = max_shared_memory(device);
  tiles.resident_max_keys = has_resident_forward(padded, bytes) ? kResidentMaxKeys : -1;
  const int32_t short_max_keys = has_short_forward(padded) && !wgmma ? kShortMaxKeysTimesGroup / tiles.group : -1;
  tiles.short_max_keys = short_max_keys > tiles.resident_max_keys ? short_max_keys : -1;
  const SmemTier tier = backward_tier(padded, padded_v, bytes);
  tiles.backward_rows = wgmma ? tile_tokens(group) * tiles.group : backward_rows(padded, tier);
  tiles.backward_keys = wgmma ? wgmma_backward_keys(padded) : backward_keys(padded, tier);
  const int small_keys = backward_small_keys(padded, tier);
  tiles.small_keys = std::max(small_keys, 0);
  const bool wgmma_from_small = wgmma && small_keys > 0;
  tiles.single_keys = small_keys >= 0 && !wgmma_from_small ? backward_keys(padded, tier) : 0;
  if (is_wide(padded)) {
    tiles.forward_rows = wide_forward_rows(tier);
    tiles.forward_keys = wide_forward_keys(tier);
  }
  return tiles;
}

}  // namespace packing_ops::attention
