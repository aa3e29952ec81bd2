// The layout of a mask, as padding_cpu.cpp makes it: a count and a write over tiles of slots.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "core/launch.cuh"
#include "ops/padding/padding.h"

namespace packing_ops {

namespace {

constexpr int kThreads = 256;
constexpr int kItems = 8;  // neighbouring slots a thread counts
constexpr int kSlots = kThreads * kItems;
constexpr int64_t kMaxTiles = 4096;  // every block sums the counts of all tiles before its tile

// Packed slots, and those that only attention_mask counts.
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
  Counts tile_counts{0, 0};
  for (int64_t base = begin; base < end; base += kSlots) {
    unsigned packed, used;
    read_slots(p, base + int64_t{threadIdx.x} * kItems, end, packed, used);
    tile_counts = tile_counts + Counts{__popc(packed), __popc(used)};
  }
  tile_counts = Reduce(storage).Sum(tile_counts);
  if (threadIdx.x == 0) counts[blockIdx.x] = tile_counts;
  if (blockIdx.x == 0 && threadIdx.x == 0) *blocks_done = 0;
}

// The host may be waiting for a total, and must not have to wait for the kernel's end.
__device__ void publish_to_host(int64_t* total, int64_t value) {
  *static_cast<volatile int64_t*>(total) = value;
  __threadfence_system();
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
  if (threadIdx.x == 0) publish_to_host(p.totals + 1, longest);
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
  if (blockIdx.x == 0 && threadIdx.x == 0) publish_to_host(p.totals, all.packed);

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

// scratch: seqlen less the first real column, one after the last, blocks that are done; all 0 before.
__global__ void __launch_bounds__(kThreads) real_columns_kernel(RealColumnsParams p) {
  using Reduce = cub::BlockReduce<int32_t, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  const auto larger = [](int32_t a, int32_t b) { return a > b ? a : b; };
  int32_t from_end = 0;
  int32_t end = 0;
  for (int64_t slot = thread_id(); slot < p.batch * p.seqlen; slot += thread_count()) {
    if (!is_real(p.mask, p.mask_dtype, slot)) continue;
    const auto column = static_cast<int32_t>(slot % p.seqlen);
    from_end = larger(from_end, static_cast<int32_t>(p.seqlen) - column);
    end = larger(end, column + 1);
  }
  from_end = Reduce(storage).Reduce(from_end, larger);
  __syncthreads();
  end = Reduce(storage).Reduce(end, larger);
  if (threadIdx.x != 0) return;
  atomicMax(p.scratch, from_end);
  atomicMax(p.scratch + 1, end);
  __threadfence();
  if (atomicAdd(p.scratch + 2, 1) != static_cast<int32_t>(gridDim.x) - 1) return;
  __threadfence();
  const int32_t last = __ldcg(p.scratch + 1);
  publish_to_host(p.columns, last == 0 ? 0 : p.seqlen - __ldcg(p.scratch));
  publish_to_host(p.columns + 1, last);
}

int64_t tile_of(int64_t slots) {
  return ceil_div(ceil_div(slots, kMaxTiles), kSlots) * kSlots;
}

__global__ void empty_layout_kernel(UnpadLayoutParams p) {
  for (int64_t b = thread_id(); b <= p.batch; b += thread_count()) {
    p.cu_seqlens[b] = 0;
    if (b < p.batch) p.seqused[b] = 0;
  }
  if (thread_id() < 2) publish_to_host(p.totals + thread_id(), 0);
}

}  // namespace

int64_t unpad_layout_scratch_cuda(int64_t batch, int64_t seqlen) {
  const int64_t tiles = ceil_div(batch * seqlen, tile_of(batch * seqlen > 0 ? batch * seqlen : 1));
  return tiles * static_cast<int64_t>(sizeof(Counts)) + (batch + 2) * static_cast<int64_t>(sizeof(int32_t));
}

int64_t real_columns_scratch_cuda() {
  return 3 * static_cast<int64_t>(sizeof(int32_t));
}

void launch_real_columns_cuda(const RealColumnsParams& p, const CudaLaunch& launch) {
  const cudaStream_t stream = stream_of(launch);
  check_cuda(cudaMemsetAsync(p.scratch, 0, static_cast<size_t>(real_columns_scratch_cuda()), stream),
             "cudaMemsetAsync");
  real_columns_kernel<<<grid_for(p.batch * p.seqlen, kThreads), kThreads, 0, stream>>>(p);
  check_launch("real_columns_kernel");
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

}  // namespace packing_ops
