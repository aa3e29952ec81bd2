// What the forward's producer warpgroup does: a role each for keys and values, for q, and for out (kOutThroughQ).
#pragma once

#include "ops/attention/cuda/pages.cuh"
#include "ops/attention/cuda/sm90/forward_shape.cuh"

namespace packing_ops::attention::sm90 {

// In the order in which they are used: keys of a step, then values of the step before, or of this step.
template <class Shape>
__device__ __forceinline__ void load_keys_and_values(const ForwardArgs& args, ForwardBarriers<Shape>& shared,
                                                     uint32_t base) {
  PipelineState<Shape::kStagesKv> kv;
  const auto load = [&](const CUtensorMap& map, int panels, const ptx::TmaCoords& start) {
    ptx::mbarrier_wait(&shared.kv_empty[kv.stage], kv.parity ^ 1);
    uint64_t* const full = &shared.kv_full[kv.stage];
    const uint32_t tile = Shape::tile_kv(base, kv.stage);
    ptx::mbarrier_arrive_expect_tx(full, panels * Shape::kPanelK);
#pragma unroll
    for (int panel = 0; panel < panels; ++panel) {
      ptx::tma_load(tile + panel * Shape::kPanelK, map, {64 * panel, start.at[1], start.at[2], start.at[3], kMapTokens},
                    full);
    }
    kv.next();
  };
  for (uint32_t round = 0; shared.has_unit(round); ++round) {
    const ForwardUnit unit = shared.unit(round);
    static_assert(kForkAlignment % Shape::kKeys == 0);  // a tile is in one page
    ptx::TmaCoords values{};                            // of the step before
#pragma unroll 1
    for (int32_t tile = unit.first_tile; tile < unit.end_tile; ++tile) {
      const int32_t first_key = tile * Shape::kKeys;
      const DocumentTokens tokens(row_of_key(args.common, unit.d, first_key) - first_key, unit.d.keys);
      const ptx::TmaCoords keys = {0, tokens.before_end + first_key, unit.kv_head, tokens.to_end, kMapTokens};
      load(args.k, Shape::kPanelsK, keys);
      if constexpr (Shape::kScoresBesideValues) {
        if (tile > unit.first_tile) load(args.v, Shape::kPanelsV, values);
        values = keys;
      } else {
        load(args.v, Shape::kPanelsV, keys);
      }
    }
    if constexpr (Shape::kScoresBesideValues) load(args.v, Shape::kPanelsV, values);
  }
}

// By a warp: end_of the unit's tokens, and of the document's last for those beyond it. Loaded while the stage is still
// in use.
template <int kTiles>
struct UnitEnds {
  static constexpr int kCount = kTiles * kTileRows / 32;  // of a lane
  int32_t of[kCount];

  __device__ __forceinline__ UnitEnds(const ForwardArgs& args, const ForwardUnit& unit) {
    const DocumentWithEnds d{unit.d, args.common.plan.ends};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int32_t token = unit.token + 32 * i + static_cast<int32_t>(threadIdx.x & 31);
      of[i] = d.end_of(token < d.tokens ? token : d.tokens - 1);
    }
  }
  __device__ __forceinline__ void store(int32_t (&to)[kTiles * kTileRows]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[32 * i + (threadIdx.x & 31)] = of[i];
    __syncwarp();
  }
};

template <class Shape>
__device__ __forceinline__ void load_queries(const ForwardArgs& args, ForwardBarriers<Shape>& shared, uint32_t base) {
  const bool first_lane = (threadIdx.x & 31) == 0;
  PipelineState<Shape::kStagesQ> q;
  const uint32_t units = count_units(args);
  uint32_t index = blockIdx.x;  // later units go to the blocks that ask first
  const auto claim = [&] { index = gridDim.x + atomicAdd(args.common.counters, 1); };
  for (uint32_t round = 0;; ++round, q.next()) {
    const ForwardUnit unit = index < units ? describe_unit<Shape>(args, index) : ForwardUnit{};
    if (first_lane) {
      shared.units[round % kForwardUnitStages] = unit;
      ptx::mbarrier_arrive(&shared.described[round % kForwardUnitStages]);
      if (round > 0) claim();  // the first waits below, behind the loads of q
    }
    if (!unit.exists()) return;
    const UnitEnds<Shape::kTiles> ends(args, unit);
    const DocumentTokens tokens(unit.d.start_q, unit.d.tokens);
    ptx::mbarrier_wait(&shared.q_empty[q.stage], q.parity ^ 1);
    ends.store(shared.ends[round & 1]);
    if (first_lane) {
      ptx::mbarrier_arrive_expect_tx(&shared.q_full[q.stage],
                                     Shape::kTiles * Shape::kPanelsK * 128 * args.tile_tokens * args.common.group);
#pragma unroll
      for (int w = 0; w < Shape::kTiles; ++w) {
#pragma unroll
        for (int panel = 0; panel < Shape::kPanelsK; ++panel) {
          const ptx::TmaCoords start = {64 * panel, unit.kv_head * args.common.group,
                                        tokens.before_end + unit.token + w * args.tile_tokens, tokens.to_end,
                                        kMapTokens};
          ptx::tma_load(Shape::tile_q(base, q.stage, w) + panel * Shape::kPanelQ, args.q, start,
                        &shared.q_full[q.stage]);
        }
      }
      if (round == 0) {
        ptx::griddepcontrol_wait();  // for the counter's 0
        claim();
      }
    }
    index = __shfl_sync(0xffffffffu, index, 0);
  }
}

template <class Shape>
__device__ __forceinline__ void store_out(const ForwardArgs& args, ForwardBarriers<Shape>& shared, uint32_t base) {
  PipelineState<Shape::kStagesQ> q;
  for (uint32_t round = 0; shared.has_unit(round); ++round) {
    const ForwardUnit& unit = shared.unit(round);
#pragma unroll 1
    for (int w = 0; w < Shape::kTiles; ++w) {
      ptx::mbarrier_wait(&shared.out_full[q.stage][w], q.parity);
      const DocumentTokens tokens(unit.d.start_q, unit.d.tokens);
#pragma unroll
      for (int panel = 0; panel < Shape::kPanelsK; ++panel) {
        const ptx::TmaCoords start = {64 * panel, unit.kv_head * args.common.group,
                                      tokens.before_end + unit.token + w * args.tile_tokens, tokens.to_end, kMapTokens};
        ptx::tma_store(args.out, start, Shape::tile_q(base, q.stage, w) + panel * Shape::kPanelQ);
      }
      ptx::bulk_commit_group();
    }
    ptx::bulk_wait_group_read();
    ptx::mbarrier_arrive(&shared.q_empty[q.stage]);
    q.next();
  }
}

}  // namespace packing_ops::attention::sm90
