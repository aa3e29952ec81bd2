// Arithmetic of the backward's consumer warpgroups in registers, however they divide a step.
#pragma once

#include "core/ptx/wgmma.cuh"
#include "ops/attention/cuda/epilogue.cuh"
#include "ops/attention/cuda/sm90/backward_shape.cuh"
#include "ops/attention/cuda/softmax.cuh"

namespace packing_ops::attention::sm90 {

template <class T, class Shape>
struct BackwardMath {
  static constexpr int kRows = Shape::kScoreColumns;
  static constexpr int kQueryColumns = Shape::kByColumns ? Shape::kSumColumns : 64;
  using Scores = float[Shape::kScoreColumns / 2];  // [64 keys, rows] of a warpgroup; by panels [64 rows, keys]
  using KeySums = float[Shape::kSumColumns / 2];   // [64 keys, columns]; by panels [64 columns, keys]
  using Queries = float[kQueryColumns / 2];        // [64 rows, columns]
  using Weights = uint32_t[Shape::kScoreColumns / 16][4];

  // scores = keys rows^T.
  static __device__ __forceinline__ void multiply(Scores& scores, uint32_t tile_keys, uint32_t tile_rows) {
    const uint64_t keys = ptx::matrix_descriptor(tile_keys);
    const uint64_t rows = ptx::matrix_descriptor(tile_rows);
#pragma unroll
    for (int d = 0; d < Shape::kDim / 16; ++d) {
      ptx::wgmma<T, false>(scores, ptx::advance_descriptor(keys, d / 4 * Shape::kPanelK + d % 4 * 32),
                           ptx::advance_descriptor(rows, d / 4 * Shape::kPanelQ + d % 4 * 32), d > 0);
    }
  }

  // sums = weights rows, or sums += weights rows, of kSumColumns columns from that panel of rows on.
  static __device__ __forceinline__ void add_keys(KeySums& sums, const Weights& weights, uint32_t panel_rows,
                                                  bool add) {
    const uint64_t rows = ptx::matrix_descriptor(panel_rows, Shape::kPanelQ);
#pragma unroll
    for (int n = 0; n < kRows / 16; ++n) {
      ptx::wgmma<T, true>(sums, weights[n], ptx::advance_descriptor(rows, n * 16 * 128), add || n > 0);
    }
  }

  // The same with the weights of all rows in shared memory.
  static __device__ __forceinline__ void add_keys(KeySums& sums, uint32_t tile_weights, uint32_t panel_rows, bool add) {
    const uint64_t weights = ptx::matrix_descriptor(tile_weights);
    const uint64_t rows = ptx::matrix_descriptor(panel_rows, Shape::kPanelQ);
#pragma unroll
    for (int n = 0; n < Shape::kRows / 16; ++n) {
      ptx::wgmma<T, true>(sums, ptx::advance_descriptor(weights, n * 32), ptx::advance_descriptor(rows, n * 16 * 128),
                          add || n > 0);
    }
  }

  // dq = ds k of a row tile, from that panel of k on.
  static __device__ __forceinline__ void multiply_queries(Queries& dq, uint32_t panel_ds, uint32_t panel_k) {
    const uint64_t ds = ptx::matrix_descriptor(panel_ds);
    const uint64_t k = ptx::matrix_descriptor(panel_k, Shape::kPanelK);
#pragma unroll
    for (int n = 0; n < Shape::kUnitKeys / 16; ++n) {
      ptx::wgmma<T, true, true>(dq, ptx::advance_descriptor(ds, n * 16 * 128), ptx::advance_descriptor(k, n * 16 * 128),
                                n > 0);
    }
  }

  // A thread's share of an array of rows: 8 n + 2 (lane % 4) and the next. As many as there are registers for are
  // loaded at once, the rest where they are used.
  struct Pairs {
    static constexpr int kAhead = kRows == 128 ? 4 : kRows / 8;
    const float2* rest;
    float2 ahead[kAhead];

    __device__ __forceinline__ explicit Pairs(const float* rows)
        : rest(reinterpret_cast<const float2*>(rows) + (threadIdx.x & 3)) {
#pragma unroll
      for (int n = 0; n < kAhead; ++n) ahead[n] = rest[4 * n];
    }
    __device__ __forceinline__ float2 operator[](int n) const { return n < kAhead ? ahead[n] : rest[4 * n]; }
  };

  // p = 2^(s scale - lse). Element 4 n + 2 half + i: key lane / 4 + 8 half of the warp's 16 and row 8 n + 2 (lane % 4)
  // + i.
  static __device__ __forceinline__ void weights(Scores& s, const Pairs& lse, float scale) {
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float2 pair = lse[n];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        s[4 * n + 2 * half] = ptx::exp2_approx(fmaf(s[4 * n + 2 * half], scale, -pair.x));
        s[4 * n + 2 * half + 1] = ptx::exp2_approx(fmaf(s[4 * n + 2 * half + 1], scale, -pair.y));
      }
    }
  }

  // p = 0 where a row does not see a key. `first_tokens`: the unit's. The warpgroup's scores begin at that key of the
  // unit's and at that row of the step's.
  static __device__ __forceinline__ void mask(const BackwardArgs& args, Scores& p, const BackwardUnit& unit,
                                              const BackwardStep<Shape>& step, const int32_t* first_tokens,
                                              int unit_key, int first_row) {
    const int32_t group = args.common.group;
    const int32_t lane_row = first_row + 2 * (static_cast<int32_t>(threadIdx.x) & 3);
    const int32_t tile_key = unit_key + static_cast<int32_t>(threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4;
    const int32_t first_key = unit.first_key + tile_key;
    const auto row_of = [&](int32_t token) {  // of the tile's 64, if the row exists
      return (token < 0 ? 0 : token > kTileRows ? kTileRows : token) * group - lane_row;
    };
    const int32_t by_window = first_key - unit.d.shift() - unit.d.window.right;
    int32_t first_token[2] = {by_window, by_window + 8};
    if (args.common.plan.ends.first_token != nullptr) {
      first_token[0] = first_tokens[tile_key];
      first_token[1] = first_tokens[tile_key + 8];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t key = first_key + 8 * half;
      const bool exists = key < unit.d.keys;
      const Interval<int32_t> tokens = unit.d.tokens_from(first_token[half], key);
#pragma unroll
      for (int r = 0; r < Shape::kTiles; ++r) {
        const int32_t begin = exists ? row_of(tokens.begin - step.tiles[r].token) : kTileRows;
        const int32_t end = row_of(tokens.end - step.tiles[r].token);
#pragma unroll
        for (int n = 0; n < kRows / Shape::kTiles / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& x = p[32 * r + 4 * n + 2 * half + i];
            if (8 * n + i < begin || 8 * n + i >= end) x = 0.f;
          }
        }
      }
    }
  }

  // dp becomes (dp - rowsum) times the slope of `transform`, which has been applied to the products.
  template <class Transform>
  static __device__ __forceinline__ void subtract_row_sums(Scores& dp, const Pairs& row_sum, const Transform& transform,
                                                           const Scores& transformed) {
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float2 pair = row_sum[n];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 4 * n + 2 * half;
        dp[i] = (dp[i] - pair.x) * transform.slope(transformed[i]);
        dp[i + 1] = (dp[i + 1] - pair.y) * transform.slope(transformed[i + 1]);
      }
    }
  }

  // ds = p (dp - rowsum), over dp - rowsum.
  static __device__ __forceinline__ void score_gradients(Scores& ds, const Scores& p) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) ds[i] *= p[i];
  }

  static __device__ __forceinline__ void round(Weights& to, const Scores& from) {
#pragma unroll
    for (int n = 0; n < kRows / 16; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[n][i] = pack<T>(from[8 * n + 2 * i], from[8 * n + 2 * i + 1]);
    }
  }

  // A lane's address in panels of keys, whose rows begin at `address`: matrix i of a stmatrix is rows 8 (i % 2),
  // columns 8 (i / 2) of the n-th 16x16 block.
  static __device__ __forceinline__ uint32_t store_address(uint32_t panel, uint32_t address, int n) {
    const int lane = threadIdx.x & 31;
    const int chunk = 2 * (n % 4) + (lane >> 4);
    return address + n / 4 * panel + ((chunk ^ (lane & 7)) << 4);
  }
  static __device__ __forceinline__ uint32_t store_row(int first_key) {
    return (first_key + static_cast<int>(threadIdx.x / 32 & 3) * 16 + static_cast<int>(threadIdx.x & 15)) * 128;
  }

  // p or ds, from that key and row of its tile on.
  static __device__ __forceinline__ void stage_scores(const Weights& scores, uint32_t tile, int first_key,
                                                      int first_row) {
#pragma unroll
    for (int n = 0; n < kRows / 16; ++n) {
      ptx::stmatrix(store_address(Shape::kPanelDs, tile + store_row(first_key), first_row / 16 + n), scores[n]);
    }
  }

  // dk or dv, over rows of k or v: from that key and panel on.
  static __device__ __forceinline__ void stage_keys(const KeySums& sums, uint32_t panels, int first_key, float scale) {
#pragma unroll
    for (int n = 0; n < Shape::kSumColumns / 16; ++n) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pack<T>(sums[8 * n + 2 * i] * scale, sums[8 * n + 2 * i + 1] * scale);
      ptx::stmatrix(store_address(Shape::kPanelK, panels + store_row(first_key), n), words);
    }
  }

  // Index, in float4, in a row tile's partial dq in shared memory or the ring: a warp's 16 rows of a panel are
  // together, and its accesses follow each other. n: of this thread's blocks of 8 columns, from that panel on.
  static __device__ __forceinline__ int ring_offset(int panel, int n) {
    constexpr int kPanelVectors = kTileRows * 64 / 4;
    panel += n / 8;
    const int warp = static_cast<int>(threadIdx.x / 32 & 3);
    return panel * kPanelVectors + warp * 32 * blocks_of(panel) + n % 8 * 32 + static_cast<int>(threadIdx.x & 31);
  }
  // Blocks of 8 columns of a panel: half as many in the second of 96 columns.
  static __device__ __forceinline__ int blocks_of(int panel) {
    return Shape::kDim % 64 == 0 || panel < Shape::kPanels - 1 ? 8 : Shape::kDim % 64 / 8;
  }
  // Whether a block has columns of dq.
  static __device__ __forceinline__ bool in_ring(int panel, int n) { return n % 8 < blocks_of(panel + n / 8); }

  // For the copying warpgroup to send.
  static __device__ __forceinline__ void stage_queries(const Queries& dq, uint32_t tile, int panel) {
#pragma unroll
    for (int n = 0; n < kQueryColumns / 8; ++n) {
      if (!in_ring(panel, n)) continue;
      ptx::store_shared_v4(tile + 16 * ring_offset(panel, n),
                           make_float4(dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]));
    }
  }

  // The last sum of a row tile: with those of other key tiles, if there are any, to memory.
  static __device__ __forceinline__ void finish_queries(const BackwardArgs& args, Queries& dq, const BackwardTile& tile,
                                                        const BackwardStep<Shape>& step, int panel) {
    const Args& common = args.common;
    const int warp = threadIdx.x / 32 & 3;
    if (tile.action == DqAction::kFinish) {
      const float4* sums = reinterpret_cast<const float4*>(common.partial_dq) +
                           static_cast<int64_t>(tile.ticket.slot) * (Shape::kRingFloats / 4);
#pragma unroll
      for (int n = 0; n < kQueryColumns / 8; ++n) {
        if (!in_ring(panel, n)) continue;
        const float4 sum = __ldcg(sums + ring_offset(panel, n));
        dq[4 * n] += sum.x;
        dq[4 * n + 1] += sum.y;
        dq[4 * n + 2] += sum.z;
        dq[4 * n + 3] += sum.w;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = 16 * warp + 8 * half + static_cast<int32_t>(threadIdx.x & 31) / 4;
      const int32_t token = static_cast<int32_t>(common.group_size.quotient(row));
      uint16_t* to = nullptr;
      if (row < tile.rows && tile.token + token >= 0) {
        to = static_cast<uint16_t*>(common.dq.data) +
             static_cast<int64_t>(step.start_q + tile.token + token) * common.dq.token_stride +
             (step.first_head + row - token * common.group) * common.dq.head_stride;
      }
      attention::store_row<T>(to, 64 * panel, common.head_dim,
                              reinterpret_cast<const float (&)[kQueryColumns / 8][4]>(dq), half,
                              common.scores.softmax_scale);
    }
  }

  // dk and dv from where stage_keys put them: by a thread, of 64 keys from that one on and kSumColumns columns from
  // that panel on.
  static __device__ __forceinline__ void store_keys(const BackwardArgs& args, const BackwardUnit& unit, uint32_t tile_k,
                                                    uint32_t tile_v, int first_key, int first_panel) {
    const DocumentTokens tokens(unit.d.start_k, unit.d.keys);
#pragma unroll
    for (int i = 0; i < wgmma_panels(Shape::kSumColumns); ++i) {
      const int panel = first_panel + i;
      const ptx::TmaCoords start = {64 * panel, tokens.before_end + unit.first_key + first_key, unit.kv_head,
                                    tokens.to_end, kMapTokens};
      const int at = panel * Shape::kPanelK + first_key * 128;
      ptx::tma_store(args.dv, start, tile_v + at);
      ptx::tma_store(args.dk, start, tile_k + at);
    }
    ptx::bulk_commit_group();
    ptx::bulk_wait_group_read();
  }
};

}  // namespace packing_ops::attention::sm90
