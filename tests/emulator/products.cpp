// Of mma.cuh and wgmma.cuh what takes the most time, compiled once and with all optimisation.
#include "core/ptx/wgmma.cuh"

namespace packing_ops::ptx {

void read_matrices(const Words<1> (&in)[32], Words<4> (&out)[32], bool transposed) {
  for (int lane = 0; lane < 32; ++lane) {
    const int row = lane / 4;
    const int column = 2 * (lane % 4);
    for (int m = 0; m < 4; ++m) {
      uint16_t pair[2];
      if (transposed) {
        for (int i = 0; i < 2; ++i)
          std::memcpy(&pair[i], emulator::shared + in[8 * m + column + i].word[0] + 2 * row, 2);
      } else {
        std::memcpy(pair, emulator::shared + in[8 * m + row].word[0] + 2 * column, 4);
      }
      std::memcpy(&out[lane].word[m], pair, 4);
    }
  }
}

template <class T>
void multiply_in_warp(const Words<10> (&in)[32], Words<4> (&out)[32]) {
  float left[16][16];
  Four right[2][16];
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 2; ++i) {
      const int column = 2 * (lane % 4) + i;
      for (int m = 0; m < 4; ++m) left[lane / 4 + m % 2 * 8][column + m / 2 * 8] = element<T>(in[lane].word[m], i);
      for (int m = 0; m < 2; ++m) right[lane / 16][column + 8 * m][lane / 4 % 4] = element<T>(in[lane].word[4 + m], i);
    }
  }
  constexpr int kRows = 4;  // whose sums do not wait for each other
  for (int first = 0; first < 16; first += kRows) {
    Four sums[kRows][2]{};  // separate, so that results depend on which 16 terms an instruction has
    for (int k = 0; k < 16; ++k)
      for (int i = 0; i < kRows; ++i)
        for (int half = 0; half < 2; ++half) sums[i][half] += left[first + i][k] * right[half][k];
    for (int row = first; row < first + kRows; ++row) {
      for (int column = 0; column < 8; ++column) {
        const int lane = row % 8 * 4 + column / 2;
        const int i = row / 8 * 2 + column % 2;
        const float before = emulator::bits_of<float>(in[lane].word[6 + i]);
        out[lane].word[i] = emulator::bits_of<uint32_t>(before + sums[row - first][column / 4][column % 4]);
      }
    }
  }
}
template void multiply_in_warp<__nv_bfloat16>(const Words<10> (&)[32], Words<4> (&)[32]);
template void multiply_in_warp<__half>(const Words<10> (&)[32], Words<4> (&)[32]);

namespace {

// Where the chunk of 16 bytes is that has an element. Columns are next to each other.
const uint8_t* chunk_of(uint64_t descriptor, int row, int column) {
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

}  // namespace

template <class T, bool kTrans>
Operand rows_of(uint64_t a) {
  Operand rows;
  const int row = 16 * (threadIdx.x / 32 % 4) + emulator::lane() / 4;
  for_each_two<T, kTrans, 8>(a, row, [&](int k, float x, float y) { rows[k] = Four{x, x, y, y}; });
  return rows;
}

template <class T, bool kTrans>
void multiply(float* d, int count, const Operand& rows, uint64_t b, bool add) {
  constexpr int kTogether = 4;  // blocks of columns whose sums do not wait for each other
  if (count % (4 * kTogether) != 0) std::abort();
  const int quad_lane = emulator::lane() % 4;
  for (int block = 0; block < count / 4; block += kTogether) {
    Operand columns[kTogether];
    for (int i = 0; i < kTogether; ++i)
      for_each_two<T, kTrans, 1>(b, 8 * (block + i) + 2 * quad_lane,
                                 [&](int k, float x, float y) { columns[i][k] = Four{x, y, x, y}; });
    Four sums[kTogether]{};  // separate, so that results depend on which 16 terms an instruction has
    for (int k = 0; k < 16; ++k)
      for (int i = 0; i < kTogether; ++i) sums[i] += rows[k] * columns[i][k];
    for (int i = 0; i < 4 * kTogether; ++i) {
      float& to = d[4 * block + i];
      to = add ? to + sums[i / 4][i % 4] : sums[i / 4][i % 4];
    }
  }
}

template Operand rows_of<__nv_bfloat16, false>(uint64_t);
template Operand rows_of<__nv_bfloat16, true>(uint64_t);
template Operand rows_of<__half, false>(uint64_t);
template Operand rows_of<__half, true>(uint64_t);
template void multiply<__nv_bfloat16, false>(float*, int, const Operand&, uint64_t, bool);
template void multiply<__nv_bfloat16, true>(float*, int, const Operand&, uint64_t, bool);
template void multiply<__half, false>(float*, int, const Operand&, uint64_t, bool);
template void multiply<__half, true>(float*, int, const Operand&, uint64_t, bool);

}  // namespace packing_ops::ptx
