// What the walks over a document's chunks share. A warp has 16 columns of a head's state, transposed and in float32, in
// its registers from chunk to chunk. Columns do not meet: what is made of them goes from product to product in
// registers, and the warps of a block share what they read of a chunk, no more.
#pragma once

#include "ops/scan/scan_kernels.cuh"

namespace packing_ops::scan {

// Warps of a block. head_dim 256 in float32 leaves shared memory for two.
template <class T, int kDim>
constexpr int walk_warps() {
  return sizeof(T) == 4 && kDim == 256 ? 2 : 4;
}
constexpr int kWarpColumns = 16;

__device__ __forceinline__ int warp_column() {
  return static_cast<int>(threadIdx.x) / 32 * kWarpColumns;
}

// The document, head and columns of this block.
struct Slice {
  int64_t document, head, k_head;
  int column;
  Interval<int64_t> rows;
  int64_t place;  // of the first chunk
  int chunks;

  __device__ Slice(const ScanParams& p, int columns) {
    const int64_t slices = p.head_dim_v / columns;
    const int64_t block = blockIdx.x;
    column = static_cast<int>(block % slices) * columns;
    head = block / slices % p.num_v_heads;
    document = block / slices / p.num_v_heads;
    k_head = head / (p.num_v_heads / p.num_k_heads);
    const bool padding = document == p.documents.num_documents;
    rows = padding ? Interval<int64_t>{p.documents.end(), p.documents.total} : p.documents[document];
    place = padding ? 0 : first_place(p.documents, document);
    chunks = padding ? 0 : static_cast<int>((rows.size() + kChunk - 1) / kChunk);
  }

  __device__ bool is_padding(const ScanParams& p) const { return document == p.documents.num_documents; }
  // Of the warp's columns.
  __device__ int64_t state_offset(const ScanParams& p) const {
    const int64_t first = (document * p.num_v_heads + head) * p.head_dim * p.head_dim_v;
    return first + (column + warp_column()) * p.state_column();
  }
  __device__ int64_t index(const ScanParams& p, int chunk) const { return chunk_index(p, place + chunk, head); }
  __device__ int valid(int chunk) const {
    const int64_t left = rows.size() - static_cast<int64_t>(chunk) * kChunk;
    return static_cast<int>(left < kChunk ? left : kChunk);
  }
  // Of this head's row in a tensor [total, num_v_heads, head_dim_v].
  __device__ int64_t offset(const ScanParams& p, int chunk, int row) const {
    return ((rows.begin + static_cast<int64_t>(chunk) * kChunk + row) * p.num_v_heads + head) * p.head_dim_v + column;
  }
};

// Slots after the last document.
template <class T, int kColumns>
__device__ void zero_padding(const ScanParams& p, const Slice& slice, void* to) {
  const int64_t count = slice.rows.size() * kColumns;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    static_cast<T*>(to)[slice.offset(p, 0, 0) + i / kColumns * p.num_v_heads * p.head_dim_v + i % kColumns] =
        static_cast<T>(0.0f);
  }
}

// A warp's columns of a state: rows of 16 columns, as products leave them.
template <int kDim, bool kCorrects>
struct State {
  float at[kDim / 8][4];

  // f(column, row of the state, x, x of the next row)
  template <class F>
  __device__ __forceinline__ void for_each(const F& f) {
    for_each_pair(at, 0, 0, f);
  }
  // ScanParams::state_row() and state_column(), as constants where they are.
  __device__ static int64_t row_step(int64_t head_dim_v) { return kCorrects ? head_dim_v : 1; }
  static constexpr int kColumnStep = kCorrects ? 1 : kDim;

  // From states in float32; zeros without any.
  __device__ void load(const ScanParams& p, const void* from, int64_t offset) {
    const int64_t step = row_step(p.head_dim_v);
    for_each([&](int column, int row, float& x, float& y) {
      const float* first = static_cast<const float*>(from) + offset + row * step + column * kColumnStep;
      x = from ? first[0] : 0.0f;
      y = from ? first[step] : 0.0f;
    });
  }
  __device__ void store(const ScanParams& p, void* to, int64_t offset) {
    const int64_t step = row_step(p.head_dim_v);
    for_each([&](int column, int row, float x, float y) {
      float* first = static_cast<float*>(to) + offset + row * step + column * kColumnStep;
      first[0] = x;
      first[step] = y;
    });
  }
  // Transposed, as it is.
  template <class T>
  __device__ void keep(T* to) {
    for_each([&](int column, int row, float x, float y) { store_pair(to + column * kDim + row, x, y); });
  }
  __device__ void scale(float factor) {
    for_each([&](int, int, float& x, float& y) {
      x *= factor;
      y *= factor;
    });
  }
};

// What a walk reads of a chunk. `values` are rows of v or of dout; rows of results leave through them.
template <class T, int kDim, bool kCorrects>
struct Stage {
  static constexpr int kThreads = walk_warps<T, kDim>() * 32;  // that copy
  static constexpr int kColumns = walk_warps<T, kDim>() * kWarpColumns;
  Tile<T, kDim> keys, queries;
  Tile<T, kChunk> inverse, scores;
  Tile<T, kColumns> values;
  RowScales* scales;

  static constexpr int kMatrices = kCorrects ? 2 : 1;  // an inverse and scores, or only scores
  static constexpr int kBytes = 2 * Tile<T, kDim>::bytes(kChunk) + kMatrices * Tile<T, kChunk>::bytes(kChunk) +
                                Tile<T, kColumns>::bytes(kChunk) + kWalkScales;

  __device__ explicit Stage(Room room)
      : keys(room.take<Tile<T, kDim>>(kChunk)),
        queries(room.take<Tile<T, kDim>>(kChunk)),
        inverse(room.take<Tile<T, kChunk>>(kCorrects ? kChunk : 0)),
        scores(room.take<Tile<T, kChunk>>(kChunk)),
        values(room.take<Tile<T, kColumns>>(kChunk)),
        scales(room.take_array<RowScales>(0)) {}

  // kQueries: with queries and scores. One group of copies.
  template <bool kQueries>
  __device__ void load(const ScanParams& p, const Chunks& chunks, const HeadRows& of_values, const Slice& slice,
                       int chunk) const {
    const int64_t row = slice.rows.begin + static_cast<int64_t>(chunk) * kChunk;
    const int64_t index = slice.index(p, chunk);
    const int valid = slice.valid(chunk);
    const auto head_rows = [&](const HeadRows& rows, int64_t head) {
      return static_cast<const T*>(rows.data) + row * rows.token + head * rows.head;
    };
    load_rows<kThreads, kChunk>(keys, head_rows(p.k, slice.k_head), p.k.token, valid);
    load_rows<kThreads, kChunk>(values, head_rows(of_values, slice.head) + slice.column, of_values.token, valid);
    const int64_t matrix = index * kChunk * kChunk;
    if constexpr (kCorrects) {
      load_rows<kThreads, kChunk>(inverse, static_cast<const T*>(chunks.inverses) + matrix, kChunk, kChunk);
    }
    if constexpr (kQueries) {
      load_rows<kThreads, kChunk>(queries, head_rows(p.q, slice.k_head), p.q.token, valid);
      load_rows<kThreads, kChunk>(scores, static_cast<const T*>(chunks.scores) + matrix, kChunk, kChunk);
    }
    load_bytes<kThreads>(scales, chunks.scales + index, kWalkScales);
    ptx::cp_async_commit();
  }
};

// The shared memory of a walk: in float32 what operands need, then the stages.
template <class T, int kDim, bool kCorrects>
struct WalkShared {
  using OneStage = Stage<T, kDim, kCorrects>;
  static constexpr int kScratch = sizeof(T) == 4 ? Tile<float, kDim>::bytes(kWarpColumns) : 0;  // of a warp
  uint8_t* memory;

  static constexpr int bytes(int stages) { return walk_warps<T, kDim>() * kScratch + stages * OneStage::kBytes; }
  __device__ float* scratch() const { return reinterpret_cast<float*>(memory + threadIdx.x / 32 * kScratch); }
  __device__ OneStage stage(int i) const {
    return OneStage(Room{memory + walk_warps<T, kDim>() * kScratch + i * OneStage::kBytes});
  }
};

// Half of a block's warps copy, so that those with columns do nothing else.
template <class T, int kDim>
constexpr int walk_threads() {
  return 2 * walk_warps<T, kDim>() * 32;
}
__device__ __forceinline__ bool has_columns() {
  return threadIdx.x < blockDim.x / 2;
}

// step(chunk, stage) for the chunks `first`, first + kStep, ... With two stages the next chunk is copied meanwhile.
template <int kStages, int kStep, class Shared, class Load, class Step>
__device__ __forceinline__ void for_each_chunk(const Shared& shared, int first, int chunks, const Load& load,
                                               const Step& step) {
  const bool computes = has_columns();
  if (kStages == 2 && chunks > 0 && !computes) load(shared.stage(0), first);
  for (int i = 0; i < chunks; ++i) {
    const int chunk = first + i * kStep;
    if constexpr (kStages == 1) {
      __syncthreads();  // the stage has been read
      if (!computes) load(shared.stage(0), chunk);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (computes) {
      step(chunk, shared.stage(i % kStages));
    } else if (kStages == 2 && i + 1 < chunks) {
      load(shared.stage((i + 1) % 2), chunk + kStep);
    }
  }
}

// A warp's columns of a chunk's rows, transposed: 16 columns, and a number for each row.
using Columns = float[kChunk / 8][4];

// The row of a number of Columns.
__device__ __forceinline__ int row_of(int tile, int i) {
  return 8 * tile + lane_of() % 4 * 2 + i % 2;
}

template <class T, int kColumns>
__device__ __forceinline__ void load_columns(Tile<T, kColumns> rows, Columns& to) {
  if constexpr (sizeof(T) == 4) {
    for_each_pair(to, warp_column(), 0, [&](int column, int row, float& x, float& y) {
      x = *rows.at(row, column);
      y = *rows.at(row + 1, column);
    });
  } else {
    const int matrix = lane_of() / 8;
#pragma unroll
    for (int tile = 0; tile < kChunk / 8; tile += 2) {
      Vec<T, 8> loaded;
      const int row = 8 * tile + matrix / 2 * 8 + lane_of() % 8;
      ptx::ldmatrix_trans(loaded.word, ptx::shared_address(rows.at(row, warp_column() + matrix % 2 * 8)));
#pragma unroll
      for (int i = 0; i < 8; ++i) to[tile + i / 4][i % 4] = loaded.get(i);
    }
  }
}

// to += factor_of(row) times the rows' columns.
template <class T, int kColumns, class F>
__device__ __forceinline__ void add_columns(Columns& to, Tile<T, kColumns> rows, const F& factor_of) {
  Columns values;
  load_columns(rows, values);
#pragma unroll
  for (int tile = 0; tile < kChunk / 8; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[tile][i] += factor_of(row_of(tile, i)) * values[tile][i];
  }
}

// To rows of memory, `step` elements apart, of which there are `valid`. They leave through the warp's columns of
// `rows`.
template <class T, int kColumns>
__device__ __forceinline__ void store_columns(const Columns& from, Tile<T, kColumns> rows, T* to, int64_t step,
                                              int valid) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
  constexpr int kPieces = kWarpColumns / kPiece;
  __syncwarp();  // the columns have been read
  for_each_pair(from, warp_column(), 0, [&](int column, int row, float x, float y) {
    *rows.at(row, column) = static_cast<T>(x);
    *rows.at(row + 1, column) = static_cast<T>(y);
  });
  __syncwarp();
#pragma unroll 4
  for (int i = lane_of(); i < kChunk * kPieces; i += 32) {
    const int row = i / kPieces;
    const int column = warp_column() + i % kPieces * kPiece;
    if (row < valid) {
      *reinterpret_cast<Vec<T, kPiece>*>(to + row * step + column) =
          *reinterpret_cast<const Vec<T, kPiece>*>(rows.at(row, column));
    }
  }
}

// x = f(x, row) for all of them.
template <class F>
__device__ __forceinline__ void map_columns(Columns& columns, const F& f) {
  for_each_pair(columns, 0, 0, [&](int, int row, float& x, float& y) {
    x = f(x, row);
    y = f(y, row + 1);
  });
}

// call(head_dim, stages, whether the op corrects) as constants.
template <class T, class Call>
void dispatch_walk(const ScanParams& p, const Call& call) {
  const auto with_stages = [&](auto dim) {
    dispatch_corrects(p, [&](auto corrects) {
      constexpr int kBytes = WalkShared<T, dim, corrects>::bytes(2);
      dispatch_stages<T, kBytes>([&](auto stages) { call(dim, stages, corrects); });
    });
  };
  if (p.head_dim == 64) return with_stages(std::integral_constant<int, 64>{});
  if (p.head_dim == 128) return with_stages(std::integral_constant<int, 128>{});
  with_stages(std::integral_constant<int, 256>{});
}

// A block for each document, the padding after them included, each head and slice.
inline unsigned walk_grid(const ScanParams& p, int columns) {
  return static_cast<unsigned>((p.documents.num_documents + 1) * p.num_v_heads * (p.head_dim_v / columns));
}

}  // namespace packing_ops::scan
