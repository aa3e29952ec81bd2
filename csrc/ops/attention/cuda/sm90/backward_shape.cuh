// What lies where in the backward's shared memory, its barriers, and what a step is.
#pragma once

#include "core/ptx/barrier.cuh"
#include "core/ptx/bulk_copy.cuh"
#include "ops/attention/cuda/dq_ring.cuh"
#include "ops/attention/cuda/sm90/backward.h"
#include "ops/attention/cuda/sm90/copies.cuh"

namespace packing_ops::attention::sm90 {

constexpr int kUnitsKnown = 2;  // units that are described: those before them have left their keys
constexpr int kUnitsAhead = 1;  // of them, whose keys are in shared memory
constexpr int kRowStages = 2;   // steps whose rows are
constexpr int kStepsKnown = 4;  // steps that are described: until their dq has been told of

// Tiles are panels of 64 columns, a row 128 bytes whose 16-byte chunks are permuted by the row: what bulk copies write
// and products read. A step takes kTiles row tiles of the plan. The two computing warpgroups divide a unit's keys, or
// where dk and dv of 64 keys fill the registers of both (above 128 columns), the rows of scores and the columns of
// sums.
template <int kDim_>
struct BackwardShape {
  static constexpr int kDim = kDim_;
  static constexpr int kThreads = 384;
  static constexpr bool kByColumns = kDim > 128;
  static constexpr int kUnitKeys = kByColumns ? kKeys / 2 : kKeys;
  static constexpr int kTiles = kByColumns ? 1 : 128 / kDim;
  static constexpr int kRows = kTiles * kTileRows;
  static constexpr int kScoreRows = kByColumns ? kRows / 2 : kRows;  // of a warpgroup
  static constexpr int kSumColumns = kByColumns ? kDim / 2 : kDim;
  static constexpr int kPanels = kDim / 64;
  static constexpr int kPanelQ = kRows * 128;
  static constexpr int kTileQ = kPanels * kPanelQ;  // bytes
  static constexpr int kPanelK = kUnitKeys * 128;
  static constexpr int kTileK = kPanels * kPanelK;
  static constexpr int kPanelDs = kUnitKeys * 128;  // of a row tile: a key's row has its 64 rows. By columns, p's too
  static constexpr int kTileDs = kTiles * kPanelDs;
  static constexpr int kRingFloats = kTileRows * kDim;  // partial dq of a row tile
  static constexpr int kTileDq = kTiles * kRingFloats * 4;
  // Steps whose dq is in shared memory. By columns it takes the place of its step's q and dout.
  static constexpr int kDqStages = kByColumns ? kRowStages : kDim == 64 ? 1 : 2;
  static constexpr int kShared =
      2 * kUnitsAhead * kTileK + 2 * kRowStages * kTileQ + 2 * kTileDs + (kByColumns ? 0 : kDqStages * kTileDq) + 1024;
  static_assert(kKeys % kUnitKeys == 0);
  static_assert(!kByColumns || kTileDq == 2 * kTileQ);

  static __device__ __forceinline__ uint32_t tile_k(uint32_t base, int stage) { return base + 2 * stage * kTileK; }
  static __device__ __forceinline__ uint32_t tile_v(uint32_t base, int stage) { return tile_k(base, stage) + kTileK; }
  static __device__ __forceinline__ uint32_t tile_q(uint32_t base, int stage) {
    return base + 2 * kUnitsAhead * kTileK + 2 * stage * kTileQ;
  }
  static __device__ __forceinline__ uint32_t tile_dout(uint32_t base, int stage) {
    return tile_q(base, stage) + kTileQ;
  }
  static __device__ __forceinline__ uint32_t tile_ds(uint32_t base, int stage) {
    return base + 2 * kUnitsAhead * kTileK + 2 * kRowStages * kTileQ + stage * kTileDs;
  }
  static __device__ __forceinline__ uint32_t tile_p(uint32_t base) { return tile_ds(base, 1); }  // by columns
  static __device__ __forceinline__ uint32_t tile_dq(uint32_t base, int stage) {
    return kByColumns ? tile_q(base, stage) : tile_ds(base, 2) + stage * kTileDq;
  }
};

// A key tile of a document and kv head.
struct BackwardUnit {
  DocumentView d;
  int32_t kv_head;
  int32_t first_key;
  int32_t steps;            // -1: there is no such unit, and none after it
  Interval<int32_t> tiles;  // of rows that attend to its keys
  uint32_t ring_index;      // of row tile 0
};

// Which of a ring's stages a turn takes, and whether its phase there is an odd one.
__device__ __forceinline__ int stage_of(uint32_t turn, int stages) {
  return static_cast<int>(turn % stages);
}
__device__ __forceinline__ int odd_of(uint32_t turn, int stages) {
  return static_cast<int>(turn / stages % 2);
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
  int32_t token;  // its first, in the document; the document's end where there is no row tile
  int32_t rows;   // that exist
  DqTicket ticket;
  uint32_t next_ticket;
  DqAction action;
};

template <class Shape>
struct BackwardStep {
  BackwardTile tiles[Shape::kTiles];
  int32_t start_q;  // of the document
  int32_t first_head;
  int32_t opens;    // the unit that it is the first step of, as a place in `units`; -1: no unit's
  uint32_t masked;  // bit w: some pair of rows and the unit's w-th 64 keys is
  bool exists;      // if not, none after it does
};

// full: copies have written it. empty: all that read it are done.
template <class Shape>
struct BackwardBarriers {
  float lse[kRowStages][Shape::kRows];      // times log2(e)
  float row_sum[kRowStages][Shape::kRows];  // rowsum(dout * out) - dlse
  BackwardStep<Shape> steps[kStepsKnown];
  BackwardUnit units[kUnitsKnown];         // as kv_full says
  int32_t first_tokens[Shape::kUnitKeys];  // that see the unit's keys, as q_full of its steps says: where there is
                                           // visible_end
  uint64_t kv_full[kUnitsAhead];
  uint64_t kv_empty[kUnitsAhead];  // dk and dv have left it
  uint64_t q_full[kRowStages];
  uint64_t q_empty[kRowStages];
  uint64_t ds_full[2];
  uint64_t described[kStepsKnown];
  uint64_t turn[kStepsKnown];  // dq may be added
  uint64_t told[kStepsKnown];  // other units know that it has been
  uint64_t dq_full[Shape::kDqStages];
  uint64_t dq_empty[Shape::kDqStages];  // by columns q_empty says it
  uint64_t rows_read;                   // by the step's products: by columns, before dq takes their place
  uint64_t keys_read;                   // by the unit's last products
  uint64_t staged[2];                   // dk and dv of a warpgroup

  __device__ void init() {
    for (int i = 0; i < kUnitsAhead; ++i) {
      ptx::mbarrier_init(&kv_full[i], 1);
      ptx::mbarrier_init(&kv_empty[i], 2);
    }
    for (int i = 0; i < kRowStages; ++i) {
      ptx::mbarrier_init(&q_full[i], 1 + 32);  // q and dout, and each lane's lse and row_sum
      ptx::mbarrier_init(&q_empty[i], Shape::kByColumns ? 1 : 8);
    }
    for (int i = 0; i < kStepsKnown; ++i) {
      ptx::mbarrier_init(&described[i], 1);
      ptx::mbarrier_init(&turn[i], 1);
      ptx::mbarrier_init(&told[i], 1);
    }
    for (int i = 0; i < Shape::kDqStages; ++i) {
      ptx::mbarrier_init(&dq_full[i], 8);
      ptx::mbarrier_init(&dq_empty[i], 1);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(&ds_full[i], 8);
      ptx::mbarrier_init(&staged[i], 4);
    }
    ptx::mbarrier_init(&rows_read, 8);
    ptx::mbarrier_init(&keys_read, 8);
    ptx::fence_mbarrier_init();
  }
};

}  // namespace packing_ops::attention::sm90
