// What lies where in the forward's shared memory, and its barriers.
#pragma once

#include "core/ptx/barrier.cuh"
#include "core/ptx/bulk_copy.cuh"
#include "ops/attention/cuda/mask.cuh"
#include "ops/attention/cuda/persistent.cuh"
#include "ops/attention/cuda/sm90/copies.cuh"
#include "ops/attention/cuda/sm90/forward.h"

namespace packing_ops::attention::sm90 {

constexpr int kStagesV = 2;

// Tiles are panels of 64 columns, a row 128 bytes whose 16-byte chunks are permuted by the row: what bulk copies write
// and products read.
template <int kDim_>
struct ForwardShape {
  static constexpr int kDim = kDim_;
  static constexpr int kStagesK = kDim == 64 ? 4 : 2;
  static constexpr bool kStream = kDim == 64;  // a unit's first scores are worked out beside the last one's last values
  static constexpr int kThreads = 384;
  static constexpr int kPanels = kDim / 64;
  static constexpr int kPanelQ = kTileRows * 128;
  static constexpr int kTileQ = kPanels * kPanelQ;  // bytes
  static constexpr int kPanelK = kKeys * 128;
  static constexpr int kTileK = kPanels * kPanelK;
  static constexpr int kShared = 4 * kTileQ + (kStagesK + kStagesV) * kTileK + 1024;

  // Of the warpgroup's tile of the unit at place 0 or 1; out goes there too, once nobody reads q any more.
  static __device__ __forceinline__ uint32_t tile_q(uint32_t base, int place, int warpgroup) {
    return base + (2 * place + warpgroup) * kTileQ;
  }
  static __device__ __forceinline__ uint32_t tile_k(uint32_t base, int stage) {
    return base + 4 * kTileQ + stage * kTileK;
  }
  static __device__ __forceinline__ uint32_t tile_v(uint32_t base, int stage) {
    return tile_k(base, kStagesK) + stage * kTileK;
  }
};

struct ForwardUnit {
  DocumentView d;
  int32_t token;  // first of the unit, in the document
  int32_t kv_head;
  int32_t first_tile;  // of keys
  int32_t end_tile;    // at least one tile, also where no key is seen

  static __device__ __forceinline__ ForwardUnit make(const ForwardArgs& args, const PlanEntry& entry, int32_t kv_head) {
    const DocumentWithEnds d = document_with_ends(entry, args.common.plan);
    const int32_t end_token = entry.first_token + 2 * args.tile_tokens;
    const Interval<int32_t> keys = d.visible_keys(entry.first_token, (end_token < d.tokens ? end_token : d.tokens) - 1);
    const int32_t first = keys.begin / kKeys;
    return {d, entry.first_token, kv_head, first, keys.empty() ? first + 1 : (keys.end - 1) / kKeys + 1};
  }
};

// full: the copy engine has written it. empty: all that read it are done.
template <class Shape>
struct ForwardBarriers {
  ForwardUnit units[2];            // as q_full says
  int32_t ends[2][2 * kTileRows];  // DocumentWithEnds::end_of their tokens
  uint64_t q_full[2];
  uint64_t q_empty[2];  // out has left it
  uint64_t out_full[2][2];
  uint64_t k_full[Shape::kStagesK];
  uint64_t k_empty[Shape::kStagesK];
  uint64_t v_full[kStagesV];
  uint64_t v_empty[kStagesV];

  __device__ void init() {
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(&q_full[i], 1);
      ptx::mbarrier_init(&q_empty[i], 1);
      for (int w = 0; w < 2; ++w) ptx::mbarrier_init(&out_full[i][w], 4);
    }
    for (int i = 0; i < Shape::kStagesK; ++i) {
      ptx::mbarrier_init(&k_full[i], 1);
      ptx::mbarrier_init(&k_empty[i], 8);
    }
    for (int i = 0; i < kStagesV; ++i) {
      ptx::mbarrier_init(&v_full[i], 1);
      ptx::mbarrier_init(&v_empty[i], 8);
    }
    ptx::barriers_initialised();
  }
};

// A block's units, one round after the other.
struct ForwardRounds {
  uint32_t units;

  __device__ explicit ForwardRounds(const ForwardArgs& args)
      : units(static_cast<uint32_t>(args.common.plan.data[PlanView::kForward]) * args.common.num_kv_heads) {}
  __device__ __forceinline__ bool has(uint32_t round) const { return serpentine(round) < units; }
  __device__ __forceinline__ ForwardUnit unit(const ForwardArgs& args, uint32_t round) const {
    const uint32_t place = args.common.kv_heads.quotient(serpentine(round));
    return ForwardUnit::make(args, args.common.plan.entries[PlanView::kForward][place],
                             static_cast<int32_t>(serpentine(round) - place * args.common.kv_heads.value));
  }
};

}  // namespace packing_ops::attention::sm90
