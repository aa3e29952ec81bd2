// The first kernel: what a chunk's rows have to do with each other, for all chunks and heads at once.
#include "ops/scan/scan_gates.h"
#include "ops/scan/scan_kernels.cuh"

namespace packing_ops::scan {

namespace {

constexpr int kThreads = 128;
constexpr int kPiece = 64;           // of head_dim, at a time
constexpr int kBlock = 16;           // rows of the blocks that are inverted by substitution
constexpr int kStride = kChunk + 4;  // floats of a row of a matrix

using Matrix = float[kStride];

struct Shared {
  float sums[kChunk];
  float beta[kChunk];
  float k_norms[kChunk];
  float q_norms[kChunk];
};

// Of an op that corrects.
struct Correction {
  Matrix corrections[kChunk];
  Matrix inverse[kChunk];
};

template <class T, bool kCorrects>
constexpr int shared_bytes() {
  return static_cast<int>(sizeof(Shared) + (kCorrects ? sizeof(Correction) : 0)) + 2 * Tile<T, kPiece>::bytes(kChunk);
}

// g and beta of a head, by the first warp.
template <bool kCorrects>
__device__ void load_head(const ScanParams& p, const Chunk& chunk, int64_t head, Shared& shared) {
  float before = 0.0f;
  for (int first = 0; first < kChunk; first += 32) {
    const int row = first + lane_of();
    const int64_t at = (chunk.row + row) * p.num_v_heads + head;
    const Gates<float> gates = row < chunk.rows ? gates_of<float>(p, kCorrects, at, head) : Gates<float>{0.0f, 0.0f};
    const float sum = before + inclusive_sum(gates.g);
    shared.sums[row] = sum;
    shared.beta[row] = gates.beta;
    before = __shfl_sync(0xffffffffu, sum, 31);
  }
}

__device__ void store_scales(const ScanParams& p, const Shared& shared, int row, RowScales& to) {
  const float sum = shared.sums[row];
  const float last = shared.sums[kChunk - 1];
  const float grown = expf(sum);
  to.k[row] = grown * shared.k_norms[row];
  to.q[row] = static_cast<float>(p.scale) * grown * shared.q_norms[row];
  to.to_end[row] = expf(last - sum) * shared.k_norms[row];
  to.beta[row] = shared.beta[row];
  to.sums[row] = sum;
  to.k_norms[row] = shared.k_norms[row];
  to.q_norms[row] = shared.q_norms[row];
  if (row < 4) to.through[row] = expf(last);
}

// The inverse of one block of 16 rows, a lane for each column.
__device__ void invert_block(const Matrix* a, Matrix* inverse, int first) {
  const int column = lane_of();
  if (column >= kBlock) return;
  float x[kBlock];
#pragma unroll
  for (int row = 0; row < kBlock; ++row) {
    float sum = row == column ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < row; ++i) sum -= a[first + row][first + i] * x[i];
    x[row] = row < column ? 0.0f : sum;
    inverse[first + row][first + column] = x[row];
  }
}

// sum[0 .. 8] = a[row, begin ..] b[begin .., column ..], `depth` terms.
__device__ __forceinline__ void product(const Matrix* a, int row, int begin, int depth, const Matrix* b, int column,
                                        float (&sum)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) sum[j] = 0.0f;
  for (int i = begin; i < begin + depth; ++i) {
    const float factor = a[row][i];
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += factor * b[i][column + j];
  }
}

// The block of the inverse in rows from `below` and columns from `left`, whose neighbours nearer to the diagonal are
// known: -inverse(below, below) sum of a(below, i) inverse(i, left). Two lanes for a row.
__device__ void fill_block(const Matrix* a, Matrix* inverse, int below, int left) {
  const int row = below + lane_of() / 2;
  const int column = left + lane_of() % 2 * 8;
  float sum[8];
  product(a, row, left, below - left, inverse, column, sum);
#pragma unroll
  for (int j = 0; j < 8; ++j) inverse[row][column + j] = sum[j];
  __syncwarp();
  product(inverse, row, below, kBlock, inverse, column, sum);
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 8; ++j) inverse[row][column + j] = -sum[j];
}

__device__ void invert(const Matrix* a, Matrix* inverse) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  invert_block(a, inverse, warp * kBlock);
  for (int distance = 1; distance < kChunk / kBlock; ++distance) {
    __syncthreads();
    if (warp + distance < kChunk / kBlock) {
      fill_block(a, inverse, (warp + distance) * kBlock, warp * kBlock);
    }
  }
  __syncthreads();
}

// The products of a chunk's keys with keys and queries, in registers: a warp has 16 rows.
struct Products {
  float keys[kChunk / 8][4] = {};
  float queries[kChunk / 8][4] = {};
};

template <class T, bool kCorrects>
__device__ void make_products(const ScanParams& p, const Chunk& chunk, int64_t k_head, Room room, Shared& shared,
                              Products& products) {
  const Tile<T, kPiece> keys = room.take<Tile<T, kPiece>>(kChunk);
  const Tile<T, kPiece> queries = room.take<Tile<T, kPiece>>(kChunk);
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / 32 * 16;
  const T* from_k = static_cast<const T*>(p.k.data) + chunk.row * p.k.token + k_head * p.k.head;
  const T* from_q = static_cast<const T*>(p.q.data) + chunk.row * p.q.token + k_head * p.q.head;
  const Tile<T, kPiece> normed = thread < kChunk ? keys : queries;
  float squares = 0.0f;
  for (int piece = 0; piece < p.head_dim; piece += kPiece) {
    __syncthreads();  // the tiles have been read
    load_rows<kThreads, kChunk>(keys, from_k + piece, p.k.token, chunk.rows);
    load_rows<kThreads, kChunk>(queries, from_q + piece, p.q.token, chunk.rows);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    for (int i = 0; i < kPiece; i += 2) {
      const Vec<T, 2> pair = normed.pair(thread % kChunk, i);
      squares += pair.get(0) * pair.get(0);
      squares += pair.get(1) * pair.get(1);
    }
    if constexpr (kCorrects) {
      multiply<Order::kPlain, Order::kTransposed>(products.keys, keys, row, keys, 0, 0, kPiece);
    }
    multiply<Order::kPlain, Order::kTransposed>(products.queries, queries, row, keys, 0, 0, kPiece);
  }
  const float norm = p.l2norm ? 1.0f / sqrtf(squares + static_cast<float>(kNormEpsilon)) : 1.0f;
  (thread < kChunk ? shared.k_norms : shared.q_norms)[thread % kChunk] = norm;
}

// What multiplies the product of row i with row j, except what depends only on row i; 0 for rows that i does not see.
template <class T>
__device__ __forceinline__ float between(const Shared& shared, int i, int j) {
  return j <= i ? decay<T>(shared.sums[i] - shared.sums[j]) * shared.k_norms[j] : 0.0f;
}

// Without `corrections` it is empty.
template <class T>
__device__ void prepare_head(const ScanParams& p, const Shared& shared, const Products& products, T* scores,
                             Matrix* corrections) {
  const int first = static_cast<int>(threadIdx.x) / 32 * 16 + lane_of() / 4;
#pragma unroll
  for (int tile = 0; tile < kChunk / 8; ++tile) {
    const int j = 8 * tile + lane_of() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first + 8 * half;
      const float near = between<T>(shared, i, j);
      const float next = between<T>(shared, i, j + 1);
      const float of_keys = shared.beta[i] * shared.k_norms[i];
      const float of_queries = static_cast<float>(p.scale) * shared.q_norms[i];
      const float* keys = &products.keys[tile][2 * half];
      const float* queries = &products.queries[tile][2 * half];
      if (corrections) {
        corrections[i][j] = j < i ? of_keys * near * keys[0] : 0.0f;
        corrections[i][j + 1] = j + 1 < i ? of_keys * next * keys[1] : 0.0f;
      }
      store_pair(scores + i * kChunk + j, j <= i ? of_queries * near * queries[0] : 0.0f,
                 j + 1 <= i ? of_queries * next * queries[1] : 0.0f);
    }
  }
}

template <class T>
__device__ void store_inverse(const Correction& own, T* to) {
  for (int i = 2 * static_cast<int>(threadIdx.x); i < kChunk * kChunk; i += 2 * kThreads) {
    const float* from = &own.inverse[i / kChunk][i % kChunk];
    store_pair(to + i, from[0], from[1]);
  }
}

template <class T, bool kCorrects>
__global__ void __launch_bounds__(kThreads, 4) prepare_kernel(ScanParams p, Chunks chunks, FaultFlag fault) {
  extern __shared__ __align__(128) uint8_t shared[];
  flag_cu_seqlens(p.documents, fault);
  const Chunk chunk = chunk_at(p.documents, blockIdx.x);
  if (chunk.rows == 0 || chunk.padding) return;
  Room room{shared};
  Shared& own = *room.take_array<Shared>(1);
  Correction* correction = kCorrects ? room.take_array<Correction>(1) : nullptr;
  const int64_t heads = p.num_v_heads / p.num_k_heads;
  const int thread = static_cast<int>(threadIdx.x);
  Products products;
  make_products<T, kCorrects>(p, chunk, blockIdx.y, room, own, products);
  for (int i = thread; kCorrects && i < kChunk * kChunk; i += kThreads) {
    if (i % kChunk / kBlock > i / kChunk / kBlock) correction->inverse[i / kChunk][i % kChunk] = 0.0f;
  }
  for (int64_t head = blockIdx.y * heads; head < (blockIdx.y + 1) * heads; ++head) {
    const int64_t index = chunk_index(p, blockIdx.x, head);
    if (thread < 32) load_head<kCorrects>(p, chunk, head, own);
    __syncthreads();
    if (thread < kChunk) store_scales(p, own, thread, chunks.scales[index]);
    T* scores = static_cast<T*>(chunks.scores) + index * kChunk * kChunk;
    prepare_head(p, own, products, scores, kCorrects ? correction->corrections : nullptr);
    __syncthreads();
    if constexpr (kCorrects) {
      invert(correction->corrections, correction->inverse);
      store_inverse(*correction, static_cast<T*>(chunks.inverses) + index * kChunk * kChunk);
      __syncthreads();  // before the next head's
    }
  }
}

}  // namespace

template <class T>
void launch_prepare(const ScanParams& p, const Chunks& chunks, const CudaLaunch& launch) {
  const dim3 grid(static_cast<unsigned>(chunk_places(p.documents)), static_cast<unsigned>(p.num_k_heads));
  dispatch_corrects(p, [&](auto corrects) {
    constexpr int kBytes = shared_bytes<T, corrects>();
    const auto kernel = prepare_kernel<T, corrects>;
    allow_shared(reinterpret_cast<const void*>(kernel), kBytes);
    kernel<<<grid, kThreads, kBytes, stream_of(launch)>>>(p, chunks, launch.fault);
    check_launch("prepare_kernel");
  });
}

template void launch_prepare<float>(const ScanParams&, const Chunks&, const CudaLaunch&);
template void launch_prepare<__half>(const ScanParams&, const Chunks&, const CudaLaunch&);
template void launch_prepare<__nv_bfloat16>(const ScanParams&, const Chunks&, const CudaLaunch&);

}  // namespace packing_ops::scan
