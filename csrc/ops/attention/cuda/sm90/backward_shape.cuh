// The layout of the backward's shared memory, its barriers, and what a step is.
#pragma once

#include <numeric>
#include <type_traits>

#include "core/fork_alignment.h"
#include "core/ptx/barrier.cuh"
#include "core/ptx/bulk_copy.cuh"
#include "ops/attention/cuda/dq_ring.cuh"
#include "ops/attention/cuda/sm90/backward.h"
#include "ops/attention/cuda/sm90/copies.cuh"
#include "ops/attention/cuda/sm90/roles.cuh"

namespace packing_ops::attention::sm90 {

// Tiles are panels of 64 columns, a row 128 bytes whose 16-byte chunks are swizzled by the row: TMA writes and wgmma
// reads this layout. A step takes kTiles row tiles of the plan. What the consumer warpgroups divide: tiles.h.
template <int kDim_, int kDimV_>
struct BackwardShape : ConsumerWarpgroups<wgmma_backward_by_panels(kDim_) ? 3 : 2> {
  static constexpr int kDim = kDim_;    // of q and k
  static constexpr int kDimV = kDimV_;  // of v and dout
  static constexpr bool kByColumns = wgmma_backward_by_columns(kDim);
  static constexpr bool kByPanels = wgmma_backward_by_panels(kDim);
  static constexpr int kUnitKeys = wgmma_backward_keys(kDim);
  // Keys of one copy along a path of a prefix tree: those after them may be in another segment.
  static constexpr int kPathKeys = std::gcd(kUnitKeys, static_cast<int>(kForkAlignment));
  static constexpr int kTiles = wgmma_row_tiles(kDim);
  static constexpr int kRows = kTiles * kTileRows;
  // Columns of a warpgroup's products: of scores they are rows of the step, by panels keys; of dk and dv columns, by
  // panels keys.
  static constexpr int kScoreColumns = kByPanels ? kUnitKeys / 3 : kByColumns ? kRows / 2 : kRows;
  static constexpr int kSumColumns = kByPanels ? kUnitKeys : kByColumns ? kDim / 2 : kDim;
  static constexpr int kMaskedKeys = kByPanels ? kUnitKeys : 64;  // of a bit of BackwardStep::masked
  static constexpr int kStoredKeys = kByPanels ? kUnitKeys : 64;  // of dk and dv, by a thread
  static constexpr int kPanels = wgmma_panels(kDim);
  static constexpr int kPanelsV = wgmma_panels(kDimV);
  static constexpr bool kNarrowValues = kPanelsV < kPanels;  // a warpgroup has a panel of dk but not of dv
  static constexpr int kPanelQ = kRows * 128;                // and dout's
  static constexpr int kTileQ = kPanels * kPanelQ;           // bytes
  static constexpr int kTileDout = kPanelsV * kPanelQ;
  static constexpr int kPanelK = kUnitKeys * 128;  // and v's
  static constexpr int kTileK = kPanels * kPanelK;
  static constexpr int kTileV = kPanelsV * kPanelK;
  static constexpr int kDoutStages = kByPanels ? 1 : kRowStages;
  static constexpr int kRowBytes = kRowStages * kTileQ + kDoutStages * kTileDout;
  static constexpr int kPanelDs = kUnitKeys * 128;  // and p's. Of a row tile: a key's row has its 64 rows
  static constexpr int kTileDs = kTiles * kPanelDs;
  static constexpr int kRingFloats = kTileRows * kDim;  // partial dq of a row tile
  static constexpr int kTileDq = kTiles * kRingFloats * 4;
  static constexpr int kDqStages = wgmma_dq_stages(kDim);
  static constexpr int kKeyBytes = kKvStages * (kTileK + kTileV);
  static constexpr int kShared = kKeyBytes + kRowBytes + 2 * kTileDs + (kByColumns ? 0 : kDqStages * kTileDq) + 1024;
  static_assert(!kByColumns || kTileDq == kTileQ + kTileDout);
  static_assert(kByPanels ? kPanels == 3 && kTiles == 1 && kDqStages == 1 : !kNarrowValues);

  static PACKING_OPS_HOST_DEVICE int copied_keys(const Args& args) {
    return args.plan.pages.row_of_key == nullptr ? kUnitKeys : kPathKeys;
  }
  static __device__ __forceinline__ uint32_t tile_k(uint32_t base, int stage) {
    return base + stage * (kTileK + kTileV);
  }
  static __device__ __forceinline__ uint32_t tile_v(uint32_t base, int stage) { return tile_k(base, stage) + kTileK; }
  // A step's q and dout are next to each other, by panels all of q and then dout.
  static __device__ __forceinline__ uint32_t tile_q(uint32_t base, int stage) {
    return base + kKeyBytes + stage * (kByPanels ? kTileQ : kTileQ + kTileDout);
  }
  static __device__ __forceinline__ uint32_t tile_dout(uint32_t base, int stage) {
    return kByPanels ? tile_q(base, kRowStages) : tile_q(base, stage) + kTileQ;
  }
  static __device__ __forceinline__ uint32_t tile_ds(uint32_t base, int stage) {
    return base + kKeyBytes + kRowBytes + stage * kTileDs;
  }
  static __device__ __forceinline__ uint32_t tile_p(uint32_t base) { return tile_ds(base, 1); }  // where it is shared
  static __device__ __forceinline__ uint32_t tile_dq(uint32_t base, int stage) {
    return kByColumns ? tile_q(base, stage) : tile_ds(base, 2) + stage * kTileDq;
  }
};

// A key tile of a document and kv head.
struct BackwardUnit {
  DocumentView d;
  int32_t kv_head;
  int32_t first_key;
  int32_t steps;            // -1: there is no such unit, nor one after it
  Interval<int32_t> tiles;  // of rows that attend to its keys
  uint32_t ring_index;      // of row tile 0
};

// The stage that unit or step `idx` of a block uses, and the parity of its mbarrier phase there.
__device__ __forceinline__ int stage_of(uint32_t idx, int stages) {
  return static_cast<int>(idx % stages);
}
__device__ __forceinline__ int parity_of(uint32_t idx, int stages) {
  return static_cast<int>(idx / stages % 2);
}

// What becomes of a step's dq of a row tile.
enum class DqAction : int32_t {
  kNone,   // there is no row tile
  kStore,  // to dq: no other key tile has any
  kPut,    // to the ring, as the first
  kAdd,    // to the ring
  kFinish  // to dq, with the ring's
};

struct BackwardTile {
  int32_t token;  // its first, in the document or before it; the document's end without a row tile
  int32_t rows;   // up to the document's end
  DqTicket ticket;
  uint32_t next_ticket;
  DqAction action;
};

template <class Shape>
struct BackwardStep {
  BackwardTile tiles[Shape::kTiles];
  int32_t start_q;  // of the document
  int32_t first_head;
  int32_t opens;    // index in `units` of the unit whose first step this is; -1: not a first step
  uint32_t masked;  // bit w: some pair of rows and the unit's w-th kMaskedKeys keys is
  bool exists;      // if not, no later one does
};

// Barriers of only one way of dividing a step. Not in one struct: static and dynamic shared memory fill a block's 227
// KiB.
struct PanelBarriers {
  uint64_t dout_full;  // of only dout, which has a stage less than q. Elsewhere q_full and q_empty are dout's too
  uint64_t dout_empty;
  __device__ void init(int warps) {
    ptx::mbarrier_init(&dout_full, 1);
    ptx::mbarrier_init(&dout_empty, warps);
  }
};
struct ColumnBarriers {
  uint64_t rows_read;  // wgmma has read q and dout, dq may overwrite them
  __device__ void init(int warps) { ptx::mbarrier_init(&rows_read, warps); }
};
struct KeyBarriers {
  uint64_t scores_issued;  // by the first warpgroup
  __device__ void init(int) { ptx::mbarrier_init(&scores_issued, kWarpgroupWarps); }
};
template <class Shape>
using OwnBarriers = std::conditional_t<Shape::kByPanels, PanelBarriers,
                                       std::conditional_t<Shape::kByColumns, ColumnBarriers, KeyBarriers>>;

// full: copies have written it. empty: all readers are done.
template <class Shape>
struct BackwardBarriers : OwnBarriers<Shape> {
  float lse[kRowStages][Shape::kRows];      // times log2(e)
  float row_sum[kRowStages][Shape::kRows];  // rowsum(dout * out) - dlse
  BackwardStep<Shape> steps[kStepStages];
  BackwardUnit units[kUnitStages];         // as kv_full says
  int32_t first_tokens[Shape::kUnitKeys];  // that see the unit's keys, as q_full of its steps says: if there is
                                           // visible_end
  uint64_t kv_full[kKvStages];
  uint64_t kv_empty[kKvStages];  // dk and dv have left it
  uint64_t q_full[kRowStages];
  uint64_t q_empty[kRowStages];
  uint64_t ds_full[2];
  uint64_t described[kStepStages];
  uint64_t dq_ticket_ready[kStepStages];        // the step's dq may be added
  uint64_t dq_ticket_published[kStepStages];    // its next ticket is in memory
  uint64_t dq_full[kDqSenders];                 // of every kDqSenders-th step
  uint64_t dq_empty[Shape::kDqStages];          // by columns q_empty says it
  uint64_t keys_read;                           // by the unit's last wgmma
  uint64_t staged[Shape::kConsumerWarpgroups];  // dk and dv of a warpgroup

  __device__ void init() {
    for (int i = 0; i < kKvStages; ++i) {
      ptx::mbarrier_init(&kv_full[i], 1);
      ptx::mbarrier_init(&kv_empty[i], Shape::kConsumerWarpgroups);
    }
    for (int i = 0; i < kRowStages; ++i) {
      ptx::mbarrier_init(&q_full[i], 1 + kWarpThreads);  // q and dout, and each lane's lse and row_sum
      ptx::mbarrier_init(&q_empty[i], Shape::kByColumns ? 1 : Shape::kConsumerWarps);
    }
    for (int i = 0; i < kStepStages; ++i) {
      ptx::mbarrier_init(&described[i], 1);
      ptx::mbarrier_init(&dq_ticket_ready[i], 1);
      ptx::mbarrier_init(&dq_ticket_published[i], 1);
    }
    for (int i = 0; i < kDqSenders; ++i) ptx::mbarrier_init(&dq_full[i], Shape::kConsumerWarps);
    for (int i = 0; i < Shape::kDqStages; ++i) ptx::mbarrier_init(&dq_empty[i], 1);
    for (int i = 0; i < 2; ++i) ptx::mbarrier_init(&ds_full[i], Shape::kConsumerWarps);
    for (int i = 0; i < Shape::kConsumerWarpgroups; ++i) ptx::mbarrier_init(&staged[i], kWarpgroupWarps);
    ptx::mbarrier_init(&keys_read, Shape::kConsumerWarps);
    OwnBarriers<Shape>::init(Shape::kConsumerWarps);
    ptx::fence_mbarrier_init();
  }
};

// A consumer's wait for a step's q_full, which is tested in the step before while its products run: a wait costs clocks
// even after the phase has completed (README.md).
template <class Shape>
struct RowsOfStep {
  bool arrived = false;

  __device__ __forceinline__ void look_for(BackwardBarriers<Shape>& shared, uint32_t step_idx) {
    arrived = ptx::mbarrier_test_wait(&shared.q_full[stage_of(step_idx, kRowStages)], parity_of(step_idx, kRowStages));
  }
  __device__ __forceinline__ void wait(BackwardBarriers<Shape>& shared, uint32_t step_idx) const {
    if (!arrived) ptx::mbarrier_wait(&shared.q_full[stage_of(step_idx, kRowStages)], parity_of(step_idx, kRowStages));
  }
};

}  // namespace packing_ops::attention::sm90
