// What the backward's other two warpgroups do: 64 keys each of the unit's 128. A step:
//
//   s^T = k q^T, dp^T = v dout^T           keys are rows, so that p^T and ds^T are operands as they stand
//   dv += p^T dout, dk += ds^T q
//   dq = ds k                              half of it by each warpgroup, from ds of both
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

  // p = 2^(s scale - lse). Element 4 n + 2 half + i: key lane / 4 + 8 half of the warp's 16, row 8 n + 2 (lane % 4) + i.
  static __device__ __forceinline__ void weights(Scores& s, const float* lse, float scale) {
    const float2* pairs = reinterpret_cast<const float2*>(lse) + (threadIdx.x & 3);
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float2 pair = pairs[4 * n];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        s[4 * n + 2 * half] = ptx::exp2_approx(fmaf(s[4 * n + 2 * half], scale, -pair.x));
        s[4 * n + 2 * half + 1] = ptx::exp2_approx(fmaf(s[4 * n + 2 * half + 1], scale, -pair.y));
      }
    }
  }

  // p = 0 where a row does not see a key.
  static __device__ __forceinline__ void mask(const BackwardArgs& args, Scores& p, const BackwardUnit& unit,
                                              const BackwardStep<Shape>& step, int w) {
    const int32_t group = args.common.group;
    const int32_t lane_row = 2 * (static_cast<int32_t>(threadIdx.x) & 3);
    const int32_t first_key =
        unit.first_key + w * (kKeys / 2) + static_cast<int32_t>(threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4;
    const auto row_of = [&](int32_t token) {  // of the tile's 64, where there is such a row
      return (token < 0 ? 0 : token > kTileRows ? kTileRows : token) * group - lane_row;
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t key = first_key + 8 * half;
      const Interval<int32_t> tokens =
          key < unit.d.keys ? unit.d.tokens_attending_to(key, key) : Interval<int32_t>{kTileRows, 0};
#pragma unroll
      for (int r = 0; r < Shape::kTiles; ++r) {
        const bool none = key >= unit.d.keys;
        const int32_t begin = none ? kTileRows : row_of(tokens.begin - step.tiles[r].token);
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
  static __device__ __forceinline__ void score_gradients(Scores& dp, const Scores& p, const float* row_sum) {
    const float2* pairs = reinterpret_cast<const float2*>(row_sum) + (threadIdx.x & 3);
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float2 pair = pairs[4 * n];
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

  // dq of 64 rows and columns to the ring or to memory. In the ring a warp's accesses follow each other.
  static __device__ __forceinline__ void send(const BackwardArgs& args, Queries& dq, const BackwardTile& tile,
                                              const BackwardStep<Shape>& step, int column_part) {
    const int warp = threadIdx.x / 32 & 3;
    float4* sums = reinterpret_cast<float4*>(args.common.partial_dq) +
                   static_cast<int64_t>(tile.ticket.slot) * (Shape::kRingFloats / 4) + (4 * column_part + warp) * 256 +
                   (threadIdx.x & 31);
    const auto vector = [&](int n) { return make_float4(dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]); };
    if (tile.action == DqAction::kAdd) {
#pragma unroll
      for (int n = 0; n < 8; ++n) ptx::red_add_4(sums + 32 * n, vector(n));
    } else if (tile.action == DqAction::kPut) {
#pragma unroll
      for (int n = 0; n < 8; ++n) sums[32 * n] = vector(n);
    } else if (tile.action != DqAction::kNone) {
      if (tile.action == DqAction::kFinish) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const float4 sum = __ldcg(sums + 32 * n);
          dq[4 * n] += sum.x;
          dq[4 * n + 1] += sum.y;
          dq[4 * n + 2] += sum.z;
          dq[4 * n + 3] += sum.w;
        }
      }
      const Args& common = args.common;
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
        attention::store_row<T>(to, 64 * column_part, common.head_dim, reinterpret_cast<const float(&)[8][4]>(dq), half,
                                common.softmax_scale);
      }
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

  RingPlace<kUnitsAhead> kv;
  RingPlace<kRowStages> q;
  RingPlace<kStepsKnown> step;
  RingPlace<2> ds_place;
  int keys_read_odd = 0;
  bool leaving = false;  // dk and dv of the unit before

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
  const auto let_unit_go = [&] {
    if (leaving && first_thread) {
      ptx::wait_until_stores_have_read();
      ptx::mbarrier_arrive(&shared.kv_empty[kv.stage ^ 1]);
    }
    leaving = false;
  };
  const auto wait_for_rows = [&] { ptx::mbarrier_wait(&shared.q_full[q.stage], q.odd); };
  const auto start_scores = [&] {
    ptx::products_fence();
    Math::multiply(p, Shape::tile_k(base, kv.stage) + w * 64 * 128, Shape::tile_q(base, q.stage));
    ptx::products_commit();
  };
  const auto start_gradients = [&] {
    ptx::products_fence();
    Math::multiply(ds, Shape::tile_v(base, kv.stage) + w * 64 * 128, Shape::tile_dout(base, q.stage));
    ptx::products_commit();
  };
  const auto end_scores = [&] {
    ptx::products_done(p);
    Math::weights(p, shared.lse[q.stage], scale);
    const BackwardStep<Shape>& description = shared.steps[step.stage];
    if (description.masked >> w & 1) Math::mask(args, p, shared.units[kv.stage], description, w);
  };
  const auto share_ds = [&] {
    ptx::products_done(ds);
    Math::score_gradients(ds, p, shared.row_sum[q.stage]);
    Math::round(p_half, p);
    Math::round(ds_half, ds);
    Math::stage_ds(ds_half, Shape::tile_ds(base, ds_place.stage), w);
    ptx::fence_proxy_async();
    __syncwarp();
    arrive(&shared.ds_full[ds_place.stage]);
  };
  const auto start_sums = [&](bool add) {
    ptx::products_fence();
    Math::add_keys(dv, p_half, Shape::tile_dout(base, q.stage), add);
    Math::add_keys(dk, ds_half, Shape::tile_q(base, q.stage), add);
    ptx::products_commit();
    ptx::mbarrier_wait(&shared.ds_full[ds_place.stage], ds_place.odd);
    ptx::products_fence();
    Math::multiply_queries(dq, Shape::tile_ds(base, ds_place.stage) + row_part * Shape::kPanelDs,
                           Shape::tile_k(base, kv.stage) + column_part * Shape::kPanelK);
    ptx::products_commit();
    ds_place.next();
  };
  const auto end_sums = [&] {
    ptx::products_done(dv);
    ptx::products_done(dk);
    __syncwarp();
    arrive(&shared.q_empty[q.stage]);
    q.next();
  };
  const auto send_queries = [&] {
    ptx::products_done(dq);
    ptx::mbarrier_wait(&shared.turn[step.stage], step.odd);
    const BackwardStep<Shape>& description = shared.steps[step.stage];
    Math::send(args, dq, description.tiles[row_part], description, column_part);
    __syncwarp();
    arrive(&shared.sent[step.stage]);
    step.next();
  };

  while (true) {
    ptx::mbarrier_wait(&shared.kv_full[kv.stage], kv.odd);
    const BackwardUnit& unit = shared.units[kv.stage];
    const int32_t steps = unit.steps;
    if (steps < 0) break;
    for (int32_t i = 0; i < steps; ++i) {
      wait_for_rows();
      start_scores();
      start_gradients();
      ptx::products_wait<1>();
      end_scores();
      ptx::products_wait<0>();
      share_ds();
      start_sums(i > 0);
      ptx::products_wait<1>();
      end_sums();
      ptx::products_wait<0>();
      send_queries();
      if (i == 0) let_unit_go();
    }
    let_unit_go();
    if (steps == 0) {
#pragma unroll
      for (int i = 0; i < Shape::kDim / 2; ++i) dk[i] = dv[i] = 0.f;
    }
    __syncwarp();
    arrive(&shared.keys_read);
    ptx::mbarrier_wait(&shared.keys_read, keys_read_odd);
    Math::stage_keys(dv, Shape::tile_v(base, kv.stage), w, 1.f);
    Math::stage_keys(dk, Shape::tile_k(base, kv.stage), w, args.common.softmax_scale);
    ptx::fence_proxy_async();
    __syncwarp();
    arrive(&shared.staged[w]);
    if (first_thread) {
      ptx::mbarrier_wait(&shared.staged[w], keys_read_odd);
      const DocumentTokens place(unit.d.start_k, unit.d.keys);
#pragma unroll
      for (int panel = 0; panel < Shape::kPanels; ++panel) {
        const ptx::BoxStart start = {64 * panel, place.before_end + unit.first_key + 64 * w, unit.kv_head, place.to_end,
                                     kMapTokens};
        const int at = panel * Shape::kPanelK + w * 64 * 128;
        ptx::store_box(args.dv, start, Shape::tile_v(base, kv.stage) + at);
        ptx::store_box(args.dk, start, Shape::tile_k(base, kv.stage) + at);
      }
      ptx::commit_stores();
    }
    leaving = true;
    keys_read_odd ^= 1;
    kv.next();
  }
  let_unit_go();
}

}  // namespace packing_ops::attention::sm90
