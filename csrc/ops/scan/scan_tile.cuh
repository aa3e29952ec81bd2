// Tiles in shared memory, and products of them by a warp: mma.sync for half types, one after the other in float32.
#pragma once

#include "core/documents.cuh"
#include "core/launch.cuh"
#include "core/ptx/mma.cuh"
#include "core/vec.cuh"

namespace packing_ops::scan {

// Rows are 16 bytes longer than their elements, so that eight rows of a column hit all banks.
template <class T, int kColumns>
struct Tile {
  static constexpr int kStride = kColumns + 16 / static_cast<int>(sizeof(T));
  static constexpr int bytes(int rows) { return rows * kStride * static_cast<int>(sizeof(T)); }

  T* data;

  __device__ __forceinline__ T* at(int row, int column) const { return data + row * kStride + column; }
  __device__ __forceinline__ void set_pair(int row, int column, float first, float second) const {
    Vec<T, 2> pair;
    pair.set_pair(0, first, second);
    *reinterpret_cast<Vec<T, 2>*>(at(row, column)) = pair;
  }
  __device__ __forceinline__ Vec<T, 2> pair(int row, int column) const {
    return *reinterpret_cast<const Vec<T, 2>*>(at(row, column));
  }
};

// Hands out a block's shared memory.
struct Room {
  uint8_t* next;
  template <class SomeTile>
  __device__ SomeTile take(int rows) {
    const SomeTile tile{reinterpret_cast<decltype(SomeTile::data)>(next)};
    next += SomeTile::bytes(rows);
    return tile;
  }
  template <class T>
  __device__ T* take_array(int count) {
    T* array = reinterpret_cast<T*>(next);
    next += count * sizeof(T);
    return array;
  }
};

// kRows rows of a tile from memory, `step` elements apart; those from `valid` on become zeros. A copy to commit.
template <int kThreads, int kRows, class T, int kColumns>
__device__ __forceinline__ void load_rows(Tile<T, kColumns> tile, const T* from, int64_t step, int valid) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
  constexpr int kPieces = kColumns / kPiece;
  constexpr int kAtOnce = kThreads / kPieces;  // rows
  static_assert(kThreads % kPieces == 0);
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const int first = thread / kPieces;
  const int column = thread % kPieces * kPiece;
  const T* source = from + first * step + column;
  uint32_t to = ptx::shared_address(tile.at(first, column));
#pragma unroll
  for (int row = first; row < first + kRows; row += kAtOnce) {
    if (kRows % kAtOnce != 0 && row >= kRows) break;
    const bool exists = row < valid;
    ptx::cp_async_16(to, exists ? source : from, exists);
    source += kAtOnce * step;
    to += kAtOnce * Tile<T, kColumns>::kStride * static_cast<int>(sizeof(T));
  }
}

// `bytes`, a multiple of 16, one after the other.
template <int kThreads>
__device__ __forceinline__ void load_bytes(void* to, const void* from, int bytes) {
  for (int i = static_cast<int>(threadIdx.x) % kThreads * 16; i < bytes; i += kThreads * 16) {
    ptx::cp_async_16(ptx::shared_address(static_cast<uint8_t*>(to) + i), static_cast<const uint8_t*>(from) + i);
  }
}

__device__ __forceinline__ int lane_of() {
  return static_cast<int>(threadIdx.x % 32);
}

// exp(x) of a difference of sums; half types need no more than some units in float32's last place.
template <class T>
__device__ __forceinline__ float decay(float x) {
  if constexpr (sizeof(T) == 4) return expf(x);
  return ptx::exp2_approx(1.44269504f * x);
}

// Over the lanes of a warp.
__device__ inline float inclusive_sum(float x) {
  for (int offset = 1; offset < 32; offset *= 2) {
    const float earlier = __shfl_up_sync(0xffffffffu, x, offset);
    if (lane_of() >= offset) x += earlier;
  }
  return x;
}

// The 16 x 8 kTiles numbers of a warp from (row, column) on, as mma.sync has them: f(row, column, x, next x).
template <class Number, int kTiles, class F>
__device__ __forceinline__ void for_each_pair(Number (&c)[kTiles][4], int row, int column, const F& f) {
  const int lane = lane_of();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      f(row + lane / 4 + 8 * half, column + 8 * tile + lane % 4 * 2, c[tile][2 * half], c[tile][2 * half + 1]);
    }
  }
}

enum class Order { kPlain, kTransposed };

// c += A B over `begin` to `end`, multiples of 16. A's element (row, i) is a's, or where kA is transposed a's
// (i, row), and B's element (i, column) b's or b's (column, i).
template <Order kA, Order kB, int kTiles, class T, int kAColumns, int kBColumns>
__device__ __forceinline__ void multiply(float (&c)[kTiles][4], Tile<T, kAColumns> a, int row, Tile<T, kBColumns> b,
                                         int column, int begin, int end) {
  const int lane = lane_of();
  if constexpr (sizeof(T) == 4) {
    const int first = row + lane / 4;
    const int left = column + lane % 4 * 2;
    for (int i = begin; i < end; ++i) {
      const float a0 = kA == Order::kPlain ? *a.at(first, i) : *a.at(i, first);
      const float a1 = kA == Order::kPlain ? *a.at(first + 8, i) : *a.at(i, first + 8);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int at = left + 8 * tile;
        const float b0 = kB == Order::kPlain ? *b.at(i, at) : *b.at(at, i);
        const float b1 = kB == Order::kPlain ? *b.at(i, at + 1) : *b.at(at + 1, i);
        c[tile][0] += a0 * b0;
        c[tile][1] += a0 * b1;
        c[tile][2] += a1 * b0;
        c[tile][3] += a1 * b1;
      }
    }
  } else {
    static_assert(kTiles % 2 == 0);
    const int matrix = lane / 8;
    const int low = matrix % 2 * 8;
    const int high = matrix / 2 * 8;
    const int line = lane % 8;
#pragma unroll 4
    for (int i = begin; i < end; i += 16) {
      uint32_t left[4];
      if constexpr (kA == Order::kPlain) {
        ptx::ldmatrix(left, ptx::shared_address(a.at(row + low + line, i + high)));
      } else {
        ptx::ldmatrix_trans(left, ptx::shared_address(a.at(i + high + line, row + low)));
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; tile += 2) {
        uint32_t right[4];
        const int at = column + 8 * tile;
        if constexpr (kB == Order::kPlain) {
          ptx::ldmatrix_trans(right, ptx::shared_address(b.at(i + low + line, at + high)));
        } else {
          ptx::ldmatrix(right, ptx::shared_address(b.at(at + high + line, i + low)));
        }
        ptx::mma<T>(c[tile], left, right[0], right[1]);
        ptx::mma<T>(c[tile + 1], left, right[2], right[3]);
      }
    }
  }
}

// a [16, i] times b, both as they are.
template <int kTiles, class T, int kAColumns, int kBColumns>
__device__ __forceinline__ void multiply(float (&c)[kTiles][4], Tile<T, kAColumns> a, int row, Tile<T, kBColumns> b,
                                         int column, int begin, int end) {
  multiply<Order::kPlain, Order::kPlain>(c, a, row, b, column, begin, end);
}

// Which terms of a product's columns from 16 i on are not zero: all, those up to 16 i + 15, those from 16 i on.
enum class Terms { kAll, kUpTo, kFrom };

// c += a B, where a warp's 16 rows of a are in its registers as another product left them, rounded to T. For float32
// `scratch` has room for them in shared memory.
template <class T, Order kB, Terms kTerms, int kTiles, int kATiles, int kBColumns>
__device__ __forceinline__ void multiply_rows(float (&c)[kTiles][4], const float (&a)[kATiles][4], Tile<T, kBColumns> b,
                                              float* scratch) {
  if constexpr (sizeof(T) == 4) {
    const Tile<float, 8 * kATiles> rows{scratch};
    for_each_pair(a, 0, 0, [&](int i, int j, float x, float y) { rows.set_pair(i, j, x, y); });
    __syncwarp();
    multiply<Order::kPlain, kB>(c, rows, 0, b, 0, 0, 8 * kATiles);
    __syncwarp();
  } else {
    const int matrix = lane_of() / 8;
    const int low = matrix % 2 * 8 + (kB == Order::kPlain ? lane_of() % 8 : 0);
    const int high = matrix / 2 * 8 + (kB == Order::kPlain ? 0 : lane_of() % 8);
#pragma unroll
    for (int step = 0; step < kATiles / 2; ++step) {
      Vec<T, 8> left;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        left.set_pair(2 * i, a[2 * step + i / 2][i % 2 * 2], a[2 * step + i / 2][i % 2 * 2 + 1]);
#pragma unroll
      for (int tile = 0; tile < kTiles; tile += 2) {
        if (kTerms == Terms::kUpTo && tile < 2 * step) continue;
        if (kTerms == Terms::kFrom && tile > 2 * step) continue;
        uint32_t right[4];
        if constexpr (kB == Order::kPlain) {
          ptx::ldmatrix_trans(right, ptx::shared_address(b.at(16 * step + low, 8 * tile + high)));
        } else {
          ptx::ldmatrix(right, ptx::shared_address(b.at(8 * tile + high, 16 * step + low)));
        }
        ptx::mma<T>(c[tile], left.word, right[0], right[1]);
        ptx::mma<T>(c[tile + 1], left.word, right[2], right[3]);
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void store_pair(T* to, float first, float second) {
  Vec<T, 2> pair;
  pair.set_pair(0, first, second);
  *reinterpret_cast<Vec<T, 2>*>(to) = pair;
}

}  // namespace packing_ops::scan
