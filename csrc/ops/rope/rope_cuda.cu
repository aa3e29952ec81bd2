// A warp, or half of one, rotates every head of q and k of one token: the angles are read once and stay in registers.
// Same formula as rope_cpu.cpp, with the roundings spelled out: every layout, batch and packing gives the same bits.
#include <type_traits>

#include "core/launch.cuh"
#include "core/vec.cuh"
#include "ops/rope/rope.h"

namespace packing_ops {

namespace {

constexpr int kThreads = 64;
constexpr int kWarp = 32;

__device__ inline float fused(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
__device__ inline double fused(double a, double b, double c) {
  return __fma_rn(a, b, c);
}
__device__ inline float product(float a, float b) {
  return __fmul_rn(a, b);
}
__device__ inline double product(double a, double b) {
  return __dmul_rn(a, b);
}

// cos and sin of kPairs neighbouring pairs; with kFull apart for the first and the second element of each.
template <class Real, int kPairs, bool kFull>
struct Angles {
  Real cos1[kPairs], sin1[kPairs];
  Real cos2[kFull ? kPairs : 1], sin2[kFull ? kPairs : 1];

  __device__ Real second_cos(int i) const { return kFull ? cos2[i] : cos1[i]; }
  __device__ Real second_sin(int i) const { return kFull ? sin2[i] : sin1[i]; }

  // The transposed rotation.
  __device__ void conjugate() {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const Real first = sin1[i];
      sin1[i] = -second_sin(i);
      if (kFull) sin2[i] = -first;
    }
  }
};

struct Token {
  int batch;
  int index;
};

template <class Entry, class Real, int kCount>
__device__ void read_entries(const void* data, int64_t at, bool vector, Real (&out)[kCount]) {
  const Entry* entries = static_cast<const Entry*>(data) + at;
  constexpr int kChunk = kCount * sizeof(Entry) < 16 ? kCount : 16 / sizeof(Entry);
  if (!vector) {
    for (int i = 0; i < kCount; ++i) out[i] = static_cast<Real>(entries[i]);
    return;
  }
#pragma unroll
  for (int c = 0; c < kCount / kChunk; ++c) {
    const auto chunk = *reinterpret_cast<const Vec<Entry, kChunk>*>(entries + c * kChunk);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) out[c * kChunk + i] = static_cast<Real>(chunk.get(i));
  }
}

// kCount neighbouring entries of a table; vector: their address is a multiple of their size, or of 16 bytes.
template <class Real, int kCount>
__device__ void read_table(const RopeTable& table, DType dtype, int64_t at, bool vector, Real (&out)[kCount]) {
  switch (dtype) {
    case DType::kFloat64:
      return read_entries<double>(table.data, at, vector, out);
    case DType::kBFloat16:
      return read_entries<__nv_bfloat16>(table.data, at, vector, out);
    case DType::kFloat16:
      return read_entries<__half>(table.data, at, vector, out);
    default:
      return read_entries<float>(table.data, at, vector, out);
  }
}

__device__ inline int64_t read_position(const RopeParams& p, int64_t row, Token token) {
  return p.position_ids[row * p.position_row + token.batch * p.position_batch + token.index * p.position_token];
}

// A position outside the cache is reported and taken as 0.
__device__ inline int64_t checked_position(const RopeParams& p, int64_t position, int64_t row, Token token,
                                           const FaultFlag& fault) {
  if (position >= 0 && position < p.max_positions) return position;
  const int64_t batch = p.position_batches == 1 ? 0 : token.batch;
  fault.raise(Fault::kPositionOutside, (row * p.position_batches + batch) * p.seqlen + token.index);
  return 0;
}

__device__ inline int64_t table_offset(const RopeTable& table, bool cached, int64_t position, int64_t row,
                                       Token token) {
  return cached ? position * table.token : row * table.row + token.batch * table.batch + token.index * table.token;
}

// kPairs neighbouring pairs of one token, all from one row of angles.
template <bool kInterleaved, class Real, int kPairs, bool kFull>
__device__ void load_run(const RopeParams& p, int64_t cos_at, int64_t sin_at, int first_pair, bool vector,
                         Angles<Real, kPairs, kFull>& angles) {
  if constexpr (!kFull) {
    read_table(p.cos, p.table_dtype, cos_at + first_pair, vector, angles.cos1);
    read_table(p.sin, p.table_dtype, sin_at + first_pair, vector, angles.sin1);
  } else if (!kInterleaved || !p.full_table) {
    const int apart = p.full_table ? static_cast<int>(p.rotary_dim / 2) : 0;
    read_table(p.cos, p.table_dtype, cos_at + first_pair, vector, angles.cos1);
    read_table(p.sin, p.table_dtype, sin_at + first_pair, vector, angles.sin1);
    read_table(p.cos, p.table_dtype, cos_at + first_pair + apart, vector, angles.cos2);
    read_table(p.sin, p.table_dtype, sin_at + first_pair + apart, vector, angles.sin2);
  } else {
    Real both[2 * kPairs];
    read_table(p.cos, p.table_dtype, cos_at + 2 * first_pair, vector, both);
    for (int i = 0; i < kPairs; ++i) angles.cos1[i] = both[2 * i], angles.cos2[i] = both[2 * i + 1];
    read_table(p.sin, p.table_dtype, sin_at + 2 * first_pair, vector, both);
    for (int i = 0; i < kPairs; ++i) angles.sin1[i] = both[2 * i], angles.sin2[i] = both[2 * i + 1];
  }
}

// `position`: what read_position gave for the token, if there is one section.
template <bool kInterleaved, class Real, int kPairs, bool kFull>
__device__ void load_angles(const RopeParams& p, Token token, int first_pair, int64_t position, bool vector,
                            const FaultFlag& fault, Angles<Real, kPairs, kFull>& angles) {
  const bool cached = p.position_ids.data != nullptr;
  if (p.num_sections == 1) {
    if (cached) position = checked_position(p, position, 0, token, fault);
    load_run<kInterleaved>(p, table_offset(p.cos, cached, position, 0, token),
                           table_offset(p.sin, cached, position, 0, token), first_pair, vector, angles);
  } else {
    // Sections may end anywhere, so pair by pair.
    int section = 0;
    for (int i = 0; i < kPairs; ++i) {
      while (section + 1 < p.num_sections && first_pair + i >= p.section_ends[section]) ++section;
      const int64_t row = section % p.rows;
      const int64_t row_pos = cached ? checked_position(p, read_position(p, row, token), row, token, fault) : 0;
      Angles<Real, 1, true> one;
      load_run<kInterleaved>(p, table_offset(p.cos, cached, row_pos, row, token),
                             table_offset(p.sin, cached, row_pos, row, token), first_pair + i, false, one);
      angles.cos1[i] = one.cos1[0];
      angles.sin1[i] = one.sin1[0];
      if (kFull) angles.cos2[i] = one.cos2[0], angles.sin2[i] = one.sin2[0];
    }
  }
  if (p.conjugate) angles.conjugate();
}

// What one lane moves at a time: kVec elements of the first half and kVec of the second, or kVec / 2 whole pairs.
template <class T, int kVec, bool kInterleaved>
struct Item {
  static constexpr int kPairs = kInterleaved ? (kVec + 1) / 2 : kVec;
  static constexpr int kLoads = kInterleaved && kVec > 1 ? 1 : 2;
  using Vector = Vec<T, kVec>;
  Vector half[kLoads];

  // Element offset of load `l` inside the head.
  __device__ static int offset(int item, int l, int rotary_half) {
    if constexpr (!kInterleaved) return item * kVec + l * rotary_half;
    return kVec > 1 ? item * kVec : 2 * item + l;
  }

  template <class Real>
  struct Rotated {
    Real first, second;
  };

  template <class Real, bool kFull>
  __device__ Rotated<Real> rotated(const Angles<Real, kPairs, kFull>& a, int i, Real first, Real second) const {
    return {fused(first, a.cos1[i], -product(second, a.sin1[i])),
            fused(second, a.second_cos(i), product(first, a.second_sin(i)))};
  }

  template <class Real, bool kFull>
  __device__ void rotate(const Angles<Real, kPairs, kFull>& a) {
    if constexpr (kVec == 1) {
      const auto y = rotated(a, 0, half[0].get(0), half[1].get(0));
      half[0].set(0, y.first);
      half[1].set(0, y.second);
    } else if constexpr (kInterleaved) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const auto y = rotated(a, i, half[0].get(2 * i), half[0].get(2 * i + 1));
        half[0].set_pair(2 * i, y.first, y.second);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; i += 2) {
        const auto y = rotated(a, i, half[0].get(i), half[1].get(i));
        const auto z = rotated(a, i + 1, half[0].get(i + 1), half[1].get(i + 1));
        half[0].set_pair(i, y.first, z.first);
        half[1].set_pair(i, y.second, z.second);
      }
    }
  }
};

template <class T>
__device__ const T* head_in(const RopeHeads& x, Token token, int64_t head) {
  return static_cast<const T*>(x.in) + token.batch * x.in_batch + token.index * x.in_token + head * x.in_head;
}

template <class T>
__device__ T* head_out(const RopeHeads& x, Token token, int64_t head) {
  return static_cast<T*>(x.out) + token.batch * x.out_batch + token.index * x.out_token + head * x.out_head;
}

// The elements that partial rotary does not change.
template <class T, int kLanes>
__device__ void copy_rest(const RopeParams& p, const RopeHeads& x, Token token, int lane) {
  const int rest = static_cast<int>(p.head_dim - p.rotary_dim);
  if (rest == 0 || x.in == x.out) return;
  for (int64_t i = lane; i < x.num_heads * rest; i += kLanes) {
    const int64_t head = i / rest;
    const int64_t at = p.rotary_dim + i % rest;
    head_out<T>(x, token, head)[at] = head_in<T>(x, token, head)[at];
  }
}

// The token of this thread, when kLanes neighbouring threads share one.
template <int kLanes>
__device__ inline bool find_token(const RopeParams& p, Token& token) {
  const int64_t slot = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  if (slot >= p.batch * p.seqlen) return false;
  const int seqlen = static_cast<int>(p.seqlen);
  token = p.batch == 1 ? Token{0, static_cast<int>(slot)}
                       : Token{static_cast<int>(slot / seqlen), static_cast<int>(slot % seqlen)};
  return true;
}

__device__ inline int64_t position_of(const RopeParams& p, Token token) {
  return p.position_ids.data && p.num_sections == 1 ? read_position(p, 0, token) : 0;
}

template <class T, class Work>
__device__ void load_item(Work& work, const T* head, int item_in_head, int rotary_half) {
#pragma unroll
  for (int l = 0; l < Work::kLoads; ++l) {
    work.half[l] = *reinterpret_cast<const typename Work::Vector*>(head + Work::offset(item_in_head, l, rotary_half));
  }
}

template <class T, class Work>
__device__ void store_item(const Work& work, T* head, int item_in_head, int rotary_half) {
#pragma unroll
  for (int l = 0; l < Work::kLoads; ++l) {
    *reinterpret_cast<typename Work::Vector*>(head + Work::offset(item_in_head, l, rotary_half)) = work.half[l];
  }
}

// The usual case: a head has no more items than lanes. A lane meets the same pairs in every head of q and k and has
// their angles in registers; lanes left over are idle. kUnroll: heads whose loads a lane has under way together.
template <class T, int kVec, bool kInterleaved, bool kFull, int kUnroll, int kLanes>
__global__ void __launch_bounds__(kThreads, kUnroll <= 2 ? 14 : 10)
    rope_qk_kernel(RopeParams p, bool vector_tables, FaultFlag fault) {
  using Work = Item<T, kVec, kInterleaved>;
  Token token;
  if (!find_token<kLanes>(p, token)) return;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int rotary_half = static_cast<int>(p.rotary_dim / 2);
  const int items_per_head = rotary_half / Work::kPairs;
  const int item_in_head = lane % items_per_head;
  const int heads_per_step = kLanes / items_per_head;
  const int q_heads = static_cast<int>(p.q.num_heads);
  const int num_heads = q_heads + static_cast<int>(p.k.num_heads);
  const int64_t position = position_of(p, token);  // on its way while the first heads are loaded
  Angles<accumulate_t<T>, Work::kPairs, kFull> angles;

  const int own_first = lane / items_per_head;
  const int end = own_first < heads_per_step ? num_heads : 0;
  for (int first = own_first; first < end; first += heads_per_step * kUnroll) {
    Work work[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int head = first + u * heads_per_step;
      if (head >= num_heads) continue;
      const T* in = head < q_heads ? head_in<T>(p.q, token, head) : head_in<T>(p.k, token, head - q_heads);
      load_item(work[u], in, item_in_head, rotary_half);
    }
    if (first == own_first) {
      load_angles<kInterleaved>(p, token, item_in_head * Work::kPairs, position, vector_tables, fault, angles);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int head = first + u * heads_per_step;
      if (head >= num_heads) continue;
      work[u].rotate(angles);
      T* out = head < q_heads ? head_out<T>(p.q, token, head) : head_out<T>(p.k, token, head - q_heads);
      store_item(work[u], out, item_in_head, rotary_half);
    }
  }
  copy_rest<T, kLanes>(p, p.q, token, lane);
  copy_rest<T, kLanes>(p, p.k, token, lane);
}

// Any head_dim, stride and alignment, one item at a time.
template <class T, int kVec, bool kInterleaved>
__global__ void __launch_bounds__(kThreads) rope_qk_any_kernel(RopeParams p, bool vector_tables, FaultFlag fault) {
  using Work = Item<T, kVec, kInterleaved>;
  Token token;
  if (!find_token<kWarp>(p, token)) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int rotary_half = static_cast<int>(p.rotary_dim / 2);
  const int items_per_head = rotary_half / Work::kPairs;
  const int64_t position = position_of(p, token);
  for (const RopeHeads* x : {&p.q, &p.k}) {
    for (int item = lane; item < static_cast<int>(x->num_heads) * items_per_head; item += kWarp) {
      const int item_in_head = item % items_per_head;
      Work work;
      Angles<accumulate_t<T>, Work::kPairs, true> angles;
      load_item(work, head_in<T>(*x, token, item / items_per_head), item_in_head, rotary_half);
      load_angles<kInterleaved>(p, token, item_in_head * Work::kPairs, position, vector_tables, fault, angles);
      work.rotate(angles);
      store_item(work, head_out<T>(*x, token, item / items_per_head), item_in_head, rotary_half);
    }
    copy_rest<T, kWarp>(p, *x, token, lane);
  }
}

// Every address that a vector touches is a multiple of its size.
bool aligned(const RopeHeads& x, int64_t bytes, int64_t vec_bytes) {
  if (x.num_heads == 0) return true;
  const int64_t strides[] = {x.in_batch, x.in_token, x.in_head, x.out_batch, x.out_token, x.out_head};
  for (int64_t stride : strides) {
    if (stride * bytes % vec_bytes != 0) return false;
  }
  return reinterpret_cast<uintptr_t>(x.in) % vec_bytes == 0 && reinterpret_cast<uintptr_t>(x.out) % vec_bytes == 0;
}

bool vector_tables(const RopeParams& p) {
  for (const RopeTable* table : {&p.cos, &p.sin}) {
    const int64_t bytes = p.table_dtype == DType::kFloat64 ? 8 : p.table_dtype == DType::kFloat32 ? 4 : 2;
    for (int64_t offset : {table->row, table->batch, table->token, p.rotary_dim / 2}) {
      if (offset * bytes % 16 != 0) return false;
    }
    if (reinterpret_cast<uintptr_t>(table->data) % 16 != 0) return false;
  }
  return true;
}

template <class Kernel>
void launch_kernel(Kernel kernel, const RopeParams& p, const CudaLaunch& launch, int lanes = kWarp) {
  const int64_t blocks = ceil_div(p.batch * p.seqlen, kThreads / lanes);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(launch)>>>(p, vector_tables(p), launch.fault);
  check_launch("rope_qk_kernel");
}

template <class T, bool kInterleaved>
void launch_vectors(const RopeParams& p, const CudaLaunch& launch) {
  constexpr int kVec = 16 / sizeof(T);
  const int64_t items_per_head = p.rotary_dim / 2 / Item<T, kVec, kInterleaved>::kPairs;
  const bool usual = items_per_head >= 1 && items_per_head <= kWarp;
  if (!usual) return launch_kernel(rope_qk_any_kernel<T, kVec, kInterleaved>, p, launch);
  // Few heads: two tokens share a warp, so that the chain from position to angles is paid for twice the bytes.
  constexpr int kHalf = kWarp / 2;
  const bool few = items_per_head <= kHalf && (p.q.num_heads + p.k.num_heads) * items_per_head <= 4 * kHalf;
  if (few) {
    launch_kernel(p.full_table ? rope_qk_kernel<T, kVec, kInterleaved, true, 2, kHalf>
                               : rope_qk_kernel<T, kVec, kInterleaved, false, 2, kHalf>,
                  p, launch, kHalf);
  } else {
    launch_kernel(p.full_table ? rope_qk_kernel<T, kVec, kInterleaved, true, 4, kWarp>
                               : rope_qk_kernel<T, kVec, kInterleaved, false, 4, kWarp>,
                  p, launch);
  }
}

template <class T>
void launch_rope(const RopeParams& p, const CudaLaunch& launch) {
  constexpr int64_t kVec = 16 / sizeof(T);
  const int64_t step = p.interleaved ? kVec : 2 * kVec;  // rotary elements that an item covers
  const bool vector = p.rotary_dim % step == 0 && aligned(p.q, sizeof(T), kVec * sizeof(T)) &&
                      aligned(p.k, sizeof(T), kVec * sizeof(T));
  // float64 is for checks: its fast kernels would take as long to compile as any other dtype's.
  if constexpr (!std::is_same_v<T, double>) {
    if (vector) return p.interleaved ? launch_vectors<T, true>(p, launch) : launch_vectors<T, false>(p, launch);
  }
  launch_kernel(p.interleaved ? rope_qk_any_kernel<T, 1, true> : rope_qk_any_kernel<T, 1, false>, p, launch);
}

}  // namespace

void launch_rope_qk_cuda(const RopeParams& p, const CudaLaunch& launch) {
  if (p.batch * p.seqlen == 0) return;
  switch (p.dtype) {
    case DType::kBFloat16:
      return launch_rope<__nv_bfloat16>(p, launch);
    case DType::kFloat16:
      return launch_rope<__half>(p, launch);
    case DType::kFloat64:
      return launch_rope<double>(p, launch);
    default:
      return launch_rope<float>(p, launch);
  }
}

}  // namespace packing_ops
