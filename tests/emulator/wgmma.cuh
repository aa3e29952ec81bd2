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

// Where the chunk of 16 bytes is that has an element. Columns are next to each other.
inline const uint8_t* chunk_of(uint64_t descriptor, int row, int column) {
  const uint32_t start = (descriptor & 0x3fff) << 4;
  const uint32_t panel = (descriptor >> 16 & 0x3fff) << 4;
  const uint32_t eight_rows = (descriptor >> 32 & 0x3fff) << 4;
  uint32_t address = start + row / 8 * eight_rows + row % 8 * 128 + column / 64 * panel + column % 64 / 8 * 16;
  address ^= address >> 3 & 0x70;
  emulator::check_fenced(address);
  return emulator::shared + address;
}

// f(k, first, second) for the 16 elements that the product sums over, in two rows or columns: `other`, an even one
// where elements are in columns, and `step` after it.
template <class T, bool kTrans, int kStep, class F>
void for_each_two(uint64_t descriptor, int other, F&& f) {
  static_assert(!kTrans || kStep == 1 || kStep == 8);
  for (int first = 0; first < 16; first += kTrans ? 1 : 8) {
    T elements[2][8];
    if constexpr (kTrans) {
      const uint8_t* chunk = chunk_of(descriptor, first, other);
      const uint8_t* next = kStep == 1 ? chunk + 2 : chunk_of(descriptor, first, other + kStep);
      std::memcpy(&elements[0][0], chunk + other % 8 * 2, 2);
      std::memcpy(&elements[1][0], next + other % 8 * 2, 2);
      f(first, as_float(elements[0][0]), as_float(elements[1][0]));
    } else {
      std::memcpy(elements[0], chunk_of(descriptor, other, first), 16);
      std::memcpy(elements[1], chunk_of(descriptor, other + kStep, first), 16);
      for (int i = 0; i < 8; ++i) f(first + i, as_float(elements[0][i]), as_float(elements[1][i]));
    }
  }
}

// Of each of 16 elements of A and B what a thread multiplies: two rows of A, two columns of B, in the order of its
// sums.
using Operand = std::array<Four, 16>;

template <class T, bool kTrans, int kCount>
void multiply(float (&d)[kCount], const Operand& rows, uint64_t b, bool add) {
  const int quad_lane = emulator::lane() % 4;
  for (int block = 0; block < kCount / 4; ++block) {
    Four sums{};  // separate, so that results depend on which 16 terms an instruction has
    for_each_two<T, kTrans, 1>(b, 8 * block + 2 * quad_lane,
                               [&](int k, float x, float y) { sums += rows[k] * Four{x, y, x, y}; });
    for (int i = 0; i < 4; ++i) d[4 * block + i] = add ? d[4 * block + i] + sums[i] : sums[i];
  }
}

template <class T, bool kTrans, bool kTransA = false, int kCount>
void wgmma(float (&d)[kCount], uint64_t a, uint64_t b, bool add) {
  emulator::start_products([&d, a, b, add] {
    Operand rows;
    const int row = 16 * (threadIdx.x / 32 % 4) + emulator::lane() / 4;
    for_each_two<T, kTransA, 8>(a, row, [&](int k, float x, float y) { rows[k] = Four{x, x, y, y}; });
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
    multiply<T, kTrans>(d, rows, b, add);
  });
}

}  // namespace packing_ops::ptx
