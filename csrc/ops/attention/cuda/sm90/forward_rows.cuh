// What the forward's consumer warpgroups do: scores, softmax, values and out of 64 rows each.
#pragma once

#include <cmath>

#include "core/ptx/wgmma.cuh"
#include "ops/attention/cuda/epilogue.cuh"
#include "ops/attention/cuda/sm90/forward_shape.cuh"
#include "ops/attention/cuda/softmax.cuh"

namespace packing_ops::attention::sm90 {

// A thread's two rows: g and g + 8 of its warp's 16. Which token of the tile and which head they are never changes.
struct ThreadRows {
  int32_t token[2];  // row / group

  // kForUnit: worked out for each unit, not kept in registers over its steps.
  template <bool kForUnit>
  static __device__ __forceinline__ ThreadRows make(const ForwardArgs& args) {
    ThreadRows rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int32_t in_tile = row(i);
      if constexpr (kForUnit) ptx::no_hoist(in_tile);
      rows.token[i] = static_cast<int32_t>(args.common.group_size.quotient(in_tile));
    }
    return rows;
  }
  // In the tile
  static __device__ __forceinline__ int32_t row(int i) {
    return 16 * (threadIdx.x / 32 & 3) + 8 * i + (threadIdx.x & 31) / 4;
  }
  // Of the group: row % group
  __device__ __forceinline__ int32_t head(const ForwardArgs& args, int i) const {
    return row(i) - token[i] * args.common.group;
  }
};

// Which keys a warpgroup's rows see of a unit's. `ends`: end_of its tokens.
struct VisibleKeys {
  Interval<int32_t> all;      // every row
  Interval<int32_t> seen[2];  // this thread's rows
  int32_t end;                // of those that any row sees

  __device__ __forceinline__ VisibleKeys(const ForwardUnit& unit, const ThreadRows& rows, const int32_t* ends,
                                         int32_t first_token, int32_t tokens) {
    const int32_t end_token = first_token + tokens < unit.d.tokens ? first_token + tokens : unit.d.tokens;
    const int32_t last = end_token - 1 > first_token ? end_token - 1 : first_token;
    all = unit.d.keys_before(ends[0], last);
    end = first_token < unit.d.tokens ? unit.d.keys_before(ends[last - first_token], last).end : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      seen[i] = unit.d.keys_before(ends[rows.token[i]], first_token + rows.token[i]);
    }
  }
};

struct RowState {
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.f, 0.f};  // of this thread's columns only, until the end
};

template <class T, class Shape, bool kTransform>
struct ForwardMath {
  using Transform = ScoreTransform<kTransform>;
  static constexpr int kKeys = Shape::kKeys;
  static constexpr int kScores = kKeys / 2;
  static constexpr int kSums = Shape::kDimV / 2;
  using Scores = float[kScores];
  using Sums = float[kSums];
  using Weights = uint32_t[kKeys / 16][4];  // p in T, in the layout of wgmma's A

  // s = q k^T.
  static __device__ __forceinline__ void start_scores(Scores& s, uint32_t tile_q, uint32_t tile_k) {
    const uint64_t q = ptx::matrix_descriptor(tile_q);
    const uint64_t k = ptx::matrix_descriptor(tile_k);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < Shape::kDim / 16; ++d) {
      ptx::wgmma<T, false>(s, ptx::advance_descriptor(q, d / 4 * Shape::kPanelQ + d % 4 * 32),
                           ptx::advance_descriptor(k, d / 4 * Shape::kPanelK + d % 4 * 32), d > 0);
    }
    ptx::wgmma_commit_group();
  }

  // o = p v, or o += p v.
  static __device__ __forceinline__ void start_values(Sums& o, const Weights& p, uint32_t tile_v, bool add) {
    const uint64_t v = ptx::matrix_descriptor(tile_v, Shape::kPanelK);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      ptx::wgmma<T, true>(o, p[n], ptx::advance_descriptor(v, n * 16 * 128), add || n > 0);
    }
    ptx::wgmma_commit_group();
  }

  static __device__ __forceinline__ void mask(Scores& s, const VisibleKeys& keys, int32_t first_key, bool from_left) {
    const int32_t column = first_key + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t end = keys.seen[half].end - column;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        if (8 * n >= end) s[4 * n + 2 * half] = -INFINITY;
        if (8 * n + 1 >= end) s[4 * n + 2 * half + 1] = -INFINITY;
      }
    }
    if (!from_left) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t first = keys.seen[half].begin - column;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        if (8 * n < first) s[4 * n + 2 * half] = -INFINITY;
        if (8 * n + 1 < first) s[4 * n + 2 * half + 1] = -INFINITY;
      }
    }
  }

  // Scores to weights. `factor` multiplies the sums of the keys before; false if it is 1 in all rows of the warp.
  static __device__ __forceinline__ bool softmax(Scores& s, RowState& rows, float (&factor)[2], float scale) {
    bool moved = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row_max = rows.row_max[half];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) row_max = fmaxf(row_max, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
      row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 2));
      moved |= row_max != rows.row_max[half];
      const float base = row_max == -INFINITY ? 0.f : row_max * scale;
      // Exactly 1 where the maximum stays, so that no row's bits depend on the others of its warp.
      factor[half] = row_max == rows.row_max[half] ? 1.f : ptx::exp2_approx(rows.row_max[half] * scale - base);
      rows.row_max[half] = row_max;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 4 * n + 2 * half; i < 4 * n + 2 * half + 2; ++i) {
          s[i] = ptx::exp2_approx(fmaf(s[i], scale, -base));
          sum += s[i];
        }
      }
      rows.row_sum[half] = rows.row_sum[half] * factor[half] + sum;
    }
    return __any_sync(0xffffffffu, moved);
  }

  static __device__ __forceinline__ void to_weights(Weights& p, const Scores& s) {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[n][i] = pack<T>(s[8 * n + 2 * i], s[8 * n + 2 * i + 1]);
    }
  }

  // Epilogue of a unit: lse to memory; out to its q tile, or to memory.
  static __device__ __forceinline__ void finish(const ForwardArgs& args, const ForwardUnit& unit,
                                                const ThreadRows& rows, int32_t first_token, const RowState& state,
                                                Sums& o, uint32_t tile, const Transform& transform) {
    const int lane = threadIdx.x & 31;
    const int mine = lane & 1;  // a lane of the quad for each row
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float row_sum = state.row_sum[i];
      row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 1);
      row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 2);
      sum = mine == i ? row_sum : sum;
    }
    const int32_t token = mine == 0 ? rows.token[0] : rows.token[1];
    float inverse = sum == 0.f ? 0.f : 1.f / sum;
    const bool exists = token < args.tile_tokens && first_token + token < unit.d.tokens;
    if (exists && (lane & 3) == mine) {
      const auto& common = args.common;
      const float row_max = mine == 0 ? state.row_max[0] : state.row_max[1];
      float lse = sum == 0.f ? -INFINITY : log_of_sum(row_max, transform.unit() * kLog2e, transform.unit(), sum);
      const int32_t head = unit.kv_head * common.group + (mine == 0 ? rows.head(args, 0) : rows.head(args, 1));
      if (common.sinks != nullptr) {
        const float sink = common.sinks[head];
        const float top = fmaxf(lse, sink);
        const float lse_with_sink = top == -INFINITY ? top : top + log1pf(expf(fminf(lse, sink) - top));
        inverse = sum == 0.f ? 0.f : inverse * expf(lse - lse_with_sink);
        lse = lse_with_sink;
      }
      common.lse[head * common.documents_q.total + unit.d.start_q + first_token + token] = lse;
    }
    const float factor[2] = {__shfl_sync(0xffffffffu, inverse, lane & 28),
                             __shfl_sync(0xffffffffu, inverse, (lane & 28) + 1)};
    if constexpr (Shape::kOutThroughQ) {
      stage_out(o, tile, factor);
    } else {
      store_out(args, unit, rows, first_token, o, factor);
    }
  }

  static __device__ __forceinline__ void stage_out(const Sums& o, uint32_t tile, const float (&factor)[2]) {
    const int lane = threadIdx.x & 31;
    // Matrix i of four: rows 8 (i % 2), columns 8 (i / 2) of a 16x16 block; a row's chunks are permuted by the row.
    const int row = 16 * (threadIdx.x / 32 & 3) + (lane & 15);
    const uint32_t address = tile + row * 128;
#pragma unroll
    for (int n = 0; n < kSums / 8; ++n) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = pack<T>(o[8 * n + 2 * i] * factor[i % 2], o[8 * n + 2 * i + 1] * factor[i % 2]);
      }
      const int chunk = 2 * (n % 4) + (lane >> 4);
      ptx::stmatrix(address + n / 4 * Shape::kPanelQ + ((chunk ^ (row & 7)) << 4), words);
    }
  }

  static __device__ __forceinline__ void store_out(const ForwardArgs& args, const ForwardUnit& unit,
                                                   const ThreadRows& rows, int32_t first_token, const Sums& o,
                                                   const float (&factor)[2]) {
    const auto& common = args.common;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t token = rows.token[half];
      uint16_t* to = nullptr;
      if (token < args.tile_tokens && first_token + token < unit.d.tokens) {
        to = static_cast<uint16_t*>(common.out.data) +
             static_cast<int64_t>(unit.d.start_q + first_token + token) * common.out.token_stride +
             (unit.kv_head * common.group + rows.head(args, half)) * common.out.head_stride;
      }
      attention::store_row<T>(to, 0, common.head_dim_v, reinterpret_cast<const float (&)[kSums / 4][4]>(o), half,
                              factor[half]);
    }
  }
};

template <class T, class Shape, bool kTransform>
__device__ __forceinline__ void attend(const ForwardArgs& args, ForwardBarriers<Shape>& shared, uint32_t base, int w) {
  using Math = ForwardMath<T, Shape, kTransform>;
  const int lane = threadIdx.x & 31;
  const ScoreTransform<kTransform> transform{args.common.scores};
  const float scale = transform.unit() * kLog2e;
  const ThreadRows kept = ThreadRows::make<false>(args);
  const auto thread_rows = [&] {  // with three warpgroups and softcap, or 128 columns, registers are short
    if constexpr (Shape::kTiles == 3 && (kTransform || Shape::kDim == 128)) {
      return ThreadRows::make<true>(args);
    } else {
      return kept;
    }
  };
  const bool from_left = args.common.plan.window.left < kOpenWindow;
  const int32_t first = w * args.tile_tokens;  // of this warpgroup's tokens, in the unit

  PipelineState<Shape::kStagesKv> kv;
  typename Math::Scores s;
  typename Math::Sums o;
  typename Math::Weights p;
  float factor[2];
  RowState state;
  int32_t tile = 0;
  int32_t end_tile = 0;
  uint32_t round = 0;

  const auto stage_q = [&] { return static_cast<int>(round % Shape::kStagesQ); };
  // Open unit
  const auto open = [&] {
    ptx::mbarrier_wait(&shared.q_full[stage_q()], static_cast<int>(round / Shape::kStagesQ & 1));
    const ForwardUnit& unit = shared.unit(round);
    tile = unit.first_tile;
    end_tile = unit.end_tile;
    state = RowState{};
    return VisibleKeys(unit, thread_rows(), shared.ends[round & 1] + first, unit.token + first, args.tile_tokens);
  };
  // One arrival a warp: it has read the tile
  const auto release = [&](uint64_t* empty) {
    if (lane == 0) ptx::mbarrier_arrive(empty);
  };
  // The next tile of keys or of values: its stage
  const auto next_tile = [&] {
    const int stage = kv.stage;
    ptx::mbarrier_wait(&shared.kv_full[stage], kv.parity);
    kv.next();
    return stage;
  };
  // Issue QK
  const auto start_scores = [&](int stage) {
    Math::start_scores(s, Shape::tile_q(base, stage_q(), w), Shape::tile_kv(base, stage));
  };
  // Release K, transform, mask, softmax
  const auto end_scores = [&](int stage, const VisibleKeys& keys) {
    ptx::fence_operands(s);
    release(&shared.kv_empty[stage]);
    if (!Shape::kOutThroughQ && tile + 1 == end_tile) {
      __syncwarp();
      release(&shared.q_empty[stage_q()]);
    }
    transform.apply(s);
    const int32_t first_key = tile * Shape::kKeys;
    if (first_key < keys.all.begin || first_key + Shape::kKeys > keys.all.end)
      Math::mask(s, keys, first_key, from_left);
    return Math::softmax(s, state, factor, scale);
  };
  // Issue PV
  const auto start_values = [&](int stage, bool add) { Math::start_values(o, p, Shape::tile_kv(base, stage), add); };
  // Release V
  const auto end_values = [&](int stage) {
    ptx::fence_operands(o);
    release(&shared.kv_empty[stage]);
  };
  // Epilogue: lse and out
  const auto close = [&] {
    const ForwardUnit& unit = shared.unit(round);
    Math::finish(args, unit, thread_rows(), unit.token + first, state, o, Shape::tile_q(base, stage_q(), w), transform);
    if (!Shape::kOutThroughQ) return;
    ptx::fence_proxy_async();
    __syncwarp();
    release(&shared.out_full[stage_q()][w]);
  };

  const auto rescale = [&] {
#pragma unroll
    for (int i = 0; i < Math::kSums; ++i) o[i] *= factor[i / 2 % 2];
  };

  for (; shared.has_unit(round); ++round) {
    const VisibleKeys keys = open();
    bool add = false;  // to values of steps before
    if constexpr (Shape::kScoresBesideValues) {
      // First step: only scores
      const int stage_k = next_tile();
      start_scores(stage_k);
      ptx::wgmma_wait_group<0>();
      end_scores(stage_k, keys);
      Math::to_weights(p, s);
      // Following steps: scores of this step overlap values of the step before
      while (++tile < end_tile) {
        const int stage_k = next_tile();
        start_scores(stage_k);
        const int stage_v = next_tile();
        start_values(stage_v, add);
        add = true;
        ptx::wgmma_wait_group<1>();
        const bool moved = end_scores(stage_k, keys);
        ptx::fence_operands(s);
        ptx::wgmma_wait_group_after(end_tile);  // for o, behind the softmax; a number above 0
        end_values(stage_v);
        if (moved) rescale();
        Math::to_weights(p, s);
      }
      // Last values
      const int stage_v = next_tile();
      start_values(stage_v, add);
      ptx::wgmma_wait_group<0>();
      end_values(stage_v);
    } else {
      // Steps up to the last whose keys a row sees: scores, then values. Each tile is waited for during a product
      int stage_k = next_tile();
      for (bool more = true; more;) {
        start_scores(stage_k);
        const int stage_v = next_tile();
        ptx::wgmma_wait_group<0>();
        const bool moved = end_scores(stage_k, keys);
        if (add && moved) rescale();
        Math::to_weights(p, s);
        start_values(stage_v, add);
        add = true;
        more = ++tile < end_tile && tile * Shape::kKeys < keys.end;
        if (more) stage_k = next_tile();
        ptx::wgmma_wait_group<0>();
        end_values(stage_v);
      }
      // The unit's last steps, which only other warpgroups' rows see
      for (; tile < end_tile; ++tile) {
        release(&shared.kv_empty[next_tile()]);
        release(&shared.kv_empty[next_tile()]);
      }
    }
    close();
  }
}

}  // namespace packing_ops::attention::sm90
