// Tiles in shared memory: [rows, kDim] of 16-bit elements in panels of 64 columns. A panel's row is 128 bytes whose
// 16-byte chunks are swizzled by the row (CUTLASS's Swizzle<3, 3, 3>, TMA's 128B), so that eight rows of one column hit
// all 32 banks. kDim = 96 ends in a panel
// of 32 columns.
#pragma once

#include "core/ptx/mma.cuh"
#include "ops/attention/cuda/mask.cuh"
#include "ops/attention/cuda/pack_gqa.cuh"
#include "ops/attention/cuda/pages.cuh"

namespace packing_ops::attention {

template <int kRows, int kDim>
struct Tile {
  static constexpr int kFullPanels = kDim / 64;
  static constexpr bool kHalfPanel = kDim % 64 != 0;
  static constexpr int kBytes = kRows * kDim * 2;
  static_assert(kDim % 64 == 0 || kDim % 64 == 32);

  uint32_t base;  // shared address, 128-byte aligned

  __device__ uint32_t chunk(int panel, int row, int c) const {
    if (kHalfPanel && panel == kFullPanels) {
      return base + kFullPanels * kRows * 128 + row * 64 + ((c ^ ((row >> 1) & 3)) << 4);
    }
    return base + panel * kRows * 128 + row * 128 + ((c ^ (row & 7)) << 4);
  }
};

// Rows of one head of a [total, heads, head_dim] tensor into a tile. source(row) gives the row's address or null, which
// becomes zeros; so do the columns from head_dim on.
// Rows first_row .. first_row + kCount by kThreads threads, of which this is number `thread`.
template <int kThreads, int kCount, int kRows, int kDim, class Source>
__device__ __forceinline__ void load_rows(Tile<kRows, kDim> tile, int first_row, int thread, int head_dim,
                                          const void* anywhere, const Source& source) {
  const int c = thread & 7;
  constexpr int kRowsAtOnce = kThreads / 8;
  static_assert(kCount % kRowsAtOnce == 0);
#pragma unroll
  for (int pass = 0; pass < kCount / kRowsAtOnce; ++pass) {
    const int row = first_row + pass * kRowsAtOnce + (thread >> 3);
    const uint16_t* from = static_cast<const uint16_t*>(source(row));
#pragma unroll
    for (int panel = 0; panel < (kDim + 63) / 64; ++panel) {
      if (Tile<kRows, kDim>::kHalfPanel && panel == kDim / 64 && c >= 4) continue;
      const int column = panel * 64 + c * 8;
      const bool valid = from != nullptr && column < head_dim;
      ptx::cp_async_16(tile.chunk(panel, row, c), valid ? from + column : anywhere, valid);
    }
  }
}

// The same without the checks: every row exists, head_dim is kDim, and `from`, the address of this thread's 16 bytes of
// its first row, grows by `step` elements every kThreads / 8 rows.
template <int kThreads, int kCount, int kRows, int kDim>
__device__ __forceinline__ void load_rows_unchecked(Tile<kRows, kDim> tile, int first_row, int thread,
                                                    const uint16_t* from, int64_t step) {
  constexpr int kRowsAtOnce = kThreads / 8;
  const int c = thread & 7;
  const int thread_row = first_row + (thread >> 3);
#pragma unroll
  for (int pass = 0; pass < kCount / kRowsAtOnce; ++pass, from += step) {
    const int row = thread_row + pass * kRowsAtOnce;
#pragma unroll
    for (int panel = 0; panel < kDim / 64; ++panel) ptx::cp_async_16(tile.chunk(panel, row, c), from + panel * 64);
    if constexpr (Tile<kRows, kDim>::kHalfPanel) {
      if (c < 4) ptx::cp_async_16(tile.chunk(kDim / 64, row, c), from + kDim / 64 * 64);
    }
  }
}

template <int kThreads, int kRows, int kDim>
__device__ __forceinline__ void load_tile_unchecked(Tile<kRows, kDim> tile, int thread, const uint16_t* from,
                                                    int64_t step) {
  load_rows_unchecked<kThreads, kRows>(tile, 0, thread, from, step);
}

// The same with checks: rows from `valid` on and columns from head_dim on become zeros; rows from `rows` on are left.
template <int kThreads, int kRows, int kDim>
__device__ __forceinline__ void load_tile_checked(Tile<kRows, kDim> tile, int thread, const uint16_t* from,
                                                  int64_t step, int32_t valid, int head_dim, const void* anywhere,
                                                  int32_t rows) {
  const int c = thread & 7;
#pragma unroll
  for (int row = 0; row < kRows; row += kThreads / 8, from += step) {
    if (row >= rows) break;
    const int thread_row = row + (thread >> 3);
#pragma unroll
    for (int panel = 0; panel < (kDim + 63) / 64; ++panel) {
      if (Tile<kRows, kDim>::kHalfPanel && panel == kDim / 64 && c >= 4) continue;
      const bool exists = thread_row < valid && panel * 64 + c * 8 < head_dim;
      ptx::cp_async_16(tile.chunk(panel, thread_row, c), exists ? from + panel * 64 : anywhere, exists);
    }
  }
}

// Keys that a tile may hold: `valid` of them, from `row` of k and v on.
struct KeySpan {
  int64_t row;
  int32_t valid;
};

// A head of them: rows that follow each other in memory.
struct KeyRows {
  const uint16_t* data;  // row of the first key
  int64_t token_stride;
  int32_t valid;
  __device__ const void* operator()(int row) const { return row < valid ? data + row * token_stride : nullptr; }
};

__device__ __forceinline__ KeyRows key_rows(const AttentionTensor& rows, const KeySpan& keys, int32_t kv_head) {
  return {static_cast<const uint16_t*>(rows.data) + keys.row * rows.token_stride + kv_head * rows.head_stride,
          rows.token_stride, keys.valid};
}

__device__ __forceinline__ KeySpan key_span(const Args& args, const DocumentView& d, int32_t first_key) {
  return {row_of_key(args, d, first_key), d.keys - first_key};
}

// load_rows of keys, in fewer instructions and more registers.
template <int kThreads, int kRows, int kDim>
__device__ __forceinline__ void load_keys(Tile<kRows, kDim> tile, const AttentionTensor& from, const KeySpan& keys,
                                          int32_t kv_head, int head_dim, int thread, int32_t rows = kRows) {
  static_assert(kForkAlignment % kRows == 0);  // a tile is in one page
  const int32_t valid = keys.valid;
  const int64_t step = kThreads / 8 * from.token_stride;
  const uint16_t* thread_source = static_cast<const uint16_t*>(from.data) +
                                  (keys.row + (thread >> 3)) * from.token_stride + kv_head * from.head_stride +
                                  (thread & 7) * 8;
  if (valid >= kRows && head_dim == kDim) {
    load_tile_unchecked<kThreads>(tile, thread, thread_source, step);
  } else {
    load_tile_checked<kThreads>(tile, thread, thread_source, step, valid, head_dim, from.data, rows);
  }
}

template <int kThreads, int kRows, int kDim>
__device__ __forceinline__ void load_packed_rows(Tile<kRows, kDim> tile, int thread, const AttentionTensor& from,
                                                 const PackedRows& rows, int head_dim) {
  const uint16_t* data = static_cast<const uint16_t*>(from.data);
  load_rows<kThreads, kRows>(tile, 0, thread, head_dim, data, [&](int row) -> const void* {
    return rows.exists(row) ? data + rows.offset(row, from.token_stride, from.head_stride) : nullptr;
  });
}

// The same, unchecked: every row exists and a pass's rows are token-aligned (the group divides them).
template <int kThreads, int kRows, int kDim>
__device__ __forceinline__ void load_packed_rows_unchecked(Tile<kRows, kDim> tile, int thread,
                                                           const AttentionTensor& from, const PackedRows& rows) {
  const uint16_t* first =
      static_cast<const uint16_t*>(from.data) + rows.offset(thread >> 3, from.token_stride, from.head_stride);
  load_tile_unchecked<kThreads>(tile, thread, first + (thread & 7) * 8,
                                rows.token_step(kThreads / 8) * from.token_stride);
}

}  // namespace packing_ops::attention
