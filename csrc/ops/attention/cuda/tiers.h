// Which of sm80's instances a GPU runs, by its shared memory, and which of them are in the library.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "ops/attention/cuda/tiles.h"

namespace packing_ops::attention {

// The largest tier whose tiles fit into bytes of shared memory.
constexpr SmemTier backward_tier(int padded, int padded_v, int64_t bytes) {
  const int row_sums = is_wide(padded) ? 0 : 1024;  // BackwardShape::kRowSums, at most
  for (const SmemTier tier : {SmemTier::k227KB, SmemTier::k163KB}) {
    if (backward_shared(padded, padded_v, backward_keys(padded, tier), tier) + row_sums <= bytes) return tier;
  }
  return has_99kb_tier(padded) ? SmemTier::k99KB : SmemTier::k163KB;
}

// KB of shared memory that a block may have on the GPUs that the library is for, such as " 99 163 " (tools/nvcc.py).
#if defined(PACKING_OPS_SHARED_MEMORY_KB)
constexpr std::string_view kSharedMemoryKb = " " PACKING_OPS_SHARED_MEMORY_KB " ";
#else
constexpr std::string_view kSharedMemoryKb = " 99 163 227 ";
#endif
// Whether has(bytes of shared memory) holds for one of these GPUs. Instances that none of them runs are not in the
// library.
template <class F>
constexpr bool has_some_gpu(F has) {
  const auto is_among = [](std::string_view name) { return kSharedMemoryKb.find(name) != std::string_view::npos; };
  return (is_among(" 99 ") && has(99 << 10)) || (is_among(" 163 ") && has(163 << 10)) ||
         (is_among(" 227 ") && has(227 << 10));
}
constexpr bool is_tier_built(int padded, int padded_v, SmemTier tier) {
  return has_some_gpu([=](int64_t bytes) { return backward_tier(padded, padded_v, bytes) == tier; });
}
constexpr bool is_resident_built(int padded) {
  return has_some_gpu([=](int64_t bytes) { return has_resident_forward(padded, bytes); });
}

}  // namespace packing_ops::attention
