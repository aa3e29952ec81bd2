// Shared memory of the kernel that makes dq, dk, dg and dbeta, and what it reads.
#pragma once

#include "ops/scan/scan_kernels.cuh"

namespace packing_ops::scan::gradients {

constexpr int kThreads = 256;

// Columns of v at a time.
template <class T, int kDim>
constexpr int piece_of() {
  return sizeof(T) == 4 ? (kDim == 256 ? 16 : 32) : (kDim == 256 ? 32 : 64);
}

// Sums over a row's columns that go into dg, dbeta and dskip. Each of two warps has half of the columns.
enum RowSum { kOfQueries, kOfKeys, kOfEnd, kOfScores, kOfCorrections, kRowSums };
// Without a correction: of scores on the diagonal, and dout . v.
constexpr RowSum kOfDiagonal = kOfKeys;
constexpr RowSum kOfSkip = kOfCorrections;

struct Sums {
  RowScales scales;
  float rows[kRowSums][2][kChunk];
  float columns[4][kChunk];  // of the warps' rows, scores and corrections together
  float values[kChunk];      // dcorrected . v
  float through[kThreads / 32];
};

template <class T, int kDim>
struct Stage {
  static constexpr int kPiece = piece_of<T, kDim>();
  Tile<T, kPiece> rows, corrected;
  Tile<T, kDim> state;
  static constexpr int kBytes = 2 * Tile<T, kPiece>::bytes(kChunk) + Tile<T, kDim>::bytes(kPiece);
  __device__ explicit Stage(Room room)
      : rows(room.take<Tile<T, kPiece>>(kChunk)),
        corrected(room.take<Tile<T, kPiece>>(kChunk)),
        state(room.take<Tile<T, kDim>>(kPiece)) {}
};

template <class T, int kDim, bool kCorrects>
struct Shared {
  Tile<T, kDim> keys, queries;
  Tile<T, kChunk> dscores, dcorrections;
  Sums* sums;
  Room stages;
  static constexpr int bytes(int stages) {
    return 2 * Tile<T, kDim>::bytes(kChunk) + (kCorrects ? 2 : 1) * Tile<T, kChunk>::bytes(kChunk) +
           static_cast<int>(sizeof(Sums)) + stages * Stage<T, kDim>::kBytes;
  }
  __device__ explicit Shared(uint8_t* shared) : stages{shared} {
    keys = stages.take<Tile<T, kDim>>(kChunk);
    queries = stages.take<Tile<T, kDim>>(kChunk);
    dscores = stages.take<Tile<T, kChunk>>(kChunk);
    dcorrections = stages.take<Tile<T, kChunk>>(kCorrects ? kChunk : 0);
    sums = stages.take_array<Sums>(1);
  }
  __device__ Stage<T, kDim> stage(int i) const {
    return Stage<T, kDim>(Room{stages.next + i * Stage<T, kDim>::kBytes});
  }
};

// A chunk and a head of v.
template <class T>
struct Work {
  const ScanBackwardParams& p;
  const Chunks& chunks;
  Chunk chunk;
  int64_t index, head;

  __device__ const T* state_of(const void* states) const {
    return static_cast<const T*>(states) + index * p.head_dim * p.head_dim_v;
  }
};

// Passes over the columns of v, whose products with a state are summed. Without a correction there is no second one,
// and v are the corrected values, which are beta v.
enum Pass {
  kDout,        // with the state before the chunk
  kDcorrected,  // with it
  kCorrected,   // with the gradient of the state after the chunk
};

template <class T, int kDim, bool kCorrects>
__device__ __forceinline__ void load_stage(const Work<T>& work, const Stage<T, kDim>& stage, Pass pass, int column) {
  const auto load = [&](const HeadRows& rows, Tile<T, Stage<T, kDim>::kPiece> tile) {
    const T* from = static_cast<const T*>(rows.data) + work.chunk.row * rows.token + work.head * rows.head;
    load_rows<kThreads, kChunk>(tile, from + column, rows.token, work.chunk.rows);
  };
  const ScanBackwardParams& p = work.p;
  const int64_t head = p.head_dim_v;
  const HeadRows corrected = kCorrects ? HeadRows{work.chunks.corrected, p.num_v_heads * head, head} : p.v;
  const HeadRows dcorrected{work.chunks.dcorrected, p.num_v_heads * head, head};
  if (pass == kDout) {
    load(p.dout, stage.rows);
  } else if (kCorrects && pass == kDcorrected) {
    load(dcorrected, stage.rows);
  } else {
    load(corrected, stage.rows);
  }
  if (pass != kCorrected) load(corrected, stage.corrected);
  const T* state = work.state_of(pass == kCorrected ? work.chunks.dstates : work.chunks.states) + column * kDim;
  load_rows<kThreads, Stage<T, kDim>::kPiece>(stage.state, state, kDim, Stage<T, kDim>::kPiece);
  ptx::cp_async_commit();
}

// The steps of the passes: what a step reads is copied during the one before, if there are two stages.
template <class T, int kDim, int kStages, bool kCorrects>
struct Steps {
  static constexpr int kPiece = piece_of<T, kDim>();
  const Work<T>& work;
  const Shared<T, kDim, kCorrects>& shared;
  int pieces;
  int done = 0;

  __device__ __forceinline__ void load(Pass pass, int piece, int step) const {
    load_stage<T, kDim, kCorrects>(work, shared.stage(step % kStages), pass, piece * kPiece);
  }
  // call(stage, column) for each piece of a pass.
  template <Pass kPass, class Call>
  __device__ __forceinline__ void each(const Call& call) {
    constexpr Pass kNext = kCorrects && kPass == kDout ? kDcorrected : kCorrected;
    for (int piece = 0; piece < pieces; ++piece, ++done) {
      if constexpr (kStages == 1) {
        __syncthreads();  // the stage has been read
        load(kPass, piece, done);
      }
      ptx::cp_async_wait<0>();
      __syncthreads();
      if constexpr (kStages == 2) {
        if (piece + 1 < pieces) {
          load(kPass, piece + 1, done + 1);
        } else if (kPass != kCorrected) {
          load(kNext, 0, done + 1);
        }
      }
      call(shared.stage(done % kStages), piece * kPiece);
    }
  }
};

// The sums of two rows over a warp's columns, to where the other half's are next to them.
__device__ __forceinline__ void store_row_sums(float upper, float lower, int row, float (&to)[2][kChunk]) {
  for (int offset = 1; offset < 4; offset *= 2) {
    upper += __shfl_xor_sync(0xffffffffu, upper, offset);
    lower += __shfl_xor_sync(0xffffffffu, lower, offset);
  }
  const int half = static_cast<int>(threadIdx.x) / 128;
  if (lane_of() % 4 == 0) {
    to[half][row + lane_of() / 4] = upper;
    to[half][row + lane_of() / 4 + 8] = lower;
  }
}

}  // namespace packing_ops::scan::gradients
