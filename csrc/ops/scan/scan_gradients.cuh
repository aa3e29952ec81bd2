// Shared memory of the kernel that makes dq, dk, dg and dbeta, and what it reads.
#pragma once

#include "ops/scan/scan_kernels.cuh"

namespace packing_ops::scan::gradients {

constexpr int kThreads = 512;
constexpr int kParts = kThreads / 128;  // of the columns: four warps have the rows

// Columns of v at a time.
template <class T, int kDim>
constexpr int piece_of() {
  return sizeof(T) == 4 ? (kDim == 256 ? 8 : 16) : 32;
}

// Sums over a row's columns that go into dg and dbeta. Each of kParts warps has a part of the columns.
enum RowSum { kOfQueries, kOfKeys, kOfEnd, kOfScores, kOfCorrections, kRowSums };

struct Sums {
  RowScales scales;
  float rows[kRowSums][kParts][kChunk];
  float columns[4][kChunk];  // of the warps' rows, scores and corrections together
  float values[kChunk];      // dcorrected . v
  float through[kThreads / 32];
};

// Some columns of v. `state` is that before the chunk, `dstate` the gradient of the one after it.
template <class T, int kDim>
struct Stage {
  static constexpr int kPiece = piece_of<T, kDim>();
  Tile<T, kPiece> values, dout, corrected, dcorrected;
  Tile<T, kDim> state, dstate;
  static constexpr int kBytes = 4 * Tile<T, kPiece>::bytes(kChunk) + 2 * Tile<T, kDim>::bytes(kPiece);
  __device__ explicit Stage(Room room)
      : values(room.take<Tile<T, kPiece>>(kChunk)),
        dout(room.take<Tile<T, kPiece>>(kChunk)),
        corrected(room.take<Tile<T, kPiece>>(kChunk)),
        dcorrected(room.take<Tile<T, kPiece>>(kChunk)),
        state(room.take<Tile<T, kDim>>(kPiece)),
        dstate(room.take<Tile<T, kDim>>(kPiece)) {}
};

template <class T, int kDim>
struct Shared {
  Tile<T, kDim> keys, queries;
  Tile<T, kChunk> dscores, dcorrections;
  Sums* sums;
  Room stages;
  static constexpr int bytes(int stages) {
    return 2 * Tile<T, kDim>::bytes(kChunk) + 2 * Tile<T, kChunk>::bytes(kChunk) + static_cast<int>(sizeof(Sums)) +
           stages * Stage<T, kDim>::kBytes;
  }
  __device__ explicit Shared(uint8_t* shared) : stages{shared} {
    keys = stages.take<Tile<T, kDim>>(kChunk);
    queries = stages.take<Tile<T, kDim>>(kChunk);
    dscores = stages.take<Tile<T, kChunk>>(kChunk);
    dcorrections = stages.take<Tile<T, kChunk>>(kChunk);
    sums = stages.take_array<Sums>(1);
  }
  __device__ Stage<T, kDim> stage(int i) const {
    return Stage<T, kDim>(Room{stages.next + i * Stage<T, kDim>::kBytes});
  }
};

// A chunk and a head of v.
template <class T>
struct Work {
  const GatedDeltaBackwardParams& p;
  const Chunks& chunks;
  Chunk chunk;
  int64_t index, head;

  __device__ const T* state_of(const void* states) const {
    return static_cast<const T*>(states) + index * p.head_dim * p.head_dim_v;
  }
};

// The columns of v from `column` on. A group of copies.
template <class T, int kDim>
__device__ __forceinline__ void load_stage(const Work<T>& work, const Stage<T, kDim>& stage, int column) {
  constexpr int kPiece = Stage<T, kDim>::kPiece;
  const GatedDeltaBackwardParams& p = work.p;
  const auto load = [&](const HeadRows& rows, Tile<T, kPiece> tile) {
    const T* from = static_cast<const T*>(rows.data) + work.chunk.row * rows.token + work.head * rows.head;
    load_rows<kThreads, kChunk>(tile, from + column, rows.token, work.chunk.rows);
  };
  const int64_t step = p.num_v_heads * p.head_dim_v;
  load(p.v, stage.values);
  load(p.dout, stage.dout);
  load({work.chunks.corrected, step, p.head_dim_v}, stage.corrected);
  load({work.chunks.dcorrected, step, p.head_dim_v}, stage.dcorrected);
  load_rows<kThreads, kPiece>(stage.state, work.state_of(work.chunks.states) + column * kDim, kDim, kPiece);
  load_rows<kThreads, kPiece>(stage.dstate, work.state_of(work.chunks.dstates) + column * kDim, kDim, kPiece);
}

// The sums of two rows over a warp's columns, to where the other parts' are beside them.
__device__ __forceinline__ void store_row_sums(float upper, float lower, int row, float (&to)[kParts][kChunk]) {
  for (int offset = 1; offset < 4; offset *= 2) {
    upper += __shfl_xor_sync(0xffffffffu, upper, offset);
    lower += __shfl_xor_sync(0xffffffffu, lower, offset);
  }
  const int part = static_cast<int>(threadIdx.x) / 128;
  if (lane_of() % 4 == 0) {
    to[part][row + lane_of() / 4] = upper;
    to[part][row + lane_of() / 4 + 8] = lower;
  }
}

}  // namespace packing_ops::scan::gradients
