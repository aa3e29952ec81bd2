// Blocks of CUDA threads on the CPU, so that the kernels' source runs without a GPU. Every thread is a
// fiber, two blocks run at once. All take turns in an order drawn from a seed, and asynchronous copies arrive at once
// or as late as they may, so that a barrier or a wait that is missing shows as a wrong result. Included before
// everything else of a .cu file.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <utility>

#undef __device__
#undef __global__
#undef __shared__
#undef __forceinline__
#undef __align__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __global__
#define __forceinline__ inline
#define __align__(bytes)
#define __launch_bounds__(...)
#define __grid_constant__

extern dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace emulator {

void run(dim3 grid, dim3 block, const std::function<void()>& thread);

// What kernel<<<grid, block, shared, stream>>>(arguments) becomes.
template <class Kernel>
auto launch(Kernel kernel, dim3 grid, dim3 block, size_t = 0, cudaStream_t = nullptr) {
  return [=](auto... arguments) { run(grid, block, [&] { kernel(arguments...); }); };
}

void give_way();           // to other threads and blocks
extern uint64_t progress;  // of threads that waited for each other

template <int kCount>
struct Words {
  uint32_t word[kCount];
};
// Where some threads meet. Two slots: a thread may arrive again before all have taken what they came for.
struct Meeting {
  int arrived = 0;
  uint64_t times = 0;
  alignas(64) uint8_t in[2][sizeof(Words<16>[32])];
  alignas(64) uint8_t out[2][sizeof(Words<16>[32])];
  int sum[2] = {0, 0};
};
extern Meeting* of_warps;  // of the block that runs: of all lanes
Meeting& of_some_lanes(uint32_t lanes);

// together(in, out) by the last of the warp's `lanes` that arrives, from what each brings to what each takes away.
template <int kOut, int kIn, class F>
Words<kOut> with_warp(uint32_t lanes, const Words<kIn>& brought, F&& together) {
  Meeting& meeting = lanes == ~0u ? of_warps[threadIdx.x / 32] : of_some_lanes(lanes);
  const uint64_t time = meeting.times;
  const int lane = static_cast<int>(threadIdx.x & 31);
  auto& in = reinterpret_cast<Words<kIn>(&)[32]>(meeting.in[time & 1]);
  auto& out = reinterpret_cast<Words<kOut>(&)[32]>(meeting.out[time & 1]);
  in[lane] = brought;
  if (++meeting.arrived == (lanes == ~0u ? 32 : __builtin_popcount(lanes))) {
    together(std::as_const(in), out);
    meeting.arrived = 0;
    ++meeting.times;
    ++progress;
  }
  while (meeting.times == time) give_way();
  return out[lane];
}

int with_block(int value, bool count);  // how many threads have a value, or whether any has

// Of the block that runs: dynamic shared memory, then the static variables of kernels. Addresses are offsets.
constexpr uint32_t kSharedBytes = 256 << 10;
extern uint8_t* shared;
extern uint8_t* unfenced;  // a flag for 16 bytes of it: written since the thread's last fence
uint32_t place_in_static_shared(size_t bytes, size_t alignment);
// What __shared__ T name; becomes.
template <class T>
struct SharedVariable {
  uint32_t place = place_in_static_shared(sizeof(T), alignof(T));
  T& here() const { return *reinterpret_cast<T*>(shared + place); }
};

void copy_to_shared(uint32_t to, const void* from, int bytes, bool valid);
void commit_copies();
void wait_for_copies(int pending);
struct Barrier {
  uint64_t left : 12;    // threads that the phase waits for
  uint64_t count : 12;   // of this many
  uint64_t phases : 16;  // that have ended
  int64_t bytes : 24;    // of bulk copies that it waits for
  void arrive() {
    if (left == 0) std::abort();
    --left;
    end_if_done();
  }
  void expect(int count) { bytes += count; }
  void received(int count) {
    bytes -= count;
    end_if_done();
  }
  void end_if_done() {
    if (left > 0 || bytes != 0) return;
    left = count;
    ++phases;
    ++progress;
  }
};
inline Barrier& barrier_at(uint64_t* barrier) {
  return *reinterpret_cast<Barrier*>(barrier);
}
void arrive_after_copies(uint64_t* barrier);
void end_some_copies();  // up to the first that a barrier is informed of

// A tensor map: where its boxes are.
struct BoxMap {
  uint8_t* data;
  uint64_t sizes[5];
  uint64_t strides[5];  // in bytes
  uint32_t box[5];
};
static_assert(sizeof(BoxMap) <= 128);
struct BoxCopy {
  const BoxMap* map;
  int32_t start[5];
  uint32_t shared;
  uint64_t* barrier;  // of a load
};
void tma_load(const BoxCopy& copy);
void tma_store(const BoxCopy& copy);
void store_words(float* to, uint32_t from, int bytes, bool add);  // or adds them
void bulk_wait_group_read();
void load_boxes_of(uint64_t* barrier);  // those under way that it waits for

// Products of this thread's rows: begun at once, or when their group is waited for.
void start_products(std::function<void()> work);
void commit_products();
void wait_for_products(int pending);

// Shared memory that a thread wrote may be read by products and bulk stores after that thread's fence.
void written(uint32_t address);  // 16 bytes
void fence_written();
inline void check_fenced(uint32_t address) {
  if (unfenced[address / 16]) std::abort();
}

template <class To, class From>
To bits_of(const From& x) {
  To to{};
  std::memcpy(&to, &x, std::min(sizeof(To), sizeof(From)));
  return to;
}

// f(lane) is the lane whose value a lane gets.
template <class T>
T shuffled(uint32_t lanes, T x, int from) {
  const Words<2> brought{{bits_of<uint32_t>(x), static_cast<uint32_t>(from) & 31}};
  const auto found = with_warp<1>(lanes, brought, [](const Words<2>(&in)[32], Words<1>(&out)[32]) {
    for (int lane = 0; lane < 32; ++lane) out[lane].word[0] = in[in[lane].word[1]].word[0];
  });
  return bits_of<T>(found);
}

// A word of each lane to a word for all.
template <class F>
uint32_t agreed(uint32_t lanes, uint32_t x, F f) {
  return with_warp<1>(lanes, Words<1>{{x}},
                      [&](const Words<1>(&in)[32], Words<1>(&out)[32]) {
                        for (int lane = 0; lane < 32; ++lane) out[lane].word[0] = f(in, lanes, lane);
                      })
      .word[0];
}

inline int lane() {
  return static_cast<int>(threadIdx.x & 31);
}

}  // namespace emulator

inline void __syncthreads() {
  emulator::with_block(0, false);
}
inline int __syncthreads_or(int value) {
  return emulator::with_block(value, false);
}
inline int __syncthreads_count(int value) {
  return emulator::with_block(value, true);
}
inline void __syncwarp() {
  emulator::shuffled(0xffffffffu, 0u, 0);
}
template <class T>
T __shfl_sync(uint32_t lanes, T x, int from) {
  return emulator::shuffled(lanes, x, from);
}
inline float __fmul_rn(float x, float y) {
  return x * y;
}
inline float __fsub_rn(float x, float y) {
  return x - y;
}

template <class T>
T __shfl_xor_sync(uint32_t lanes, T x, int mask) {
  return emulator::shuffled(lanes, x, emulator::lane() ^ mask);
}
template <class T>
T __shfl_up_sync(uint32_t lanes, T x, int delta) {
  return emulator::shuffled(lanes, x, std::max(emulator::lane() - delta, emulator::lane() % delta));
}
inline uint32_t __ballot_sync(uint32_t lanes, bool value) {
  return emulator::agreed(lanes, value, [](const auto& in, uint32_t lanes, int) {
    uint32_t votes = 0;
    for (int i = 0; i < 32; ++i) votes |= (lanes >> i & in[i].word[0] & 1) << i;
    return votes;
  });
}
inline bool __any_sync(uint32_t lanes, bool value) {
  return __ballot_sync(lanes, value) != 0;
}
inline uint32_t __match_any_sync(uint32_t lanes, int value) {
  return emulator::agreed(lanes, static_cast<uint32_t>(value), [](const auto& in, uint32_t lanes, int lane) {
    uint32_t same = 0;
    for (int i = 0; i < 32; ++i) same |= (lanes >> i & (in[i].word[0] == in[lane].word[0])) << i;
    return same;
  });
}
inline int __popc(uint32_t x) {
  return __builtin_popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
T atomicAdd(T* to, T x) {
  const T before = *to;
  *to += x;
  return before;
}
