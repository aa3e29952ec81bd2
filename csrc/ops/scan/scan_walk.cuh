// What the walks over a document's chunks share: a block has a slice of the columns of a head's state, whose float32
// stays in registers from chunk to chunk. Columns do not meet, so that the slices need nothing of each other.
#pragma once

#include "ops/scan/scan_kernels.cuh"

namespace packing_ops::scan {

constexpr int kWalkThreads = 256;
constexpr int kWalkWarps = kWalkThreads / 32;

// head_dim 256 in float32 leaves shared memory for half a slice.
template <class T, int kDim>
constexpr int slice_of() {
  return sizeof(T) == 4 && kDim == 256 ? 16 : 32;
}

// The document, head and columns of this block.
struct Slice {
  int64_t document, head, k_head;
  int column;
  Interval<int64_t> rows;
  int64_t place;  // of the first chunk
  int chunks;

  __device__ Slice(const GatedDeltaParams& p, int columns) {
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

  __device__ bool is_padding(const GatedDeltaParams& p) const { return document == p.documents.num_documents; }
  __device__ int64_t state_offset(const GatedDeltaParams& p) const {
    return (document * p.num_v_heads + head) * p.head_dim * p.head_dim_v + column;
  }
  __device__ int64_t index(const GatedDeltaParams& p, int chunk) const { return chunk_index(p, place + chunk, head); }
  __device__ int valid(int chunk) const {
    const int64_t left = rows.size() - static_cast<int64_t>(chunk) * kChunk;
    return static_cast<int>(left < kChunk ? left : kChunk);
  }
  // Of this head's row in a tensor [total, num_v_heads, head_dim_v].
  __device__ int64_t offset(const GatedDeltaParams& p, int chunk, int row) const {
    return ((rows.begin + static_cast<int64_t>(chunk) * kChunk + row) * p.num_v_heads + head) * p.head_dim_v + column;
  }
};

// Slots after the last document.
template <class T, int kColumns>
__device__ void zero_padding(const GatedDeltaParams& p, const Slice& slice, void* to) {
  const int64_t count = slice.rows.size() * kColumns;
  for (int64_t i = threadIdx.x; i < count; i += kWalkThreads) {
    static_cast<T*>(to)[slice.offset(p, 0, 0) + i / kColumns * p.num_v_heads * p.head_dim_v + i % kColumns] =
        static_cast<T>(0.0f);
  }
}

// A slice of a state in the registers of the block's warps, as products leave it.
template <int kDim, int kColumns>
struct State {
  static constexpr int kWarpRows = kDim / 16 < kWalkWarps ? kDim / 16 : kWalkWarps;
  static constexpr int kParts = kDim / 16 / kWarpRows;
  static constexpr int kTiles = kColumns / 8 / (kWalkWarps / kWarpRows);
  float at[kParts][kTiles][4];

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ static int row(int part) { return (warp() % kWarpRows + part * kWarpRows) * 16; }
  __device__ static int column() { return warp() / kWarpRows * kTiles * 8; }

  template <class F>
  __device__ __forceinline__ void for_each(const F& f) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) for_each_pair(at[part], row(part), column(), f);
  }
  // From float32 rows, `step` elements apart; zeros without any.
  __device__ void load(const void* from, int64_t offset, int64_t step) {
    for_each([&](int i, int j, float& x, float& y) {
      const float* pair = static_cast<const float*>(from) + offset + i * step + j;
      x = from ? pair[0] : 0.0f;
      y = from ? pair[1] : 0.0f;
    });
  }
  template <class T>
  __device__ void store(void* to, int64_t offset, int64_t step) {
    for_each([&](int i, int j, float x, float y) { store_pair(static_cast<T*>(to) + offset + i * step + j, x, y); });
  }
  template <class T>
  __device__ void store(Tile<T, kColumns> tile) {
    for_each([&](int i, int j, float x, float y) { tile.set_pair(i, j, x, y); });
  }
  __device__ void scale(float factor) {
    for_each([&](int, int, float& x, float& y) {
      x *= factor;
      y *= factor;
    });
  }
  // += rows^T b, over the rows of a chunk.
  template <class T>
  __device__ void add_product(Tile<T, kDim> rows, Tile<T, kColumns> b) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      multiply<Order::kTransposed, Order::kPlain>(at[part], rows, row(part), b, column(), 0, kChunk);
    }
  }
};

// What a walk reads of a chunk. `values` are rows of v or of dout.
template <class T, int kDim, int kColumns>
struct Stage {
  Tile<T, kDim> keys, queries;
  Tile<T, kChunk> inverse, scores;
  Tile<T, kColumns> values;
  const RowScales* scales;

  static constexpr int kBytes = 2 * Tile<T, kDim>::bytes(kChunk) + 2 * Tile<T, kChunk>::bytes(kChunk) +
                                Tile<T, kColumns>::bytes(kChunk) + kWalkScales;

  __device__ explicit Stage(Room room)
      : keys(room.take<Tile<T, kDim>>(kChunk)),
        queries(room.take<Tile<T, kDim>>(kChunk)),
        inverse(room.take<Tile<T, kChunk>>(kChunk)),
        scores(room.take<Tile<T, kChunk>>(kChunk)),
        values(room.take<Tile<T, kColumns>>(kChunk)),
        scales(room.take_array<RowScales>(0)) {}

  // kQueries: with queries and scores. One group of copies.
  template <bool kQueries>
  __device__ void load(const GatedDeltaParams& p, const Chunks& chunks, const HeadRows& of_values, const Slice& slice,
                       int chunk) const {
    const int64_t row = slice.rows.begin + static_cast<int64_t>(chunk) * kChunk;
    const int64_t index = slice.index(p, chunk);
    const int valid = slice.valid(chunk);
    const auto head_rows = [&](const HeadRows& rows, int64_t head) {
      return static_cast<const T*>(rows.data) + row * rows.token + head * rows.head;
    };
    load_rows<kWalkThreads, kChunk>(keys, head_rows(p.k, slice.k_head), p.k.token, valid);
    load_rows<kWalkThreads, kChunk>(values, head_rows(of_values, slice.head) + slice.column, of_values.token, valid);
    const int64_t matrix = index * kChunk * kChunk;
    load_rows<kWalkThreads, kChunk>(inverse, static_cast<const T*>(chunks.inverses) + matrix, kChunk, kChunk);
    if constexpr (kQueries) {
      load_rows<kWalkThreads, kChunk>(queries, head_rows(p.q, slice.k_head), p.q.token, valid);
      load_rows<kWalkThreads, kChunk>(scores, static_cast<const T*>(chunks.scores) + matrix, kChunk, kChunk);
    }
    load_bytes<kWalkThreads>(const_cast<RowScales*>(scales), chunks.scales + index, kWalkScales);
    ptx::cp_async_commit();
  }
};

// The shared memory of a walk: the state as an operand, three tiles for what goes from product to product, the stages.
template <class T, int kDim, int kColumns>
struct WalkShared {
  Tile<T, kColumns> state;
  Tile<T, kColumns> first, second, third;
  Room stages;

  static constexpr int bytes(int stages) {
    return Tile<T, kColumns>::bytes(kDim) + 3 * Tile<T, kColumns>::bytes(kChunk) +
           stages * Stage<T, kDim, kColumns>::kBytes;
  }

  __device__ explicit WalkShared(uint8_t* shared) : stages{shared} {
    state = stages.take<Tile<T, kColumns>>(kDim);
    first = stages.take<Tile<T, kColumns>>(kChunk);
    second = stages.take<Tile<T, kColumns>>(kChunk);
    third = stages.take<Tile<T, kColumns>>(kChunk);
  }
  __device__ Stage<T, kDim, kColumns> stage(int i) const {
    return Stage<T, kDim, kColumns>(Room{stages.next + i * Stage<T, kDim, kColumns>::kBytes});
  }
};

// step(chunk, stage) for the chunks `first`, first + kStep, ... With two stages the next chunk is copied meanwhile.
template <int kStages, int kStep, class Shared, class Load, class Step>
__device__ __forceinline__ void for_each_chunk(const Shared& shared, int first, int chunks, const Load& load,
                                               const Step& step) {
  if (kStages == 2 && chunks > 0) load(shared.stage(0), first);
  for (int i = 0; i < chunks; ++i) {
    const int chunk = first + i * kStep;
    if constexpr (kStages == 1) {
      __syncthreads();  // the stage has been read
      load(shared.stage(0), chunk);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (kStages == 2 && i + 1 < chunks) load(shared.stage((i + 1) % 2), chunk + kStep);
    step(chunk, shared.stage(i % kStages));
  }
}

// Rows and columns of a warp in a product [64, kColumns].
template <int kColumns>
struct WarpPart {
  static constexpr int kTiles = kColumns / 16;
  int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  int column = static_cast<int>(threadIdx.x) / 128 * kTiles * 8;
};

// call(head_dim, stages) as constants.
template <class T, class Call>
void dispatch_walk(const GatedDeltaParams& p, const Call& call) {
  const auto with_stages = [&](auto dim) {
    constexpr int kColumns = slice_of<T, dim>();
    dispatch_stages<T, WalkShared<T, dim, kColumns>::bytes(2)>([&](auto stages) { call(dim, stages); });
  };
  if (p.head_dim == 64) return with_stages(std::integral_constant<int, 64>{});
  if (p.head_dim == 128) return with_stages(std::integral_constant<int, 128>{});
  with_stages(std::integral_constant<int, 256>{});
}

// A block for each document, the padding after them included, each head and slice.
inline unsigned walk_grid(const GatedDeltaParams& p, int columns) {
  return static_cast<unsigned>((p.documents.num_documents + 1) * p.num_v_heads * (p.head_dim_v / columns));
}

}  // namespace packing_ops::scan
