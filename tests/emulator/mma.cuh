// csrc/core/ptx/mma.cuh for the emulator: what the instructions do, in the layouts that PTX documents.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <utility>

namespace packing_ops::ptx {

using emulator::Words;

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - emulator::shared);
}

// Element (row, 2 t) and the next of matrix m to lane 4 row + t, or of its transpose.
void read_matrices(const Words<1> (&in)[32], Words<4> (&out)[32], bool transposed);  // products.cpp
inline void load_matrices(uint32_t (&out)[4], uint32_t address, bool transposed) {
  if (address % 16 != 0) std::abort();
  const auto got = emulator::with_warp<4>(~0u, Words<1>{{address}}, [=](const Words<1>(&in)[32], Words<4>(&out)[32]) {
    read_matrices(in, out, transposed);
  });
  std::copy_n(got.word, 4, out);
}
inline void ldmatrix(uint32_t (&out)[4], uint32_t address) {
  load_matrices(out, address, false);
}
inline void ldmatrix_trans(uint32_t (&out)[4], uint32_t address) {
  load_matrices(out, address, true);
}

inline float as_float(__nv_bfloat16 x) {
  return emulator::bits_of<float>(static_cast<uint32_t>(emulator::bits_of<uint16_t>(x)) << 16);
}
// The header's own conversion is slow on the CPU.
inline float as_float(__half x) {
  const uint32_t bits = emulator::bits_of<uint16_t>(x);
  const float scaled = emulator::bits_of<float>((bits & 0x7fff) << 13) * 0x1p112f;  // to float's exponent
  const uint32_t size = emulator::bits_of<uint32_t>(scaled) | (scaled >= 65536 ? 0x7f800000 : 0);  // inf and NaN
  return emulator::bits_of<float>(size | (bits & 0x8000) << 16);
}

template <class T>
float element(uint32_t word, int i) {
  return as_float(emulator::bits_of<T>(static_cast<uint16_t>(word >> 16 * i)));
}

using Four = float __attribute__((vector_size(16)));  // products and sums of each by itself

template <class T>
void multiply_in_warp(const Words<10> (&in)[32], Words<4> (&out)[32]);  // products.cpp
template <class T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Words<10> mine{{a[0], a[1], a[2], a[3], b0, b1}};
  std::memcpy(&mine.word[6], c, sizeof(c));
  const Words<4> got = emulator::with_warp<4>(~0u, mine, multiply_in_warp<T>);
  std::memcpy(c, got.word, sizeof(c));
}

inline void store_shared(uint32_t address, uint32_t value) {
  std::memcpy(emulator::shared + address, &value, sizeof(value));
}
inline void cp_async_16(uint32_t shared, const void* global, bool valid = true) {
  emulator::copy_to_shared(shared, global, 16, valid);
}
inline void cp_async_8(uint32_t shared, const void* global, bool valid) {
  emulator::copy_to_shared(shared, global, 8, valid);
}
inline void cp_async_4(uint32_t shared, const void* global, bool valid) {
  emulator::copy_to_shared(shared, global, 4, valid);
}
inline void cp_async_commit() {
  emulator::commit_copies();
}
template <int kPending>
void cp_async_wait() {
  emulator::wait_for_copies(kPending);
}
template <int kThreads>
void bar_sync() {
  __syncthreads();
}
inline void mbarrier_init(uint64_t* barrier, int count) {
  emulator::barrier_at(barrier) = {static_cast<unsigned>(count), static_cast<unsigned>(count), 0, 0};
}
inline void mbarrier_arrive(uint64_t* barrier) {
  emulator::barrier_at(barrier).arrive();
}
inline void cp_async_mbarrier_arrive(uint64_t* barrier) {
  emulator::arrive_after_copies(barrier);
}
inline void mbarrier_wait(uint64_t* barrier, int parity) {
  while ((emulator::barrier_at(barrier).phases & 1) == static_cast<uint32_t>(parity)) {
    emulator::give_way();
    emulator::end_some_copies();
    emulator::load_boxes_of(barrier);
  }
}
inline bool mbarrier_test_wait(uint64_t* barrier, int parity) {
  return (emulator::barrier_at(barrier).phases & 1) != static_cast<uint32_t>(parity);
}
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}
inline float exp2_approx(float x) {
  return std::exp2(x);
}
inline float rcp_approx(float x) {
  return 1 / x;
}
inline float clamp(float x, float bound) {
  return x > bound ? bound : x < -bound ? -bound : x;
}
inline int32_t load_acquire(const int32_t* pointer) {
  emulator::give_way();
  return *pointer;
}
inline void store_release(int32_t* pointer, int32_t value) {
  *pointer = value;
}
inline void store_relaxed(int32_t* pointer, int32_t value) {
  *pointer = value;
}
inline void red_add_4(float4* to, float4 x) {
  *to = make_float4(to->x + x.x, to->y + x.y, to->z + x.z, to->w + x.w);
}
template <class T>
T opaque(T x) {
  return x;
}

}  // namespace packing_ops::ptx
