// csrc/core/ptx/barrier.cuh for the emulator.
#pragma once

#include "core/ptx/mma.cuh"

namespace packing_ops::ptx {

inline void fence_mbarrier_init() {}
inline void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  emulator::barrier_at(barrier).expect(static_cast<int>(bytes));
  emulator::barrier_at(barrier).arrive();
}
inline void fence_proxy_async() {
  emulator::fence_written();
}
inline void fence_proxy_async_global() {}
inline void store_shared_v4(uint32_t address, float4 x) {
  emulator::written(address);
  std::memcpy(emulator::shared + address, &x, sizeof(x));
}
template <int kCount>
void setmaxnreg_inc() {}
template <int kCount>
void setmaxnreg_dec() {}

// Element (row, 2 t) and the next of matrix m from lane 4 row + t; lane 8 m + row stores the row, or that column.
template <bool kTrans = false>
void stmatrix(uint32_t address, const uint32_t (&in)[4]) {
  const Words<4> brought{{in[0], in[1], in[2], in[3]}};
  const auto got = emulator::with_warp<4>(~0u, brought, [](const Words<4>(&in)[32], Words<4>(&out)[32]) {
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane % 8;
      for (int i = 0; i < 8; ++i) {
        const uint32_t word = in[kTrans ? 4 * i + row / 2 : 4 * row + i / 2].word[lane / 8];
        const uint32_t element = word >> 16 * ((kTrans ? row : i) % 2) & 0xffff;
        out[lane].word[i / 2] = (i % 2 ? out[lane].word[i / 2] : 0) | element << 16 * (i % 2);
      }
    }
  });
  emulator::written(address);
  std::memcpy(emulator::shared + address, got.word, 16);
}

}  // namespace packing_ops::ptx
