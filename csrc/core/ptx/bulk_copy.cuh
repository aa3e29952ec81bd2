// Inline assembly of sm_90: TMA loads and stores of tensor tiles, and bulk copies of contiguous bytes.
#pragma once

#include <cuda.h>

#include "core/ptx/mma.cuh"

namespace packing_ops::ptx {

// Coordinates of a tile's first element in a 5-dimensional tensor map.
struct TmaCoords {
  int32_t at[5];
};

// The barrier counts all bytes of the tile, also where the tensor ends inside of it: that part is zeros.
__device__ __forceinline__ void tma_load(uint32_t shared, const CUtensorMap& map, const TmaCoords& coords,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, "
      "%6}], "
      "[%7];" ::"r"(shared),
      "l"(&map), "r"(coords.at[0]), "r"(coords.at[1]), "r"(coords.at[2]), "r"(coords.at[3]), "r"(coords.at[4]),
      "r"(shared_address(barrier))
      : "memory");
}

// Elements outside of the tensor are not stored.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const TmaCoords& coords, uint32_t shared) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
      "r"(coords.at[0]), "r"(coords.at[1]), "r"(coords.at[2]), "r"(coords.at[3]), "r"(coords.at[4]), "r"(shared)
      : "memory");
}

__device__ __forceinline__ void bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Contiguous bytes in both memories, a multiple of 16.
__device__ __forceinline__ void bulk_store(void* global, uint32_t shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}

// The same, added to the floats that are there.
__device__ __forceinline__ void bulk_reduce_add(float* global, uint32_t shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}

// Until this thread's stores have read shared memory.
__device__ __forceinline__ void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Until this thread's stores are done.
__device__ __forceinline__ void bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace packing_ops::ptx
