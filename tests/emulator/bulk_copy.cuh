// csrc/core/ptx/bulk_copy.cuh for the emulator.
#pragma once

#include <cuda.h>

#include "core/ptx/mma.cuh"

namespace packing_ops::ptx {

struct BoxStart {
  int32_t at[5];
};

inline emulator::BoxCopy box_copy(uint32_t shared, const CUtensorMap& map, const BoxStart& box, uint64_t* barrier) {
  return {reinterpret_cast<const emulator::BoxMap*>(&map),
          {box.at[0], box.at[1], box.at[2], box.at[3], box.at[4]},
          shared,
          barrier};
}
inline void load_box(uint32_t shared, const CUtensorMap& map, const BoxStart& box, uint64_t* barrier) {
  emulator::load_box(box_copy(shared, map, box, barrier));
}
inline void store_box(const CUtensorMap& map, const BoxStart& box, uint32_t shared) {
  emulator::store_box(box_copy(shared, map, box, nullptr));
}
inline void commit_stores() {}
inline void wait_until_stores_have_read() {
  emulator::wait_until_stores_have_read();
}
inline void wait_for_stores() {
  emulator::wait_until_stores_have_read();
}
inline void store_bytes(void* global, uint32_t shared, int bytes) {
  emulator::store_words(static_cast<float*>(global), shared, bytes, false);
}
inline void add_floats(float* global, uint32_t shared, int bytes) {
  emulator::store_words(global, shared, bytes, true);
}

}  // namespace packing_ops::ptx
