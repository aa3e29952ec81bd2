// Tiles in shared memory: [rows, kDim] of 16-bit elements in panels of 64 columns. A panel's row is 128 bytes whose
// 16-byte chunks are permuted by the row, so that eight rows of one column meet all 32 banks. kDim = 96 ends in a panel
// of 32 columns.
#pragma once

#include "core/ptx/mma.cuh"
#include "ops/attention/attention_window.cuh"
#include "ops/attention/sm80/args.h"

namespace packing_ops::sm80 {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// What the softmax sees of a dot product.
__device__ __forceinline__ float capped(float dot, float softmax_scale, float softcap, float* tanh_out) {
  const float t = tanhf(dot * softmax_scale / softcap);
  *tanh_out = t;
  return softcap * t;
}

__device__ __forceinline__ float transform_score(float dot, const Args& args) {
  float t;
  return args.softcap > 0.f ? capped(dot, args.softmax_scale, args.softcap, &t) : dot * args.softmax_scale;
}

// Which of a fragment's matrices lie side by side: A and transposed B read rows first, B and transposed A columns
// first.
enum class Lanes { kRowsFirst, kColumnsFirst };

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

// Where a lane reads in the 16x16 block at the start of a tile.
struct LaneOffset {
  uint32_t full;
  uint32_t half;  // in a panel of 32 columns

  __device__ explicit LaneOffset(Lanes lanes) {
    const int lane = threadIdx.x & 31;
    const int row = lanes == Lanes::kRowsFirst ? lane & 15 : (lane & 7) + ((lane >> 4) << 3);
    const int c = lanes == Lanes::kRowsFirst ? lane >> 4 : (lane >> 3) & 1;
    full = row * 128 + ((c ^ (row & 7)) << 4);
    half = row * 64 + ((c ^ ((row >> 1) & 3)) << 4);
  }
};

// One lane's addresses for 16x16 blocks of a tile from first_row on; rows and columns in steps of 16 (rows of 8 with
// kColumnsFirst too).
template <int kRows, int kDim>
struct LaneView {
  using T = Tile<kRows, kDim>;
  uint32_t full;
  uint32_t half;

  __device__ LaneView(T tile, LaneOffset lane, int first_row)
      : full(tile.base + first_row * 128 + lane.full),
        half(tile.base + T::kFullPanels * kRows * 128 + first_row * 64 + lane.half) {}
  __device__ LaneView(T tile, Lanes lanes, int first_row) : LaneView(tile, LaneOffset(lanes), first_row) {}
  // Block of 16 columns `column`, `row` rows further down (a multiple of 8).
  __device__ uint32_t at(int row, int column) const {
    if (T::kHalfPanel && column / 4 == T::kFullPanels) return (half ^ ((column & 1) << 5)) + row * 64;
    return (full ^ ((column & 3) << 5)) + (column / 4) * kRows * 128 + row * 128;
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
      ptx::copy_16(tile.chunk(panel, row, c), valid ? from + column : anywhere, valid);
    }
  }
}

// The same without the checks: every row exists, head_dim is kDim, and `from`, the address of this thread's 16 bytes of
// its first row, grows by `step` elements every kThreads / 8 rows.
template <int kThreads, int kCount, int kRows, int kDim>
__device__ __forceinline__ void load_whole_rows(Tile<kRows, kDim> tile, int first_row, int thread, const uint16_t* from,
                                                int64_t step) {
  constexpr int kRowsAtOnce = kThreads / 8;
  const int c = thread & 7;
  const int own_row = first_row + (thread >> 3);
#pragma unroll
  for (int pass = 0; pass < kCount / kRowsAtOnce; ++pass, from += step) {
    const int row = own_row + pass * kRowsAtOnce;
#pragma unroll
    for (int panel = 0; panel < kDim / 64; ++panel) ptx::copy_16(tile.chunk(panel, row, c), from + panel * 64);
    if constexpr (Tile<kRows, kDim>::kHalfPanel) {
      if (c < 4) ptx::copy_16(tile.chunk(kDim / 64, row, c), from + kDim / 64 * 64);
    }
  }
}

template <int kThreads, int kRows, int kDim>
__device__ __forceinline__ void load_whole_tile(Tile<kRows, kDim> tile, int thread, const uint16_t* from,
                                                int64_t step) {
  load_whole_rows<kThreads, kRows>(tile, 0, thread, from, step);
}

// The same where only `valid` rows exist, or head_dim columns: the others become zeros, but for rows from `rows` on.
template <int kThreads, int kRows, int kDim>
__device__ __forceinline__ void load_part_of_tile(Tile<kRows, kDim> tile, int thread, const uint16_t* from,
                                                  int64_t step, int32_t valid, int head_dim, const void* anywhere,
                                                  int32_t rows) {
  const int c = thread & 7;
#pragma unroll
  for (int row = 0; row < kRows; row += kThreads / 8, from += step) {
    if (row >= rows) break;
    const int own_row = row + (thread >> 3);
#pragma unroll
    for (int panel = 0; panel < (kDim + 63) / 64; ++panel) {
      if (Tile<kRows, kDim>::kHalfPanel && panel == kDim / 64 && c >= 4) continue;
      const bool exists = own_row < valid && panel * 64 + c * 8 < head_dim;
      ptx::copy_16(tile.chunk(panel, own_row, c), exists ? from + panel * 64 : anywhere, exists);
    }
  }
}

// Keys first_key .. of a document's head: rows that follow each other in memory.
struct KeyRows {
  const uint16_t* data;  // row of first_key
  int64_t token_stride;
  int32_t valid;
  __device__ const void* operator()(int row) const { return row < valid ? data + row * token_stride : nullptr; }
};

__device__ __forceinline__ KeyRows key_rows(const AttentionTensor& rows, const DocumentView& d, int32_t kv_head,
                                            int32_t first_key) {
  return {static_cast<const uint16_t*>(rows.data) + (d.start_k + first_key) * rows.token_stride +
              kv_head * rows.head_stride,
          rows.token_stride, d.keys - first_key};
}

// load_rows of them in fewer instructions and more registers.
template <int kThreads, int kRows, int kDim>
__device__ __forceinline__ void load_keys(Tile<kRows, kDim> tile, const AttentionTensor& from, const DocumentView& d,
                                          int32_t kv_head, int32_t first_key, int head_dim, int thread,
                                          int32_t rows = kRows) {
  const int32_t valid = d.keys - first_key;
  const int64_t step = kThreads / 8 * from.token_stride;
  const uint16_t* own = static_cast<const uint16_t*>(from.data) +
                        (d.start_k + (first_key + (thread >> 3))) * from.token_stride + kv_head * from.head_stride +
                        (thread & 7) * 8;
  if (valid >= kRows && head_dim == kDim) {
    load_whole_tile<kThreads>(tile, thread, own, step);
  } else {
    load_part_of_tile<kThreads>(tile, thread, own, step, valid, head_dim, from.data, rows);
  }
}

// Packed rows of a document and kv head from `first` on: row r is token r / group, head r % group of the group.
struct GroupRows {
  int64_t first_token;  // of row 0, in the packed batch
  int32_t token;        // the same, in the document
  int32_t skipped;      // first % group
  int32_t group;
  uint32_t inverse;  // Args::group_inverse
  int32_t valid;     // rows that exist, of kRows
  int32_t first_head;
  int64_t left;  // rows from `first` to the document's end

  GroupRows() = default;
  // Row 0 is head `skipped` of the group at `token`, which is packed row `first` of the document.
  __device__ GroupRows(const Args& args, const DocumentView& d, int32_t kv_head, int32_t token, int32_t skipped,
                       int64_t first, int rows)
      : first_token(d.start_q + token),
        token(token),
        skipped(skipped),
        group(args.group),
        inverse(args.group_inverse),
        first_head(kv_head * args.group),
        left(static_cast<int64_t>(d.tokens) * args.group - first) {
    valid = static_cast<int32_t>(left < rows ? left : rows);
  }
  __device__ GroupRows(const Args& args, const DocumentView& d, int32_t kv_head, int64_t first, int rows)
      : GroupRows(args, d, kv_head, static_cast<int32_t>(first / args.group), static_cast<int32_t>(first % args.group),
                  first, rows) {}
  // A number of rows to go by, back where it is less than 0.
  struct Stride {
    int32_t rows;
    int32_t tokens;  // further back than this many no stride goes
  };
  __device__ Stride stride(int by) const { return {by, by < 0 ? quotient(group - 1 - by) : 0}; }
  // The `rows` rows that start a stride further.
  __device__ GroupRows moved(const Stride& by, int rows) const {
    const int32_t row = skipped + by.rows + by.tokens * group;
    const int32_t tokens = quotient(row);
    const int32_t step = tokens - by.tokens;
    GroupRows there = *this;
    there.first_token += step;
    there.token += step;
    there.skipped = row - tokens * group;
    there.left -= by.rows;
    there.valid = static_cast<int32_t>(there.left < rows ? there.left : rows);
    return there;
  }
  __device__ GroupRows moved(int by, int rows) const { return moved(stride(by), rows); }
  __device__ int32_t quotient(int x) const { return static_cast<int32_t>((static_cast<uint32_t>(x) * inverse) >> 22); }
  __device__ int32_t token_step(int row) const { return quotient(row + skipped); }
  __device__ int32_t token_of(int row) const { return token + token_step(row); }
  __device__ int32_t last_token() const { return token_of(valid - 1); }
  // Element offset of a row in `rows`, or in a contiguous [total, num_heads] array with unit head stride.
  __device__ int64_t offset(int row, int64_t token_stride, int64_t head_stride) const {
    const int32_t step = token_step(row);
    return (first_token + step) * token_stride + (first_head + row + skipped - step * group) * head_stride;
  }
};

template <int kThreads, int kRows, int kDim>
__device__ __forceinline__ void load_group_rows(Tile<kRows, kDim> tile, int thread, const AttentionTensor& from,
                                                const GroupRows& rows, int head_dim) {
  const uint16_t* data = static_cast<const uint16_t*>(from.data);
  load_rows<kThreads, kRows>(tile, 0, thread, head_dim, data, [&](int row) -> const void* {
    return row < rows.valid ? data + rows.offset(row, from.token_stride, from.head_stride) : nullptr;
  });
}

// The same for whole tiles of a group that divides the rows of a pass.
template <int kThreads, int kRows, int kDim>
__device__ __forceinline__ void load_whole_group_rows(Tile<kRows, kDim> tile, int thread, const AttentionTensor& from,
                                                      const GroupRows& rows) {
  const uint16_t* first =
      static_cast<const uint16_t*>(from.data) + rows.offset(thread >> 3, from.token_stride, from.head_stride);
  load_whole_tile<kThreads>(tile, thread, first + (thread & 7) * 8, rows.token_step(kThreads / 8) * from.token_stride);
}

// Row g (kHalf = 0) or g + 8 (kHalf = 1) of kBlocks accumulators [16, 8], scaled, to 16-bit memory from column
// first_column on. All lanes of the warp take part; row is null where there is nothing to store. Lane t of a quad holds
// word t of each block; neighbours exchange words, so that each has two of one block and the quad stores 32 bytes.
template <class T, int kBlocks>
__device__ __forceinline__ void store_row(uint16_t* row, int first_column, int head_dim, const float (&acc)[kBlocks][4],
                                          int half, float scale) {
  static_assert(kBlocks % 2 == 0);
  const int t = threadIdx.x & 3;
  const bool odd = t & 1;
  const int own_column = first_column + 8 * (t & 1) + 2 * (t & 2);
  uint16_t* own = ptx::opaque(row + own_column);
  const int columns = row == nullptr ? 0 : head_dim - own_column;
#pragma unroll
  for (int b = 0; b < kBlocks; b += 2) {
    const uint32_t even_word = pack<T>(acc[b][2 * half] * scale, acc[b][2 * half + 1] * scale);
    const uint32_t odd_word = pack<T>(acc[b + 1][2 * half] * scale, acc[b + 1][2 * half + 1] * scale);
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? even_word : odd_word, 1);
    if (8 * b < columns) {
      *reinterpret_cast<uint2*>(own + 8 * b) = odd ? make_uint2(got, odd_word) : make_uint2(even_word, got);
    }
  }
}

}  // namespace packing_ops::sm80
