// csrc/core/ptx/wgmma.cuh for the emulator. A thread works out its own sums.
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
inline void wgmma_wait_group_after(bool) {
  wgmma_wait_group<0>();
}
template <int kCount>
void fence_operands(float (&)[kCount]) {}

// The 16 elements that the product sums over, in row or column `other`.
template <class T>
void matrix_elements(uint64_t descriptor, bool trans, int other, float* out) {
  const uint32_t start = (descriptor & 0x3fff) << 4;
  const uint32_t panel = (descriptor >> 16 & 0x3fff) << 4;
  const uint32_t eight_rows = (descriptor >> 32 & 0x3fff) << 4;
  const int together = trans ? 1 : 8;  // elements beside each other: a chunk of 16 bytes
  for (int first = 0; first < 16; first += together) {
    const int row = trans ? first : other;
    const int column = trans ? other : first;
    uint32_t address = start + row / 8 * eight_rows + row % 8 * 128 + column / 64 * panel + column % 64 * 2;
    address ^= address >> 3 & 0x70;
    emulator::check_fenced(address);
    T elements[8];
    std::memcpy(elements, emulator::shared + address, together * sizeof(T));
    for (int i = 0; i < together; ++i) out[first + i] = static_cast<float>(elements[i]);
  }
}

struct RowsOfA {
  float elements[2][16];  // of this thread's two rows
};

template <class T, bool kTrans, int kCount>
void multiply(float (&d)[kCount], const RowsOfA& a, uint64_t b, bool add) {
  const int quad_lane = emulator::lane() % 4;
  for (int block = 0; block < kCount / 4; ++block) {
    for (int i = 0; i < 2; ++i) {
      float right[16];
      matrix_elements<T>(b, kTrans, 8 * block + 2 * quad_lane + i, right);
      for (int half = 0; half < 2; ++half) {
        float sum = 0;  // of its own, so that results depend on which 16 terms an instruction has
        for (int k = 0; k < 16; ++k) sum += a.elements[half][k] * right[k];
        d[4 * block + 2 * half + i] = add ? d[4 * block + 2 * half + i] + sum : sum;
      }
    }
  }
}

template <class T, bool kTrans, bool kTransA = false, int kCount>
void wgmma(float (&d)[kCount], uint64_t a, uint64_t b, bool add) {
  emulator::start_products([&d, a, b, add] {
    RowsOfA rows;
    const int row = 16 * (threadIdx.x / 32 % 4) + emulator::lane() / 4;
    for (int half = 0; half < 2; ++half) matrix_elements<T>(a, kTransA, row + 8 * half, rows.elements[half]);
    multiply<T, kTrans>(d, rows, b, add);
  });
}

// The quad's registers hold the rows. They stay as they are until the product is done.
template <class T, bool kTrans, int kCount>
void wgmma(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, bool add) {
  const Words got = emulator::with_warp(~0u, {{a[0], a[1], a[2], a[3]}}, [](const Words(&in)[32], Words(&out)[32]) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 16; ++i) out[lane].word[i] = in[lane / 4 * 4 + i % 4].word[i / 4];
    }
  });
  RowsOfA rows;  // word 4 m + t of matrix m: row 8 (m % 2), columns 8 (m / 2) + 2 t
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 2; ++j) rows.elements[i / 4 % 2][i / 8 * 8 + 2 * (i % 4) + j] = element<T>(got.word[i], j);
  }
  const std::array<uint32_t, 4> before = {a[0], a[1], a[2], a[3]};
  emulator::start_products([&d, &a, rows, before, b, add] {
    if (!std::equal(before.begin(), before.end(), a)) std::abort();
    multiply<T, kTrans>(d, rows, b, add);
  });
}

}  // namespace packing_ops::ptx
