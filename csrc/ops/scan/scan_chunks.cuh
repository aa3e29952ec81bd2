// Chunks of documents, and what the first kernel leaves of each in scratch memory.
#pragma once

#include "core/documents.h"
#include "ops/scan/scan.h"

namespace packing_ops::scan {

constexpr int kChunk = static_cast<int>(kScanChunk);

// Factors of a chunk's rows for a head of v. G is the sum of g from the chunk's first row on, |k| and |q| are 1 where
// nothing is normalised. Rows past the document's end have beta = 0 and the last row's G.
struct RowScales {
  float k[kChunk];       // exp(G) / |k|
  float q[kChunk];       // scale exp(G) / |q|
  float to_end[kChunk];  // exp(G of the last row - G) / |k|
  float beta[kChunk];
  float through[4];       // exp(G of the last row), four times
  float sums[kChunk];     // G
  float k_norms[kChunk];  // 1 / |k|
  float q_norms[kChunk];
};
constexpr int kWalkScales = (4 * kChunk + 4) * 4;  // bytes that the walks need, from the first on
static_assert(sizeof(RowScales) % 16 == 0);

// A place for every chunk: document d's first is at cu_seqlens[d] / 64 + d, so that there is room for all, and no sum
// over documents has to be known. The padding after the last document has the places of one more.
__host__ __device__ inline int64_t chunk_places(const Documents& documents) {
  return documents.total / kChunk + documents.num_documents + 1;
}
__device__ inline int64_t first_place(const Documents& documents, int64_t document) {
  return documents.bound(document) / kChunk + document;
}

struct Chunk {
  int64_t row;  // of the packed row
  int rows;     // of it, 0 where the place is empty
  bool padding;
};

__device__ inline Chunk chunk_at(const Documents& documents, int64_t place) {
  int64_t low = 0;
  int64_t high = documents.num_documents + 1;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (first_place(documents, middle) <= place) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const bool padding = low == documents.num_documents;
  const Interval<int64_t> rows = padding ? Interval<int64_t>{documents.end(), documents.total} : documents[low];
  const int64_t start = rows.begin + (place - first_place(documents, low)) * kChunk;
  const int64_t left = rows.end - start;
  if (start < rows.begin || left <= 0) return {0, 0, padding};
  return {start, static_cast<int>(left < kChunk ? left : kChunk), padding};
}

// Scratch memory, by (place, head of v). The last four are the backward's. Without a correction there are neither
// inverses nor corrected values: what a token adds, times its key, is beta v.
struct Chunks {
  RowScales* scales;
  void* inverses;    // [64, 64]: of I + A, A[i, j] = beta[i] exp(G[i] - G[j]) k[i] . k[j] for j < i, k normalised
  void* scores;      // [64, 64]: scale exp(G[i] - G[j]) q[i] . k[j] for j <= i
  void* states;      // [head_dim_v, head_dim]: before the chunk, transposed
  void* dstates;     // the gradient of the state after it
  void* corrected;   // [total, num_v_heads, head_dim_v]: what a token adds, times its key
  void* dcorrected;  // the gradient of beta (v - S^T k)
};

__device__ __forceinline__ int64_t chunk_index(const ScanParams& p, int64_t place, int64_t head) {
  return place * p.num_v_heads + head;
}

}  // namespace packing_ops::scan
