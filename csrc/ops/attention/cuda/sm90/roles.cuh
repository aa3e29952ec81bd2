// Which threads of a block do what. A block is one producer warpgroup, whose warps copy and have a role each, and two
// consumer warpgroups, which compute. The backward with 192 columns (by panels) has three.
#pragma once

#include <cstdint>

namespace packing_ops::attention::sm90 {

constexpr int kWarpThreads = 32;
constexpr int kWarpgroupWarps = 4;
constexpr int kWarpgroupThreads = kWarpgroupWarps * kWarpThreads;
constexpr int kConsumerWarpgroups = 2;
constexpr int kConsumerWarps = kConsumerWarpgroups * kWarpgroupWarps;
constexpr int kConsumerThreads = kConsumerWarps * kWarpThreads;
constexpr int kBlockThreads = kWarpgroupThreads + kConsumerThreads;

// Of a thread. 24 and 240 spill in the producer.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
constexpr int kPanelsProducerRegisters = 32;  // by panels
constexpr int kPanelsConsumerRegisters = 160;

// A role's value is its warp. Roles that issue copies alone run on the warp's first thread.
enum class Role : int {
  // forward
  kLoadKeysAndValues = 0,
  kLoadQueries = 1,
  kStoreOut = 3,
  // backward
  kLoadUnits = 0,
  kLoadRowStats = 1,
  kWaitForTickets = 2,
  kSendDq = 3
};

constexpr int warp_of(Role role) {
  return static_cast<int>(role);
}
constexpr uint32_t first_thread_of(Role role) {
  return static_cast<uint32_t>(role) * kWarpThreads;
}

}  // namespace packing_ops::attention::sm90
