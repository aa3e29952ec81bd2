// Which threads of a block do what. A block is one producer warpgroup, whose warps copy and have a role each, and two
// or three consumer warpgroups, which compute.
#pragma once

#include <cstdint>

namespace packing_ops::attention::sm90 {

constexpr int kWarpThreads = 32;
constexpr int kWarpgroupWarps = 4;
constexpr int kWarpgroupThreads = kWarpgroupWarps * kWarpThreads;

// Warpgroups, warps and threads of a block, and setmaxnreg's registers of a thread: 128 * 40 + 256 * 232 and
// 128 * 32 + 384 * 160 fit 65,536. With two, 24 and 240 spill in the producer.
template <int kCount>
struct ConsumerWarpgroups {
  static_assert(kCount == 2 || kCount == 3);
  static constexpr int kConsumerWarpgroups = kCount;
  static constexpr int kConsumerWarps = kCount * kWarpgroupWarps;
  static constexpr int kConsumerThreads = kConsumerWarps * kWarpThreads;
  static constexpr int kThreads = kWarpgroupThreads + kConsumerThreads;
  static constexpr int kProducerRegisters = kCount == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kCount == 2 ? 232 : 160;
};

// A role's value is its warp. Roles that only issue copies run on the warp's first thread.
enum class Role : int {
  // forward
  kLoadKeysAndValues = 0,
  kLoadQueries = 1,
  kStoreOut = 3,
  // backward
  kLoadUnits = 0,
  kLoadRowStats = 1,
  kSendDq = 2  // the first of kDqSenders warps
};

// They alternate at the steps' dq: one is too slow (README.md).
constexpr int kDqSenders = 2;
static_assert(static_cast<int>(Role::kSendDq) + kDqSenders == kWarpgroupWarps);

constexpr int warp_of(Role role) {
  return static_cast<int>(role);
}
constexpr uint32_t first_thread_of(Role role) {
  return static_cast<uint32_t>(role) * kWarpThreads;
}

// x, which is the same in all lanes, where the compiler does not see that. What is worked out from it is then in
// uniform registers, as the descriptors of wgmma have to be; else each is moved there in front of its wgmma.
template <class T>
__device__ __forceinline__ T warp_uniform(T x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

}  // namespace packing_ops::attention::sm90
