// Accumulators of mma instructions to 16-bit rows in global memory.
#pragma once

#include "core/ptx/mma.cuh"

namespace packing_ops::attention {

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Row g (half 0) or g + 8 (half 1) of kBlocks accumulators [16, 8] (m16n8 layout, wgmma's too), scaled, to 16-bit
// memory from column first_column on. Called by all lanes of the warp; row is null if there is nothing to store.
// Lane t of a quad holds word t of each block; neighbours exchange words, so that each has two of one block and the
// quad stores 32 bytes.
template <class T, int kBlocks>
__device__ __forceinline__ void store_row(uint16_t* row, int first_column, int head_dim, const float (&acc)[kBlocks][4],
                                          int half, float scale) {
  static_assert(kBlocks % 2 == 0);
  const int t = threadIdx.x & 3;
  const bool odd = t & 1;
  const int thread_column = first_column + 8 * (t & 1) + 2 * (t & 2);
  uint16_t* thread_row = ptx::opaque(row + thread_column);
  const int columns = row == nullptr ? 0 : head_dim - thread_column;
#pragma unroll
  for (int b = 0; b < kBlocks; b += 2) {
    const uint32_t even_word = pack<T>(acc[b][2 * half] * scale, acc[b][2 * half + 1] * scale);
    const uint32_t odd_word = pack<T>(acc[b + 1][2 * half] * scale, acc[b + 1][2 * half + 1] * scale);
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? even_word : odd_word, 1);
    if (8 * b < columns) {
      *reinterpret_cast<uint2*>(thread_row + 8 * b) = odd ? make_uint2(got, odd_word) : make_uint2(even_word, got);
    }
  }
}

}  // namespace packing_ops::attention
