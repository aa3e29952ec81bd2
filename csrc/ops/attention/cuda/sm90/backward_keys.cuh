// What the backward's other two warpgroups do: 64 keys each of the unit's 128. A step:
//
//   s^T = k q^T, dp^T = v dout^T   keys are rows, so that p^T and ds^T are operands as they stand
//   dv += p^T dout
//   dq = ds k                      half of it by each warpgroup, from ds of both; it leaves while dk is summed
//   dk += ds^T q
#pragma once

#include "core/ptx/wgmma.cuh"
#include "ops/attention/cuda/epilogue.cuh"
#include "ops/attention/cuda/sm90/backward_shape.cuh"
#include "ops/attention/cuda/softmax.cuh"

namespace packing_ops::attention::sm90 {

template <class T, class Shape>
struct BackwardMath {
  static constexpr int kRows = Shape::kRows;
  using Scores = float[kRows / 2];         // [64 keys, rows] of a warpgroup
  using KeySums = float[Shape::kDim / 2];  // [64 keys, head_dim]
  using Queries = float[32];               // [64 rows, 64 columns]
  using Weights = uint32_t[kRows / 16][4];

  // scores = keys rows^T.
  static __device__ __forceinline__ void multiply(Scores& scores, uint32_t tile_keys, uint32_t tile_rows) {
    const uint64_t keys = ptx::matrix_descriptor(tile_keys);
    const uint64_t rows = ptx::matrix_descriptor(tile_rows);
#pragma unroll
    for (int d = 0; d < Shape::kDim / 16; ++d) {
      ptx::product<T, false>(scores, ptx::moved_descriptor(keys, d / 4 * Shape::kPanelK + d % 4 * 32),
                             ptx::moved_descriptor(rows, d / 4 * Shape::kPanelQ + d % 4 * 32), d > 0);
    }
  }

  // sums = weights rows, or sums += weights rows.
  static __device__ __forceinline__ void add_keys(KeySums& sums, const Weights& weights, uint32_t tile_rows, bool add) {
    const uint64_t rows = ptx::matrix_descriptor(tile_rows, Shape::kPanelQ);
#pragma unroll
    for (int n = 0; n < kRows / 16; ++n) {
      ptx::product<T, true>(sums, weights[n], ptx::moved_descriptor(rows, n * 16 * 128), add || n > 0);
    }
  }

  // dq = ds k of a row tile and 64 columns.
  static __device__ __forceinline__ void multiply_queries(Queries& dq, uint32_t panel_ds, uint32_t panel_k) {
    const uint64_t ds = ptx::matrix_descriptor(panel_ds);
    const uint64_t k = ptx::matrix_descriptor(panel_k);
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      ptx::product<T, true, true>(dq, ptx::moved_descriptor(ds, n * 16 * 128), ptx::moved_descriptor(k, n * 16 * 128),
                                  n > 0);
    }
  }

  // A thread's share of an array of rows: 8 n + 2 (lane % 4) and the next. As many as there are registers for are
  // loaded while products are under way.
  struct Pairs {
    static constexpr int kAhead = kRows == 64 ? 8 : 4;
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

  // p = 0 where a row does not see a key. `first_tokens`: the unit's.
  static __device__ __forceinline__ void mask(const BackwardArgs& args, Scores& p, const BackwardUnit& unit,
                                              const BackwardStep<Shape>& step, const int32_t* first_tokens, int w) {
    const int32_t group = args.common.group;
    const int32_t lane_row = 2 * (static_cast<int32_t>(threadIdx.x) & 3);
    const int32_t tile_key = w * (kKeys / 2) + static_cast<int32_t>(threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4;
    const int32_t first_key = unit.first_key + tile_key;
    const auto row_of = [&](int32_t token) {  // of the tile's 64, where there is such a row
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
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& x = p[32 * r + 4 * n + 2 * half + i];
            if (8 * n + i < begin || 8 * n + i >= end) x = 0.f;
          }
        }
      }
    }
  }

  // ds = p (dp - rowsum), in place of dp.
  static __device__ __forceinline__ void score_gradients(Scores& dp, const Scores& p, const Pairs& row_sum) {
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float2 pair = row_sum[n];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 4 * n + 2 * half;
        dp[i] = p[i] * (dp[i] - pair.x);
        dp[i + 1] = p[i + 1] * (dp[i + 1] - pair.y);
      }
    }
  }

  static __device__ __forceinline__ void round(Weights& to, const Scores& from) {
#pragma unroll
    for (int n = 0; n < kRows / 16; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[n][i] = pack<T>(from[8 * n + 2 * i], from[8 * n + 2 * i + 1]);
    }
  }

  // A lane's address in a panel of keys: matrix i of a stmatrix is rows 8 (i % 2), columns 8 (i / 2) of a 16x16 block.
  static __device__ __forceinline__ uint32_t store_address(uint32_t panel, uint32_t address, int n) {
    const int lane = threadIdx.x & 31;
    const int chunk = 2 * (n % 4) + (lane >> 4);
    return address + n / 4 * panel + ((chunk ^ (lane & 7)) << 4);
  }
  static __device__ __forceinline__ uint32_t store_row(int w) {
    return (64 * w + static_cast<int>(threadIdx.x / 32 & 3) * 16 + static_cast<int>(threadIdx.x & 15)) * 128;
  }

  static __device__ __forceinline__ void stage_ds(const Weights& ds, uint32_t tile, int w) {
#pragma unroll
    for (int n = 0; n < kRows / 16; ++n) {
      ptx::stmatrix(store_address(Shape::kPanelDs, tile + store_row(w), n), ds[n]);
    }
  }

  // dk or dv of this warpgroup's keys, over its rows of k or v.
  static __device__ __forceinline__ void stage_keys(const KeySums& sums, uint32_t tile, int w, float scale) {
#pragma unroll
    for (int n = 0; n < Shape::kDim / 16; ++n) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pack<T>(sums[8 * n + 2 * i] * scale, sums[8 * n + 2 * i + 1] * scale);
      ptx::stmatrix(store_address(Shape::kPanelK, tile + store_row(w), n), words);
    }
  }

  // This warp's [16, 64] of a row tile's partial dq: its accesses follow each other.
  static __device__ __forceinline__ int place_in_ring(int column_part) {
    return (4 * column_part + static_cast<int>(threadIdx.x / 32 & 3)) * 256 + static_cast<int>(threadIdx.x & 31);
  }

  // For the copying warpgroup to send.
  static __device__ __forceinline__ void stage_queries(const Queries& dq, uint32_t tile, int column_part) {
    const uint32_t to = tile + 16 * place_in_ring(column_part);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      ptx::store_shared_4(to + 512 * n, make_float4(dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]));
    }
  }

  // The last sum of a row tile: with that of other key tiles, where there is any, to memory.
  static __device__ __forceinline__ void finish_queries(const BackwardArgs& args, Queries& dq, const BackwardTile& tile,
                                                        const BackwardStep<Shape>& step, int column_part) {
    const Args& common = args.common;
    const int warp = threadIdx.x / 32 & 3;
    if (tile.action == DqAction::kFinish) {
      const float4* sums = reinterpret_cast<const float4*>(common.partial_dq) +
                           static_cast<int64_t>(tile.ticket.slot) * (Shape::kRingFloats / 4) +
                           place_in_ring(column_part);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float4 sum = __ldcg(sums + 32 * n);
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
      if (row < tile.rows) {
        to = static_cast<uint16_t*>(common.dq.data) +
             static_cast<int64_t>(step.start_q + tile.token + token) * common.dq.token_stride +
             (step.first_head + row - token * common.group) * common.dq.head_stride;
      }
      attention::store_row<T>(to, 64 * column_part, common.head_dim, reinterpret_cast<const float (&)[8][4]>(dq), half,
                              common.softmax_scale);
    }
  }
};

template <class T, class Shape>
__device__ __forceinline__ void attend_to_keys(const BackwardArgs& args, BackwardBarriers<Shape>& shared, uint32_t base,
                                               int w) {
  using Math = BackwardMath<T, Shape>;
  const int lane = threadIdx.x & 31;
  const bool first_thread = threadIdx.x % 128 == 0;
  const float scale = args.common.softmax_scale * kLog2e;
  const int row_part = Shape::kTiles == 2 ? w : 0;  // of dq: this warpgroup's
  const int column_part = Shape::kTiles == 2 ? 0 : w;

  uint32_t turn = 0;   // of a unit
  uint32_t count = 0;  // of steps

  typename Math::KeySums dk;
  typename Math::KeySums dv;
  typename Math::Scores p;
  typename Math::Scores ds;
  typename Math::Weights p_half;
  typename Math::Weights ds_half;
  typename Math::Queries dq;

  const auto arrive = [&](uint64_t* barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };
  const auto tile_k = [&] { return Shape::tile_k(base, stage_of(turn, kUnitsAhead)); };
  const auto tile_v = [&] { return Shape::tile_v(base, stage_of(turn, kUnitsAhead)); };
  const auto start_scores = [&] {
    const int stage = stage_of(count, kRowStages);
    ptx::mbarrier_wait(&shared.q_full[stage], odd_of(count, kRowStages));
    ptx::products_fence();
    Math::multiply(p, tile_k() + w * 64 * 128, Shape::tile_q(base, stage));
    ptx::products_commit();
    Math::multiply(ds, tile_v() + w * 64 * 128, Shape::tile_dout(base, stage));
    ptx::products_commit();
  };
  const auto end_scores = [&](const typename Math::Pairs& lse, uint32_t masked) {
    ptx::products_done(p);
    Math::weights(p, lse, scale);
    if (masked >> w & 1) {
      Math::mask(args, p, shared.units[stage_of(turn, kUnitsKnown)], shared.steps[stage_of(count, kStepsKnown)],
                 shared.first_tokens, w);
    }
  };
  const auto share_ds = [&](const typename Math::Pairs& row_sum) {
    const int stage = stage_of(count, 2);
    ptx::products_done(ds);
    Math::score_gradients(ds, p, row_sum);
    Math::round(p_half, p);
    Math::round(ds_half, ds);
    Math::stage_ds(ds_half, Shape::tile_ds(base, stage), w);
    ptx::fence_proxy_async();
    __syncwarp();
    arrive(&shared.ds_full[stage]);
  };
  const auto start_sums = [&](bool add) {
    const int rows = stage_of(count, kRowStages);
    ptx::products_fence();
    Math::add_keys(dv, p_half, Shape::tile_dout(base, rows), add);
    ptx::products_commit();
    const int stage = stage_of(count, 2);
    ptx::mbarrier_wait(&shared.ds_full[stage], odd_of(count, 2));  // the other warpgroup's too
    ptx::products_fence();
    Math::multiply_queries(dq, Shape::tile_ds(base, stage) + row_part * Shape::kPanelDs,
                           tile_k() + column_part * Shape::kPanelK);
    ptx::products_commit();
    Math::add_keys(dk, ds_half, Shape::tile_q(base, rows), add);
    ptx::products_commit();
  };
  const auto end_queries = [&](DqAction action) {
    const int stage = stage_of(count, Shape::kDqStages);
    ptx::products_done(dq);
    ptx::mbarrier_wait(&shared.dq_empty[stage], odd_of(count, Shape::kDqStages) ^ 1);
    if (action == DqAction::kAdd || action == DqAction::kPut) {
      Math::stage_queries(dq, Shape::tile_dq(base, stage) + row_part * Shape::kRingFloats * 4, column_part);
      ptx::fence_proxy_async();
    } else if (action != DqAction::kNone) {
      const int place = stage_of(count, kStepsKnown);
      ptx::mbarrier_wait(&shared.turn[place], odd_of(count, kStepsKnown));
      Math::finish_queries(args, dq, shared.steps[place].tiles[row_part], shared.steps[place], column_part);
    }
    __syncwarp();
    arrive(&shared.dq_full[stage]);
  };
  const auto end_sums = [&] {
    ptx::products_done(dv);
    ptx::products_done(dk);
    __syncwarp();
    arrive(&shared.q_empty[stage_of(count, kRowStages)]);
    ++count;
  };

  while (true) {
    ptx::mbarrier_wait(&shared.kv_full[stage_of(turn, kUnitsAhead)], odd_of(turn, kUnitsAhead));
    const int32_t steps = shared.units[stage_of(turn, kUnitsKnown)].steps;
    if (steps < 0) break;
#pragma unroll 1
    for (int32_t i = 0; i < steps; ++i) {
      start_scores();
      // What the step needs next is loaded before each wait.
      const uint32_t masked = shared.steps[stage_of(count, kStepsKnown)].masked;
      const typename Math::Pairs lse(shared.lse[stage_of(count, kRowStages)]);
      ptx::products_wait<1>();
      end_scores(lse, masked);
      const typename Math::Pairs row_sum(shared.row_sum[stage_of(count, kRowStages)]);
      ptx::products_wait<0>();
      share_ds(row_sum);
      start_sums(i > 0);
      const DqAction action = shared.steps[stage_of(count, kStepsKnown)].tiles[row_part].action;
      ptx::products_wait<1>();  // dk's products are still under way
      end_queries(action);
      ptx::products_wait<0>();
      end_sums();
    }
    if (steps == 0) {
#pragma unroll
      for (int i = 0; i < Shape::kDim / 2; ++i) dk[i] = dv[i] = 0.f;
    }
    __syncwarp();
    arrive(&shared.keys_read);
    ptx::mbarrier_wait(&shared.keys_read, odd_of(turn, 1));
    Math::stage_keys(dv, tile_v(), w, 1.f);
    Math::stage_keys(dk, tile_k(), w, args.common.softmax_scale);
    ptx::fence_proxy_async();
    __syncwarp();
    arrive(&shared.staged[w]);
    if (first_thread) {
      ptx::mbarrier_wait(&shared.staged[w], odd_of(turn, 1));
      const BackwardUnit& unit = shared.units[stage_of(turn, kUnitsKnown)];
      const DocumentTokens place(unit.d.start_k, unit.d.keys);
#pragma unroll
      for (int panel = 0; panel < Shape::kPanels; ++panel) {
        const ptx::BoxStart start = {64 * panel, place.before_end + unit.first_key + 64 * w, unit.kv_head, place.to_end,
                                     kMapTokens};
        const int at = panel * Shape::kPanelK + w * 64 * 128;
        ptx::store_box(args.dv, start, tile_v() + at);
        ptx::store_box(args.dk, start, tile_k() + at);
      }
      ptx::commit_stores();
      ptx::wait_until_stores_have_read();
      ptx::mbarrier_arrive(&shared.kv_empty[stage_of(turn, kUnitsAhead)]);
    }
    ++turn;
  }
}

}  // namespace packing_ops::attention::sm90
