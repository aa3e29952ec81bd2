// One step of the backward: s = q k^T and p, dp = dout v^T and ds, dv += p^T dout and dk += ds^T q, dq = ds k.
#pragma once

#include "ops/attention/cuda/epilogue.cuh"
#include "ops/attention/cuda/sm80/backward_shape.cuh"
#include "ops/attention/cuda/sm80/lane_view.cuh"
#include "ops/attention/cuda/softmax.cuh"

namespace packing_ops::attention::sm80 {

template <class T, class Shape, bool kTransform>
struct BackwardUnit {
  static constexpr int kDim = Shape::kDim;
  static constexpr int kKeys = Shape::kKeys;
  using TileK = typename Shape::TileK;
  using TileV = typename Shape::TileV;
  using TileQ = typename Shape::TileQ;
  using TileDout = typename Shape::TileDout;
  using TileS = typename Shape::TileS;
  static constexpr int kRowTiles = Shape::kScoreRows / 16;
  static constexpr int kKeyBlockStride = Shape::kKeyWarps;  // blocks between a warp's two blocks of keys
  static constexpr int kScoreBlockStride = Shape::kScoreBlockStride;
  using Scores = float[kRowTiles][2 * Shape::kScoreBlocks][4];  // [16 rows, 8 keys] each, two for a block of keys
  using SumsK = float[2][Shape::kColumns / 8][4];               // [16 keys, 8 columns] each
  using SumsV = float[2][Shape::kColumnsV / 8][4];

  uint32_t base;
  LaneOffset rows_first;
  LaneOffset columns_first;

  __device__ explicit BackwardUnit(uint32_t base)
      : base(base), rows_first(Lanes::kRowsFirst), columns_first(Lanes::kColumnsFirst) {
    // Opaque: kept in registers instead of being recomputed for each of a step's ten views.
    rows_first.full = ptx::opaque(rows_first.full);
    columns_first.full = ptx::opaque(columns_first.full);
  }

  __device__ TileK tile_k() const { return {ptx::opaque(base)}; }
  __device__ TileV tile_v() const { return {ptx::opaque(base) + TileK::kBytes}; }

  // Slots of the pipeline, used in turn: q, dout and row_stats in slot % kStages, p and ds in slot % kScoreTiles.
  static constexpr int kSlots = Shape::kStages * Shape::kScoreTiles;
  static __device__ int next_slot(int i) { return i + 1 == kSlots ? 0 : i + 1; }
  __device__ TileS tile_p(int i) const {
    return {ptx::opaque(base) + Shape::kKeyBytes + i % Shape::kScoreTiles * 2 * TileS::kBytes};
  }
  __device__ TileS tile_ds(int i) const { return {tile_p(i).base + TileS::kBytes}; }
  __device__ uint32_t stage(int i) const {
    const int lap = i < Shape::kStages ? i : i - Shape::kStages;
    return ptx::opaque(base) + Shape::kKeyBytes + 2 * Shape::kScoreTiles * TileS::kBytes + lap * Shape::kStageBytes;
  }
  __device__ TileQ tile_q(int i) const { return {stage(i)}; }
  __device__ TileDout tile_do(int i) const { return {stage(i) + TileQ::kBytes}; }
  __device__ uint32_t stats(int i) const { return stage(i) + TileQ::kBytes + TileDout::kBytes; }

  // By 128 threads, of which this is number `thread`.
  template <int kWidth>
  static __device__ __forceinline__ void load_tile(const Args& args, const PackedRows& rows,
                                                   const AttentionTensor& from, int head_dim,
                                                   Tile<Shape::kRows, kWidth> to, int thread) {
    if (rows.valid == Shape::kRows && rows.token >= 0 && args.token_aligned_group > 0) {
      load_packed_rows_unchecked<128>(to, thread, from, rows);
    } else {
      load_packed_rows<128>(to, thread, from, rows, head_dim);
    }
  }

  // By four warps that publish no ticket: a release fence would wait for these copies.
  static constexpr int kFirstLoader = Shape::kScoresAhead ? 0 : Shape::kThreads - 128;
  __device__ __forceinline__ void load_rows(const Args& args, const PackedRows& rows, int i) const {
    const int thread = static_cast<int>(threadIdx.x) - kFirstLoader;
    if (thread < 0 || thread >= 128) return;
    load_tile(args, rows, args.q, args.head_dim, tile_q(i), thread);
    load_tile(args, rows, args.dout, args.head_dim_v, tile_do(i), thread);
    if (thread < Shape::kRows) load_row_stats(args, rows, i, thread);
    ptx::cp_async_commit();
  }

  // Of a row: lse * log2(e) and rowsum(dout * out) - dlse; with kSingle lse and dlse, and the unit computes the sum.
  __device__ __forceinline__ void load_row_stats(const Args& args, const PackedRows& rows, int i, int row) const {
    const bool valid = rows.exists(row);
    const uint32_t to = stats(i) + row * 8;
    if constexpr (Shape::kSingle) {
      const int64_t at = valid ? rows.offset(row, 1, args.documents_q.total) : 0;
      const bool has_dlse = valid && args.dlse != nullptr;
      ptx::cp_async_4(to, args.lse + at, valid);
      ptx::cp_async_4(to + 4, has_dlse ? args.dlse + at : args.lse, has_dlse);
    } else {
      ptx::cp_async_8(to, valid ? args.row_stats + rows.offset(row, args.num_heads, 1) : args.row_stats, valid);
    }
  }

  // out = rows keys^T for kCount blocks of keys from first_key on, kScoreBlockStride apart.
  template <int kCount, int kWidth>
  __device__ __forceinline__ void product(Scores& out, Tile<Shape::kRows, kWidth> rows, int first_row,
                                          Tile<kKeys, kWidth> keys, int first_key) const {
    const LaneView<Shape::kRows, kWidth> a_view(rows, rows_first, first_row);
    const LaneView<kKeys, kWidth> b_view(keys, columns_first, first_key);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < 2 * kCount; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][n][i] = 0.f;
    // Double-buffered fragments: ldmatrix of the next 16 columns overlaps mma of these.
    uint32_t a[2][kRowTiles][4];
    uint32_t b[2][kCount][4];
    const auto load = [&](int j) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) ptx::ldmatrix(a[j & 1][m], a_view.at(16 * m, j));
#pragma unroll
      for (int c = 0; c < kCount; ++c) ptx::ldmatrix(b[j & 1][c], b_view.at(16 * kScoreBlockStride * c, j));
    };
    load(0);
#pragma unroll
    for (int j = 0; j < kWidth / 16; ++j) {
      if (j + 1 < kWidth / 16) load(j + 1);
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          ptx::mma<T>(out[m][2 * c], a[j & 1][m], b[j & 1][c][0], b[j & 1][c][1]);
          ptx::mma<T>(out[m][2 * c + 1], a[j & 1][m], b[j & 1][c][2], b[j & 1][c][3]);
        }
      }
    }
  }

  // A lane's rows are first_row + (lane / 4) + 8 i, its keys first_key + 2 (lane % 4) + {0, 1} + 8 n.
  template <class F>
  static __device__ __forceinline__ void for_each_row(const F& f) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) f(m, half);
    }
  }
  static __device__ __forceinline__ int lane_row(int first_row, int m, int half) {
    return first_row + ((threadIdx.x & 31) >> 2) + 16 * m + 8 * half;
  }

  // s becomes p, and slope ScoreTransform's; p is 0 where the key is masked.
  template <int kCount>
  static __device__ __forceinline__ void weights(Scores& s, Scores& slope, const float2* stats, const Args& args,
                                                 const DocumentWithEnds& d, const PackedRows& rows,
                                                 const ScoreBlock& block) {
    const ScoreTransform<kTransform> transform{args.scores};
    const float scale = transform.unit() * kLog2e;
    if constexpr (kTransform) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < 2 * kCount; ++n) {
          transform.apply(s[m][n]);
#pragma unroll
          for (int i = 0; i < 4; ++i) slope[m][n][i] = transform.slope(s[m][n][i]);
        }
    }
    for_each_row([&](int m, int half) {
      float lse = stats[lane_row(block.first_row, m, half)].x;
      if constexpr (Shape::kSingle) lse = lse == -INFINITY ? 0.f : lse * kLog2e;
#pragma unroll
      for (int n = 0; n < 2 * kCount; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          s[m][n][i] = ptx::exp2_approx(fmaf(s[m][n][i], scale, -lse));
        }
      }
    });
    if (!block.masked) return;
    const int32_t first_key = block.first_key + block.tile_key;
    for_each_row([&](int m, int half) {
      const int32_t row_token = rows.token_of(lane_row(block.first_row, m, half));
      const int32_t token = row_token < 0 ? 0 : row_token;
      const Interval<int32_t> visible = d.visible_keys(token, token);
#pragma unroll
      for (int n = 0; n < 2 * kCount; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int32_t key = first_key + (n / 2) * 16 * kScoreBlockStride + (n % 2) * 8 + 2 * (threadIdx.x & 3) + i;
          if (key < visible.begin || key >= visible.end) s[m][n][2 * half + i] = 0.f;
        }
      }
    });
  }

  // ds from dp = dout v^T; sum_of(m, half) is rowsum(dout * out) - dlse of a row.
  template <int kCount, class SumOf>
  static __device__ __forceinline__ void score_gradients(Scores& ds, const Scores& p, const Scores& slope,
                                                         const SumOf& sum_of) {
    for_each_row([&](int m, int half) {
      const float sum = sum_of(m, half);
#pragma unroll
      for (int n = 0; n < 2 * kCount; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          ds[m][n][i] = p[m][n][i] * (ds[m][n][i] - sum);
          if constexpr (kTransform) ds[m][n][i] *= slope[m][n][i];
        }
      }
    });
  }

  template <int kCount>
  static __device__ __forceinline__ void store(TileS tile, const Scores& x, int first_row, int first_key) {
    // Tile::chunk(.., row, first_key / 8) with the row's low bits taken from the lane, so that one address
    // serves all rows; the second half of a block is a chunk further, the next block kScoreBlockStride blocks.
    const int lane = threadIdx.x & 31;
    const int row = first_row + (lane >> 2);
    const uint32_t first = tile.chunk(first_key / 64, row, first_key / 8 % 8) + (lane & 3) * 4;
    constexpr int kRowBytes = Shape::kScoreColumns % 64 == 0 ? 128 : 64;
    constexpr int kFlip = kScoreBlockStride < 4 ? kScoreBlockStride << 5 : 0;
    constexpr int kFurther = kScoreBlockStride < 4 ? 0 : kScoreBlockStride / 4 * Shape::kRows * 128;
    for_each_row([&](int m, int half) {
#pragma unroll
      for (int n = 0; n < 2 * kCount; ++n) {
        const uint32_t at =
            (first ^ (n / 2 * kFlip) ^ (n % 2 << 4)) + n / 2 * kFurther + (16 * m + 8 * half) * kRowBytes;
        ptx::store_shared(at, pack<T>(x[m][n][2 * half], x[m][n][2 * half + 1]));
      }
    });
  }

  // p and ds of one block of scores, to shared memory for all warps.
  template <int kCount>
  __device__ __forceinline__ void scores(const uint8_t* generic, const Args& args, const DocumentWithEnds& d,
                                         const PackedRows& rows, int i, const ScoreBlock& block) const {
    const auto* row_stats = reinterpret_cast<const float2*>(generic + (stats(i) - base));
    Scores p;
    Scores slope;
    Scores ds;
    const int first_row = block.first_row;
    product<kCount>(p, tile_q(i), first_row, tile_k(), block.tile_key);
    weights<kCount>(p, slope, row_stats, args, d, rows, block);
    store<kCount>(tile_p(i), p, first_row, block.tile_key);
    product<kCount>(ds, tile_do(i), first_row, tile_v(), block.tile_key);
    score_gradients<kCount>(ds, p, slope, [&](int m, int half) { return row_stats[lane_row(first_row, m, half)].y; });
    store<kCount>(tile_ds(i), ds, first_row, block.tile_key);
  }

  // sums += weights^T rows for this warp's blocks of keys kFirst .. kFirst + kCount - 1.
  template <int kFirst, int kCount, bool kAllRows, int kWidth, int kBlocks>
  __device__ __forceinline__ void accumulate(float (&sums)[2][kBlocks][4], TileS weights,
                                             Tile<Shape::kRows, kWidth> rows, int key_block, int first_column,
                                             int row_blocks) const {
    const LaneView<Shape::kRows, Shape::kScoreColumns> a_view(weights, columns_first, 0);
    const LaneView<Shape::kRows, kWidth> b_view(rows, rows_first, 0);
    constexpr int kUnroll = kAllRows ? Shape::kRows / 16 : 1;
    const int end = kAllRows ? Shape::kRows / 16 : row_blocks;
#pragma unroll kUnroll
    for (int j = 0; j < end; ++j) {
      uint32_t a[kCount][4];
#pragma unroll
      for (int c = 0; c < kCount; ++c)
        ptx::ldmatrix_trans(a[c], a_view.at(16 * j, key_block + kKeyBlockStride * (kFirst + c)));
#pragma unroll
      for (int n = 0; n < kBlocks / 2; ++n) {
        uint32_t b[4];
        ptx::ldmatrix_trans(b, b_view.at(16 * j, first_column / 16 + n));
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          ptx::mma<T>(sums[kFirst + c][2 * n], a[c], b[0], b[1]);
          ptx::mma<T>(sums[kFirst + c][2 * n + 1], a[c], b[2], b[3]);
        }
      }
    }
  }

  template <int kFirst, int kCount, bool kAllRows>
  __device__ __forceinline__ void accumulate_both(SumsK& dk, SumsV& dv, int i, int key_block, int column_part,
                                                  int row_blocks) const {
    accumulate<kFirst, kCount, kAllRows>(dv, tile_p(i), tile_do(i), key_block, column_part * Shape::kColumnsV,
                                         row_blocks);
    accumulate<kFirst, kCount, kAllRows>(dk, tile_ds(i), tile_q(i), key_block, column_part * Shape::kColumns,
                                         row_blocks);
  }

  // dk and dv: add this step's products.
  __device__ __forceinline__ void add_keys(SumsK& dk, SumsV& dv, const RowTileVisit& visit, int i, int key_block,
                                           int column_part) const {
    const int row_blocks = (visit.rows() + 15) / 16;
    const bool attends_first_block = visit.attends_to(key_block);
    const bool attends_second_block = visit.attends_to(key_block + kKeyBlockStride);
    if (attends_first_block && attends_second_block && row_blocks == Shape::kRows / 16) {
      accumulate_both<0, 2, true>(dk, dv, i, key_block, column_part, row_blocks);
    } else if (attends_first_block && attends_second_block) {
      accumulate_both<0, 2, false>(dk, dv, i, key_block, column_part, row_blocks);
    } else if (attends_first_block) {
      accumulate_both<0, 1, false>(dk, dv, i, key_block, column_part, row_blocks);
    } else if (attends_second_block) {
      accumulate_both<1, 1, false>(dk, dv, i, key_block, column_part, row_blocks);
    }
  }

  // dk and dv of this warp's blocks of keys and columns; `keys`: of the key tile, in the document.
  __device__ __forceinline__ void store_keys(const Args& args, const DocumentView& d, int32_t kv_head,
                                             Interval<int32_t> keys, int key_block, int column_part, const SumsK& dk,
                                             const SumsV& dv) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t key = keys.begin + 16 * (key_block + c * kKeyBlockStride) + ((threadIdx.x & 31) >> 2) + 8 * half;
        const int64_t row = d.start_k + key;
        const auto address = [&](const AttentionTensor& to) {
          return key < keys.end ? static_cast<uint16_t*>(to.data) + row * to.token_stride + kv_head * to.head_stride
                                : nullptr;
        };
        store_row<T>(address(args.dk), column_part * Shape::kColumns, args.head_dim, dk[c], half,
                     args.scores.softmax_scale);
        store_row<T>(address(args.dv), column_part * Shape::kColumnsV, args.head_dim_v, dv[c], half, 1.f);
      }
    }
  }

  // dq of this warp's rows and columns from the ds of a step.
  static constexpr int kQueryTiles = Shape::kQueryRows / 16;
  static constexpr int kQueryBlocks = Shape::kQueryColumns / 8;
  using Queries = float[kQueryTiles][kQueryBlocks][4];
  static __device__ int query_row() {
    return static_cast<int>(threadIdx.x) / 32 % (Shape::kRows / Shape::kQueryRows) * Shape::kQueryRows;
  }
  static __device__ int query_column() {
    return static_cast<int>(threadIdx.x) / 32 / (Shape::kRows / Shape::kQueryRows) * Shape::kQueryColumns;
  }

  __device__ __forceinline__ void queries(Queries& dq, const RowTileVisit& visit, int i) const {
    const LaneView<Shape::kRows, Shape::kScoreColumns> a_view(tile_ds(i), rows_first, query_row());
    const LaneView<kKeys, kDim> b_view(tile_k(), rows_first, 0);
#pragma unroll
    for (int m = 0; m < kQueryTiles; ++m)
#pragma unroll
      for (int n = 0; n < kQueryBlocks; ++n)
#pragma unroll
        for (int x = 0; x < 4; ++x) dq[m][n][x] = 0.f;
    const auto add_block = [&](int j) {
      uint32_t a[kQueryTiles][4];
#pragma unroll
      for (int m = 0; m < kQueryTiles; ++m) ptx::ldmatrix(a[m], a_view.at(16 * m, j));
#pragma unroll
      for (int n = 0; n < kQueryBlocks; n += 2) {
        uint32_t b[4];
        ptx::ldmatrix_trans(b, b_view.at(16 * j, query_column() / 16 + n / 2));
#pragma unroll
        for (int m = 0; m < kQueryTiles; ++m) {
          ptx::mma<T>(dq[m][n], a[m], b[0], b[1]);
          ptx::mma<T>(dq[m][n + 1], a[m], b[2], b[3]);
        }
      }
    };
    if (visit.first_block() == 0 && visit.end_block() == kKeys / 16) {
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) add_block(j);
    } else {
#pragma unroll 1
      for (int j = visit.first_block(); j < visit.end_block(); ++j) add_block(j);
    }
  }

  static __device__ __forceinline__ void store_queries(const Args& args, const PackedRows& rows, const Queries& dq) {
#pragma unroll
    for (int m = 0; m < kQueryTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane_row(query_row(), m, half);
        uint16_t* to = rows.exists(row) ? static_cast<uint16_t*>(args.dq.data) +
                                              rows.offset(row, args.dq.token_stride, args.dq.head_stride)
                                        : nullptr;
        store_row<T>(to, query_column(), args.head_dim, dq[m], half, args.scores.softmax_scale);
      }
    }
  }
};

}  // namespace packing_ops::attention::sm80
