// csrc/core/ptx/bulk_copy.cuh for the emulator.
#pragma once

#include <cuda.h>

#include "core/ptx/mma.cuh"

namespace packing_ops::ptx {

struct TmaCoords {
  int32_t at[5];
};

inline emulator::BoxCopy box_copy(uint32_t shared, const CUtensorMap& map, const TmaCoords& coords, uint64_t* barrier) {
  return {reinterpret_cast<const emulator::BoxMap*>(&map),
          {coords.at[0], coords.at[1], coords.at[2], coords.at[3], coords.at[4]},
          shared,
          barrier};
}
inline void tma_load(uint32_t shared, const CUtensorMap& map, const TmaCoords& coords, uint64_t* barrier) {
  emulator::tma_load(box_copy(shared, map, coords, barrier));
}
inline void tma_store(const CUtensorMap& map, const TmaCoords& coords, uint32_t shared) {
  emulator::tma_store(box_copy(shared, map, coords, nullptr));
}
inline void bulk_commit_group() {}
inline void bulk_wait_group_read() {
  emulator::bulk_wait_group_read();
}
inline void bulk_wait_group() {
  emulator::bulk_wait_group_read();
}
inline void bulk_store(void* global, uint32_t shared, int bytes) {
  emulator::store_words(static_cast<float*>(global), shared, bytes, false);
}
inline void bulk_reduce_add(float* global, uint32_t shared, int bytes) {
  emulator::store_words(global, shared, bytes, true);
}

}  // namespace packing_ops::ptx
