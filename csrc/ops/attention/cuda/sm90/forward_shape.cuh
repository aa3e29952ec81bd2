// The layout of the forward's shared memory, and its barriers.
#pragma once

#include "core/ptx/barrier.cuh"
#include "core/ptx/bulk_copy.cuh"
#include "ops/attention/cuda/mask.cuh"
#include "ops/attention/cuda/sm90/copies.cuh"
#include "ops/attention/cuda/sm90/forward.h"
#include "ops/attention/cuda/sm90/roles.cuh"

namespace packing_ops::attention::sm90 {

// Tiles are panels of 64 columns, a row 128 bytes whose 16-byte chunks are swizzled by the row: TMA writes and wgmma
// reads this layout.
template <int kDim_, int kDimV_, int kTiles_>
struct ForwardShape : ConsumerWarpgroups<kTiles_> {
  static constexpr int kDim = kDim_;    // of q and k
  static constexpr int kDimV = kDimV_;  // of v and out
  static constexpr int kKeys = wgmma_forward_keys(kDimV);
  static constexpr int kStagesQ = wgmma_q_stages(kDim);
  static constexpr int kStagesKv = wgmma_kv_stages(kDim);
  static constexpr bool kOutThroughQ = kStagesQ == 2;  // out goes through its q tile; else from registers to memory
  static constexpr int kTiles = kTiles_;               // of a unit's rows, one for each consumer warpgroup
  // A warpgroup's scores of a step overlap its values of the step before, where registers hold both steps.
  static constexpr bool kScoresBesideValues = kTiles == 2 || kDim == 64;
  static constexpr int kPanelsK = wgmma_panels(kDim);
  static constexpr int kPanelsV = wgmma_panels(kDimV);
  static constexpr int kPanelQ = kTileRows * 128;
  static constexpr int kTileQ = kPanelsK * kPanelQ;  // bytes
  static constexpr int kPanelK = kKeys * 128;        // of v too
  static constexpr int kTileK = kPanelsK * kPanelK;  // v's is not larger
  static constexpr int kShared = kTiles * kStagesQ * kTileQ + kStagesKv * kTileK + 1024;
  static_assert(kPanelsV <= kPanelsK && (!kOutThroughQ || kDim == kDimV));

  // Of the warpgroup's tile.
  static __device__ __forceinline__ uint32_t tile_q(uint32_t base, int stage, int warpgroup) {
    return base + (kTiles * stage + warpgroup) * kTileQ;
  }
  static __device__ __forceinline__ uint32_t tile_kv(uint32_t base, int stage) {
    return base + kTiles * kStagesQ * kTileQ + stage * kTileK;
  }
};

struct ForwardUnit {
  DocumentView d;
  int32_t token;  // first of the unit, in the document
  int32_t kv_head;
  int32_t first_tile;  // of keys
  int32_t end_tile;    // at least one tile, also where no key is seen; 0: there is no such unit, nor one after it

  __device__ __forceinline__ bool exists() const { return end_tile > 0; }

  static __device__ __forceinline__ ForwardUnit make(const ForwardArgs& args, const PlanEntry& entry, int32_t kv_head,
                                                     int32_t tiles, int32_t step_keys) {
    const DocumentWithEnds d = document_with_ends(entry, args.common.plan);
    const int32_t end_token = entry.first_token + tiles * args.tile_tokens;
    const Interval<int32_t> keys = d.visible_keys(entry.first_token, (end_token < d.tokens ? end_token : d.tokens) - 1);
    const int32_t first = keys.begin / step_keys;
    return {d, entry.first_token, kv_head, first, keys.empty() ? first + 1 : (keys.end - 1) / step_keys + 1};
  }
};

// full: TMA has written it. empty: all readers are done.
template <class Shape>
struct ForwardBarriers {
  ForwardUnit units[kForwardUnitStages];       // by round; valid once described[] completes
  int32_t ends[2][Shape::kTiles * kTileRows];  // end_of its tokens; valid once q_full completes
  uint64_t described[kForwardUnitStages];
  uint64_t q_full[Shape::kStagesQ];
  uint64_t q_empty[Shape::kStagesQ];                  // q has been read, and out stored where it goes through q's tile
  uint64_t out_full[Shape::kStagesQ][Shape::kTiles];  // only with kOutThroughQ
  uint64_t kv_full[Shape::kStagesKv];
  uint64_t kv_empty[Shape::kStagesKv];

  __device__ __forceinline__ const ForwardUnit& unit(uint32_t round) const { return units[round % kForwardUnitStages]; }
  // Whether the block has a unit in this round. Waits for its description.
  __device__ __forceinline__ bool has_unit(uint32_t round) {
    ptx::mbarrier_wait(&described[round % kForwardUnitStages], static_cast<int>(round / kForwardUnitStages % 2));
    return unit(round).exists();
  }

  __device__ void init() {
    for (int i = 0; i < kForwardUnitStages; ++i) ptx::mbarrier_init(&described[i], 1);
    for (int i = 0; i < Shape::kStagesQ; ++i) {
      ptx::mbarrier_init(&q_full[i], 1);
      ptx::mbarrier_init(&q_empty[i], Shape::kOutThroughQ ? 1 : Shape::kConsumerWarps);
      for (int w = 0; w < Shape::kTiles; ++w) ptx::mbarrier_init(&out_full[i][w], kWarpgroupWarps);
    }
    for (int i = 0; i < Shape::kStagesKv; ++i) {
      ptx::mbarrier_init(&kv_full[i], 1);
      ptx::mbarrier_init(&kv_empty[i], Shape::kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
};

// None of a plan whose tiles may not be by document: check_plan reports it.
__device__ __forceinline__ uint32_t count_units(const ForwardArgs& args) {
  const PlanView& plan = args.common.plan;
  if (plan.data[PlanView::kGeometry] != plan.geometry()) return 0;
  return static_cast<uint32_t>(plan.data[PlanView::kForward]) * args.common.kv_heads.value;
}

constexpr uint32_t kForwardParts = 8;

// A document's entries of the plan, each the rows of a unit, the costliest first, are cut into parts. Units are a part
// for the first kv head, then for the next; then the next part. Blocks that run at the same time read the same keys
// from L2, and the last units cost little.
template <class Shape>
__device__ __forceinline__ ForwardUnit describe_unit(const ForwardArgs& args, uint32_t index) {
  const Divisor& kv_heads = args.common.kv_heads;
  const PlanEntry* entries = args.common.plan.entries[PlanView::kForward];
  const uint32_t some = kv_heads.quotient(index);  // an entry of the document
  const auto count = static_cast<uint32_t>(entries[some].document_tiles);
  const uint32_t first = some - (count - 1 - static_cast<uint32_t>(entries[some].tile));
  const uint32_t unit = index - first * kv_heads.value;
  const uint32_t part_entries = (count + kForwardParts - 1) / kForwardParts;
  const uint32_t part_first = unit / (part_entries * kv_heads.value) * part_entries;
  const uint32_t in_part = unit - part_first * kv_heads.value;
  const uint32_t part_size = part_entries < count - part_first ? part_entries : count - part_first;
  const uint32_t kv_head = in_part / part_size;
  return ForwardUnit::make(args, entries[first + part_first + in_part - kv_head * part_size],
                           static_cast<int32_t>(kv_head), Shape::kTiles, Shape::kKeys);
}

}  // namespace packing_ops::attention::sm90
