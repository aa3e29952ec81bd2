// Moves rows as padding_cpu.cpp does, as the widest vectors that every address allows.
#include "core/launch.cuh"
#include "ops/padding/padding.h"

namespace packing_ops {

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

__device__ bool is_row(int64_t row, int64_t rows) {
  return row >= 0 && row < rows;
}

// The row that the entries before i name last, -1 if they name no row.
__device__ int64_t row_before(const int64_t* indices, int64_t i, int64_t rows) {
  while (--i >= 0) {
    if (is_row(indices[i], rows)) return indices[i];
  }
  return -1;
}

// The same for the end of the indices, by a whole block: half of them may be -1 there.
__device__ int64_t last_row(const int64_t* indices, int64_t end, int64_t rows) {
  constexpr int kLoads = 16;
  __shared__ long long last;
  if (threadIdx.x == 0) last = -1;
  __syncthreads();
  for (; end > 0 && last < 0; end -= kThreads * kLoads) {
    long long thread_last = -1;
#pragma unroll
    for (int n = kLoads - 1; n >= 0; --n) {
      const int64_t i = end - 1 - threadIdx.x - n * kThreads;
      if (i >= 0 && is_row(indices[i], rows)) thread_last = i;
    }
    __syncthreads();
    if (thread_last >= 0) atomicMax(&last, thread_last);
    __syncthreads();
  }
  return last < 0 ? -1 : indices[last];
}

// The source of a row to write: its bytes, or nothing (zeros).
template <bool kGather>
__device__ const char* source_of(const MoveRowsParams& p, const RowMove& m, int64_t row, const FaultFlag& fault) {
  if constexpr (!kGather) {
    const int32_t from = p.inverse[row];
    return from < 0 ? nullptr : m.input + from * m.row_stride;
  }
  const int64_t from = p.indices[row];
  if (from == -1) return nullptr;
  const int64_t padded_rows = p.batch * p.seqlen;
  const bool inside = is_row(from, padded_rows);
  if (!inside || from <= row_before(p.indices, row, padded_rows)) fault.raise(Fault::kIndexOutside, row);
  if (!inside) return nullptr;
  return m.input + from / p.seqlen * m.batch_stride + from % p.seqlen * m.row_stride;
}

constexpr int kUnroll = 4;  // vectors per lane of one piece
constexpr int kPieces = 2;  // pieces a warp has under way: the source of the second is found while the first loads

// Rows of at least a warp's width, in pieces of kUnroll vectors per lane.
template <bool kGather, class Vec>
__device__ void move_wide(const MoveRowsParams& p, const RowMove& m, int64_t rows, const FaultFlag& fault) {
  constexpr int64_t kPiece = kWarp * kUnroll;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t vectors = m.row_bytes / static_cast<int64_t>(sizeof(Vec));
  const int64_t pieces = ceil_div(vectors, kPiece);
  const int64_t step = thread_count() / kWarp * kPieces;
  for (int64_t work = thread_id() / kWarp * kPieces; work < rows * pieces; work += step) {
    const Vec* in[kPieces];
    Vec* out[kPieces];
    int64_t left[kPieces];  // vectors of the piece from this lane's first on
    Vec loaded[kPieces][kUnroll];
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const int64_t row = (work + n) / pieces;
      const int64_t first = (work + n) % pieces * kPiece + lane;
      left[n] = row < rows ? vectors - first : 0;
      in[n] = left[n] > 0 ? reinterpret_cast<const Vec*>(source_of<kGather>(p, m, row, fault)) : nullptr;
      if (in[n]) in[n] += first;
      out[n] = reinterpret_cast<Vec*>(m.output + row * m.row_bytes) + first;
    }
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) loaded[n][u] = in[n] && u * kWarp < left[n] ? in[n][u * kWarp] : Vec{};
    }
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (u * kWarp < left[n]) out[n][u * kWarp] = loaded[n][u];
      }
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
  // Entries after total are all -1 in a layout, so the first of them shows whether rows would be lost.
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

// inverse[padded row] = packed row, -1 without one. An entry answers for its row and for those between it
// and the row before; the last one of all also for those after it.
__global__ void __launch_bounds__(kThreads) inverse_kernel(MoveRowsParams p, FaultFlag fault) {
  constexpr int kLong = 16;  // from here on the block fills together
  __shared__ int64_t long_gaps[kThreads][2];
  __shared__ int num_long;
  const int64_t rows = p.batch * p.seqlen;
  for (int64_t base = int64_t{blockIdx.x} * kThreads; base <= p.total; base += thread_count()) {
    if (threadIdx.x == 0) num_long = 0;
    __syncthreads();
    const int64_t i = base + threadIdx.x;
    const bool has_end = base + kThreads > p.total;
    const int64_t last = has_end ? last_row(p.indices, p.total, rows) : -1;
    const int64_t row = i < p.total ? p.indices[i] : rows;
    const bool inside = is_row(row, rows);
    if (i < p.total && row != -1 && !inside) fault.raise(Fault::kIndexOutside, i);
    if (i == p.total || (i < p.total && inside)) {
      const int64_t before = i == p.total ? last : row_before(p.indices, i, rows);
      if (inside && row <= before) fault.raise(Fault::kIndexOutside, i);
      if (inside) p.inverse[row] = static_cast<int32_t>(i);
      if (row - before - 1 >= kLong) {
        const int slot = atomicAdd(&num_long, 1);
        long_gaps[slot][0] = before + 1;
        long_gaps[slot][1] = row;
      } else {
        for (int64_t gap = before + 1; gap < row; ++gap) p.inverse[gap] = -1;
      }
    }
    __syncthreads();
    for (int n = 0; n < num_long; ++n) {
      for (int64_t gap = long_gaps[n][0] + threadIdx.x; gap < long_gaps[n][1]; gap += kThreads) p.inverse[gap] = -1;
    }
    __syncthreads();
  }
}

template <bool kGather>
void launch_move(const MoveRowsParams& p, int64_t rows, const CudaLaunch& launch) {
  int64_t threads = 0;
  for (int64_t n = 0; n < p.num_moves; ++n) {
    const RowMove& m = p.moves[n];
    const int64_t vectors = m.row_bytes / vector_bytes_of(m);
    const int64_t pieces = rows * ceil_div(vectors, kWarp * kUnroll);
    const int64_t wanted = vectors >= kWarp ? ceil_div(pieces, kPieces) * kWarp : rows * vectors;
    threads = threads > wanted ? threads : wanted;
  }
  if (threads == 0) return;
  const int64_t blocks = ceil_div(threads, kThreads);
  const dim3 grid(static_cast<unsigned>(blocks < 1 << 22 ? blocks : 1 << 22), static_cast<unsigned>(p.num_moves));
  move_rows_kernel<kGather><<<grid, kThreads, 0, stream_of(launch)>>>(p, rows, launch.fault);
  check_launch("move_rows_kernel");
}

}  // namespace

int64_t scatter_rows_scratch_cuda(int64_t batch, int64_t seqlen) {
  return batch * seqlen * static_cast<int64_t>(sizeof(int32_t));
}

void launch_gather_rows_cuda(const MoveRowsParams& p, const CudaLaunch& launch) {
  launch_move<true>(p, p.total, launch);
}

void launch_scatter_rows_cuda(const MoveRowsParams& p, const CudaLaunch& launch) {
  const cudaStream_t stream = stream_of(launch);
  const int64_t rows = p.batch * p.seqlen;
  if (rows == 0) return;
  inverse_kernel<<<grid_for(p.total + 1, kThreads), kThreads, 0, stream>>>(p, launch.fault);
  check_launch("inverse_kernel");
  launch_move<false>(p, rows, launch);
}

}  // namespace packing_ops
