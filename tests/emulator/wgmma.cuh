// csrc/core/ptx/wgmma.cuh for the emulator. A thread works out its sums.
#pragma once

#include <array>

#include "core/ptx/mma.cuh"

namespace packing_ops::ptx {

inline uint64_t matrix_descriptor(uint32_t address, uint32_t panel = 16) {
  if (address % 1024 != 0) std::abort();  // the chunks' permutation starts there
  return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | static_cast<uint64_t>(panel >> 4) << 16 |
         (address & 0x3ffff) >> 4;
}
inline uint64_t advance_descriptor(uint64_t descriptor, int bytes) {
  if (bytes % 16 != 0) std::abort();
  return descriptor + static_cast<uint64_t>(bytes >> 4);
}
inline void wgmma_fence() {}
inline void wgmma_commit_group() {
  emulator::commit_products();
}
// The warp goes on as one.
template <int kPending>
void wgmma_wait_group() {
  emulator::wait_for_products(kPending);
  __syncwarp();
}
inline void wgmma_wait_group_after(int positive) {
  if (positive <= 0) std::abort();
  wgmma_wait_group<0>();
}
template <int kCount>
void fence_operands(float (&)[kCount]) {}
inline void no_hoist(int32_t&) {}

// Of each of 16 elements of A and B what a thread multiplies: two rows of A, two columns of B, in the order of its
// sums.
using Operand = std::array<Four, 16>;

// In products.cpp.
template <class T, bool kTrans>
Operand rows_of(uint64_t a);
template <class T, bool kTrans>
void multiply(float* d, int count, const Operand& rows, uint64_t b, bool add);

template <class T, bool kTrans, bool kTransA = false, int kCount>
void wgmma(float (&d)[kCount], uint64_t a, uint64_t b, bool add) {
  emulator::start_products([&d, a, b, add] { multiply<T, kTrans>(d, kCount, rows_of<T, kTransA>(a), b, add); });
}

// The quad's registers hold the rows. They stay as they are until the product is done.
template <class T, bool kTrans, int kCount>
void wgmma(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, bool add) {
  const Words<4> brought{{a[0], a[1], a[2], a[3]}};
  const auto got = emulator::with_warp<16>(~0u, brought, [](const Words<4>(&in)[32], Words<16>(&out)[32]) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 16; ++i) out[lane].word[i] = in[lane / 4 * 4 + i % 4].word[i / 4];
    }
  });
  Operand rows;  // word 4 m + t of matrix m: row 8 (m % 2), columns 8 (m / 2) + 2 t
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 2; ++j) {
      Four& of_both = rows[i / 8 * 8 + 2 * (i % 4) + j];
      const int half = i / 4 % 2;
      of_both[2 * half] = of_both[2 * half + 1] = element<T>(got.word[i], j);
    }
  }
  const std::array<uint32_t, 4> before = {a[0], a[1], a[2], a[3]};
  emulator::start_products([&d, &a, rows, before, b, add] {
    if (!std::equal(before.begin(), before.end(), a)) std::abort();
    multiply<T, kTrans>(d, kCount, rows, b, add);
  });
}

}  // namespace packing_ops::ptx
