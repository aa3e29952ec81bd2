// Same results as padding_cpu.cpp. The layout is a count and a write over tiles of slots; rows are moved as the widest
// vectors that every address allows.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cub/cub.cuh>

#include "core/launch.cuh"
#include "ops/padding/padding.h"

namespace packing_ops {

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kItems = 8;  // neighbouring slots a thread counts
constexpr int kSlots = kThreads * kItems;
constexpr int64_t kMaxTiles = 4096;  // every block sums the counts of all tiles before its own

__device__ int64_t thread_id() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ int64_t thread_count() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

// --- layout ---

// Packed slots, and those that attention_mask alone counts.
struct Counts {
  int32_t packed;
  int32_t used;
  __device__ friend Counts operator+(Counts a, Counts b) { return {a.packed + b.packed, a.used + b.used}; }
};

template <class T>
__device__ bool not_zero(const void* mask, int64_t slot) {
  return static_cast<float>(static_cast<const T*>(mask)[slot]) != 0.0f;
}

__device__ bool is_real(const void* mask, DType dtype, int64_t slot) {
  switch (dtype) {
    case DType::kInt16:
      return static_cast<const int16_t*>(mask)[slot] != 0;
    case DType::kInt32:
      return static_cast<const int32_t*>(mask)[slot] != 0;
    case DType::kInt64:
      return static_cast<const int64_t*>(mask)[slot] != 0;
    case DType::kFloat64:
      return static_cast<const double*>(mask)[slot] != 0.0;
    case DType::kFloat32:
      return not_zero<float>(mask, slot);
    case DType::kBFloat16:
      return not_zero<__nv_bfloat16>(mask, slot);
    case DType::kFloat16:
      return not_zero<__half>(mask, slot);
    default:
      return static_cast<const uint8_t*>(mask)[slot] != 0;
  }
}

// A thread's kItems slots as two bit sets.
__device__ void read_slots(const UnpadLayoutParams& p, int64_t first, int64_t end, unsigned& packed, unsigned& used) {
  packed = used = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t slot = first + i;
    if (slot >= end) break;
    const bool counted = is_real(p.mask, p.mask_dtype, slot);
    const bool extra = p.unused && is_real(p.unused, p.unused_dtype, slot);
    used |= static_cast<unsigned>(counted) << i;
    packed |= static_cast<unsigned>(counted || extra) << i;
  }
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(UnpadLayoutParams p, int64_t tile, Counts* counts, int32_t* blocks_done) {
  using Reduce = cub::BlockReduce<Counts, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  const int64_t slots = p.batch * p.seqlen;
  const int64_t begin = blockIdx.x * tile;
  const int64_t end = begin + tile < slots ? begin + tile : slots;
  Counts own{0, 0};
  for (int64_t base = begin; base < end; base += kSlots) {
    unsigned packed, used;
    read_slots(p, base + int64_t{threadIdx.x} * kItems, end, packed, used);
    own = own + Counts{__popc(packed), __popc(used)};
  }
  own = Reduce(storage).Sum(own);
  if (threadIdx.x == 0) counts[blockIdx.x] = own;
  if (blockIdx.x == 0 && threadIdx.x == 0) *blocks_done = 0;
}

// By the last block to be done: what needs every row's cumulated count.
__device__ void finish_layout(const UnpadLayoutParams& p, const int32_t* used_before) {
  using Reduce = cub::BlockReduce<int32_t, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  int32_t longest = 0;
  for (int64_t b = threadIdx.x; b < p.batch; b += kThreads) {
    const int32_t length = __ldcg(p.cu_seqlens + b + 1) - __ldcg(p.cu_seqlens + b);
    longest = length > longest ? length : longest;
    p.seqused[b] = __ldcg(used_before + b + 1) - __ldcg(used_before + b);
  }
  longest = Reduce(storage).Reduce(longest, [](int32_t a, int32_t b) { return a > b ? a : b; });
  if (threadIdx.x == 0) {
    p.totals[0] = __ldcg(p.cu_seqlens + p.batch);
    p.totals[1] = longest;
  }
}

// Ranks of the tile's slots: where a real one goes, and at each row's first slot the cumulated counts.
__global__ void __launch_bounds__(kThreads)
    write_kernel(UnpadLayoutParams p, int64_t tile, const Counts* counts, int32_t* used_before, int32_t* blocks_done) {
  using Reduce = cub::BlockReduce<Counts, kThreads>;
  using Scan = cub::BlockScan<Counts, kThreads>;
  __shared__ union {
    typename Reduce::TempStorage reduce;
    typename Scan::TempStorage scan;
  } storage;
  __shared__ Counts shared[2];
  const int64_t slots = p.batch * p.seqlen;
  const int64_t begin = blockIdx.x * tile;
  const int64_t end = begin + tile < slots ? begin + tile : slots;

  Counts before{0, 0};
  Counts all{0, 0};
  for (int64_t i = threadIdx.x; i < gridDim.x; i += kThreads) {
    all = all + counts[i];
    if (i < blockIdx.x) before = before + counts[i];
  }
  before = Reduce(storage.reduce).Sum(before);
  __syncthreads();
  all = Reduce(storage.reduce).Sum(all);
  if (threadIdx.x == 0) {
    shared[0] = before;
    shared[1] = all;
  }
  __syncthreads();
  before = shared[0];
  all = shared[1];

  for (int64_t base = begin; base < end; base += kSlots) {
    const int64_t first = base + int64_t{threadIdx.x} * kItems;
    unsigned packed, used;
    read_slots(p, first, end, packed, used);
    Counts rank;
    Counts sum;
    Scan(storage.scan)
        .ExclusiveScan(
            Counts{__popc(packed), __popc(used)}, rank, Counts{0, 0}, [](Counts a, Counts b) { return a + b; }, sum);
    rank = rank + before;
    for (int i = 0; i < kItems && first + i < end; ++i) {
      const int64_t slot = first + i;
      if (slot % p.seqlen == 0) {
        p.cu_seqlens[slot / p.seqlen] = rank.packed;
        used_before[slot / p.seqlen] = rank.used;
      }
      if (packed >> i & 1) p.indices[rank.packed] = slot;
      rank = rank + Counts{static_cast<int32_t>(packed >> i & 1), static_cast<int32_t>(used >> i & 1)};
    }
    before = before + sum;
    __syncthreads();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    p.cu_seqlens[p.batch] = all.packed;
    used_before[p.batch] = all.used;
  }
  // Each block its share of the entries that name no row.
  for (int64_t i = all.packed + thread_id(); i < slots; i += thread_count()) p.indices[i] = -1;

  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(blocks_done, 1) == static_cast<int32_t>(gridDim.x) - 1;
  __syncthreads();
  if (is_last) finish_layout(p, used_before);
}

int64_t tile_of(int64_t slots) {
  return ceil_div(ceil_div(slots, kMaxTiles), kSlots) * kSlots;
}

__global__ void empty_layout_kernel(UnpadLayoutParams p) {
  for (int64_t b = thread_id(); b <= p.batch; b += thread_count()) {
    p.cu_seqlens[b] = 0;
    if (b < p.batch) p.seqused[b] = 0;
    if (b < 2) p.totals[b] = 0;
  }
  if (thread_id() == 0) p.totals[1] = 0;
}

// --- moving rows ---

// The row that the entry before i names, over any -1 between.
__device__ int64_t row_before(const int64_t* indices, int64_t i) {
  while (--i >= 0) {
    if (indices[i] != -1) return indices[i];
  }
  return -1;
}

// The source of a row to write: its own bytes, or nothing (zeros).
template <bool kGather>
__device__ const char* source_of(const MoveRowsParams& p, const RowMove& m, int64_t row, const FaultFlag& fault) {
  if constexpr (!kGather) {
    const int32_t from = p.inverse[row];
    return from < 0 ? nullptr : m.input + from * m.row_stride;
  }
  const int64_t from = p.indices[row];
  if (from == -1) return nullptr;
  const bool inside = from >= 0 && from < p.batch * p.seqlen;
  if (!inside || from <= row_before(p.indices, row)) fault.raise(Fault::kIndexOutside, row);
  if (!inside) return nullptr;
  return m.input + from / p.seqlen * m.batch_stride + from % p.seqlen * m.row_stride;
}

constexpr int kUnroll = 4;

// Rows of at least a warp's width: a warp takes kUnroll vectors per lane of one row at a time.
template <bool kGather, class Vec>
__device__ void move_wide(const MoveRowsParams& p, const RowMove& m, int64_t rows, const FaultFlag& fault) {
  constexpr int64_t kPiece = kWarp * kUnroll;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t vectors = m.row_bytes / static_cast<int64_t>(sizeof(Vec));
  const int64_t pieces = ceil_div(vectors, kPiece);
  const int64_t step = thread_count() / kWarp;
  for (int64_t work = thread_id() / kWarp; work < rows * pieces; work += step) {
    const int64_t row = work / pieces;
    const int64_t first = work % pieces * kPiece + lane;
    const char* source = source_of<kGather>(p, m, row, fault);
    const Vec* in = reinterpret_cast<const Vec*>(source);
    Vec* out = reinterpret_cast<Vec*>(m.output + row * m.row_bytes);
    Vec loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = first + u * kWarp;
      loaded[u] = in && at < vectors ? in[at] : Vec{};
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = first + u * kWarp;
      if (at < vectors) out[at] = loaded[u];
    }
  }
}

// Rows narrower than that, down to one token id: a thread a vector.
template <bool kGather, class Vec>
__device__ void move_narrow(const MoveRowsParams& p, const RowMove& m, int64_t rows, const FaultFlag& fault) {
  const int64_t vectors = m.row_bytes / static_cast<int64_t>(sizeof(Vec));
  for (int64_t i = thread_id(); i < rows * vectors; i += thread_count()) {
    const int64_t row = i / vectors;
    const char* source = source_of<kGather>(p, m, row, fault);
    reinterpret_cast<Vec*>(m.output)[i] = source ? reinterpret_cast<const Vec*>(source)[i % vectors] : Vec{};
  }
}

template <bool kGather, class Vec>
__device__ void move_rows(const MoveRowsParams& p, const RowMove& m, int64_t rows, const FaultFlag& fault) {
  if (m.row_bytes >= static_cast<int64_t>(sizeof(Vec)) * kWarp) {
    move_wide<kGather, Vec>(p, m, rows, fault);
  } else {
    move_narrow<kGather, Vec>(p, m, rows, fault);
  }
}

// The widest vector that divides every address of a move.
PACKING_OPS_HOST_DEVICE int64_t vector_bytes_of(const RowMove& m) {
  const auto bits = reinterpret_cast<uintptr_t>(m.input) | reinterpret_cast<uintptr_t>(m.output) |
                    static_cast<uintptr_t>(m.batch_stride) | static_cast<uintptr_t>(m.row_stride) |
                    static_cast<uintptr_t>(m.row_bytes);
  int64_t bytes = 16;
  while (bits % bytes != 0) bytes /= 2;
  return bytes;
}

// blockIdx.y picks the tensor.
template <bool kGather>
__global__ void __launch_bounds__(kThreads) move_rows_kernel(MoveRowsParams p, int64_t rows, FaultFlag fault) {
  // Entries after total are all -1 in a layout, so the first of them tells whether rows would be lost.
  if (p.num_indices > p.total && thread_id() == 0 && p.indices[p.total] != -1) {
    fault.raise(Fault::kIndexOutside, p.total);
  }
  const RowMove& m = p.moves[blockIdx.y];
  switch (vector_bytes_of(m)) {
    case 16:
      return move_rows<kGather, uint4>(p, m, rows, fault);
    case 8:
      return move_rows<kGather, uint2>(p, m, rows, fault);
    case 4:
      return move_rows<kGather, uint32_t>(p, m, rows, fault);
    case 2:
      return move_rows<kGather, uint16_t>(p, m, rows, fault);
    default:
      return move_rows<kGather, uint8_t>(p, m, rows, fault);
  }
}

// inverse[padded row] = packed row; the rest stays -1.
__global__ void inverse_kernel(MoveRowsParams p, FaultFlag fault) {
  for (int64_t i = thread_id(); i < p.total; i += thread_count()) {
    const int64_t row = p.indices[i];
    if (row == -1) continue;
    const bool inside = row >= 0 && row < p.batch * p.seqlen;
    if (!inside || row <= row_before(p.indices, i)) fault.raise(Fault::kIndexOutside, i);
    if (inside) p.inverse[row] = static_cast<int32_t>(i);
  }
}

template <bool kGather>
void launch_move(const MoveRowsParams& p, int64_t rows, const CudaLaunch& launch) {
  int64_t threads = 0;
  for (int64_t n = 0; n < p.num_moves; ++n) {
    const RowMove& m = p.moves[n];
    const int64_t vectors = m.row_bytes / vector_bytes_of(m);
    const int64_t per_row = vectors >= kWarp ? ceil_div(vectors, kWarp * kUnroll) * kWarp : vectors;
    threads = threads > rows * per_row ? threads : rows * per_row;
  }
  if (threads == 0) return;
  const int64_t blocks = ceil_div(threads, kThreads);
  const dim3 grid(static_cast<unsigned>(blocks < 1 << 22 ? blocks : 1 << 22), static_cast<unsigned>(p.num_moves));
  move_rows_kernel<kGather><<<grid, kThreads, 0, stream_of(launch)>>>(p, rows, launch.fault);
  check_launch("move_rows_kernel");
}

}  // namespace

int64_t unpad_layout_scratch_cuda(int64_t batch, int64_t seqlen) {
  const int64_t tiles = ceil_div(batch * seqlen, tile_of(batch * seqlen > 0 ? batch * seqlen : 1));
  return tiles * static_cast<int64_t>(sizeof(Counts)) + (batch + 2) * static_cast<int64_t>(sizeof(int32_t));
}

int64_t scatter_rows_scratch_cuda(int64_t batch, int64_t seqlen) {
  return batch * seqlen * static_cast<int64_t>(sizeof(int32_t));
}

void launch_unpad_layout_cuda(const UnpadLayoutParams& p, const CudaLaunch& launch) {
  const cudaStream_t stream = stream_of(launch);
  const int64_t slots = p.batch * p.seqlen;
  if (slots == 0) {
    empty_layout_kernel<<<grid_for(p.batch + 1, kThreads), kThreads, 0, stream>>>(p);
    return check_launch("empty_layout_kernel");
  }
  const int64_t tile = tile_of(slots);
  const auto tiles = static_cast<unsigned>(ceil_div(slots, tile));
  auto* counts = static_cast<Counts*>(p.scratch);
  auto* used_before = reinterpret_cast<int32_t*>(counts + tiles);
  int32_t* blocks_done = used_before + p.batch + 1;
  count_kernel<<<tiles, kThreads, 0, stream>>>(p, tile, counts, blocks_done);
  check_launch("count_kernel");
  write_kernel<<<tiles, kThreads, 0, stream>>>(p, tile, counts, used_before, blocks_done);
  check_launch("write_kernel");
}

void launch_gather_rows_cuda(const MoveRowsParams& p, const CudaLaunch& launch) {
  launch_move<true>(p, p.total, launch);
}

void launch_scatter_rows_cuda(const MoveRowsParams& p, const CudaLaunch& launch) {
  const cudaStream_t stream = stream_of(launch);
  const int64_t rows = p.batch * p.seqlen;
  check_cuda(cudaMemsetAsync(p.inverse, 0xff, static_cast<size_t>(rows) * sizeof(int32_t), stream), "cudaMemsetAsync");
  inverse_kernel<<<grid_for(p.total, kThreads), kThreads, 0, stream>>>(p, launch.fault);
  check_launch("inverse_kernel");
  launch_move<false>(p, rows, launch);
}

}  // namespace packing_ops
