// Inline assembly of sm_90: boxes of tensors between global and shared memory, by the copy engine.
#pragma once

#include <cuda.h>

#include "core/ptx/mma.cuh"

namespace packing_ops::ptx {

// Where a box of a 5-dimensional tensor map begins.
struct BoxStart {
  int32_t at[5];
};

// The barrier counts a whole box's bytes, also where the tensor ends inside of it: that part is zeros.
__device__ __forceinline__ void load_box(uint32_t shared, const CUtensorMap& map, const BoxStart& box,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, "
      "%6}], "
      "[%7];" ::"r"(shared),
      "l"(&map), "r"(box.at[0]), "r"(box.at[1]), "r"(box.at[2]), "r"(box.at[3]), "r"(box.at[4]),
      "r"(shared_address(barrier))
      : "memory");
}

// What lies outside of the tensor is not stored.
__device__ __forceinline__ void store_box(const CUtensorMap& map, const BoxStart& box, uint32_t shared) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
      "r"(box.at[0]), "r"(box.at[1]), "r"(box.at[2]), "r"(box.at[3]), "r"(box.at[4]), "r"(shared)
      : "memory");
}

__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Bytes that follow each other, in both memories: multiples of 16.
__device__ __forceinline__ void store_bytes(void* global, uint32_t shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}

// The same, added to the floats that are there.
__device__ __forceinline__ void add_floats(float* global, uint32_t shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}

// Until this thread's stores have read shared memory.
__device__ __forceinline__ void wait_until_stores_have_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Until this thread's stores are done.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace packing_ops::ptx
