// A warp rotates every head of q and k of one token: the angles are read once and stay in registers. Same formula as
// rope_cpu.cpp, with the roundings spelled out, so that every layout, batch and packing gives the same bits.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "core/launch.cuh"
#include "ops/rope/rope.h"

namespace packing_ops {

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kUnroll = 4;  // vectors of each half in flight per lane

template <class T>
using real_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T, int kVec>
struct alignas(sizeof(T) * kVec) Vec {
  T at[kVec];
};

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

// cos and sin of kPairs neighbouring pairs, for the first and the second element of each.
template <class Real, int kPairs>
struct Angles {
  Real cos1[kPairs], sin1[kPairs], cos2[kPairs], sin2[kPairs];
};

struct Token {
  int64_t batch;
  int64_t index;
};

template <class Real>
__device__ Real table_entry(const RopeTable& table, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kFloat64:
      return static_cast<Real>(static_cast<const double*>(table.data)[at]);
    case DType::kBFloat16:
      return static_cast<Real>(static_cast<float>(static_cast<const __nv_bfloat16*>(table.data)[at]));
    case DType::kFloat16:
      return static_cast<Real>(static_cast<float>(static_cast<const __half*>(table.data)[at]));
    default:
      return static_cast<Real>(static_cast<const float*>(table.data)[at]);
  }
}

// A position outside the cache is reported and read as 0.
__device__ inline int64_t position_of(const RopeParams& p, int64_t row, Token token, const FaultFlag& fault) {
  const int64_t position =
      p.position_ids[row * p.position_row + token.batch * p.position_batch + token.index * p.position_token];
  if (position >= 0 && position < p.max_positions) return position;
  fault.raise(Fault::kPositionOutside, (row * p.position_batches + token.batch) * p.seqlen + token.index);
  return 0;
}

__device__ inline int64_t table_offset(const RopeTable& table, bool cached, int64_t position, int64_t row,
                                       Token token) {
  return cached ? position * table.token : row * table.row + token.batch * table.batch + token.index * table.token;
}

// Pairs first_pair ... of one token. Tables are read entry by entry: they are small and stay in the cache.
template <int kPairs, bool kInterleaved, class Real>
__device__ void load_angles(const RopeParams& p, Token token, int first_pair, const FaultFlag& fault,
                            Angles<Real, kPairs>& angles) {
  const bool cached = p.position_ids.data != nullptr;
  int64_t row = -1;
  int64_t cos_at = 0;
  int64_t sin_at = 0;
  int section = 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int pair = first_pair + i;
    while (section + 1 < p.num_sections && pair >= p.section_ends[section]) ++section;
    if (section % p.rows != row) {
      row = section % p.rows;
      const int64_t position = cached ? position_of(p, row, token, fault) : 0;
      cos_at = table_offset(p.cos, cached, position, row, token);
      sin_at = table_offset(p.sin, cached, position, row, token);
    }
    const int one = p.full_table && kInterleaved ? 2 * pair : pair;
    const int two = !p.full_table ? pair : kInterleaved ? 2 * pair + 1 : pair + static_cast<int>(p.rotary_dim / 2);
    angles.cos1[i] = table_entry<Real>(p.cos, p.table_dtype, cos_at + one);
    angles.sin1[i] = table_entry<Real>(p.sin, p.table_dtype, sin_at + one);
    angles.cos2[i] = two == one ? angles.cos1[i] : table_entry<Real>(p.cos, p.table_dtype, cos_at + two);
    angles.sin2[i] = two == one ? angles.sin1[i] : table_entry<Real>(p.sin, p.table_dtype, sin_at + two);
    if (p.conjugate) {
      const Real first = angles.sin1[i];
      angles.sin1[i] = -angles.sin2[i];
      angles.sin2[i] = -first;
    }
  }
}

// What one lane moves at a time: kVec elements of the first half and kVec of the second, or kVec / 2 whole pairs.
template <class T, int kVec, bool kInterleaved>
struct Item {
  static constexpr int kPairs = kInterleaved ? (kVec + 1) / 2 : kVec;
  static constexpr int kLoads = kInterleaved && kVec > 1 ? 1 : 2;
  Vec<T, kVec> half[kLoads];

  // Element offset of load `l` inside the head.
  __device__ static int offset(int item, int l, int rotary_half) {
    if constexpr (!kInterleaved) return item * kVec + l * rotary_half;
    return kVec > 1 ? item * kVec : 2 * item + l;
  }

  template <class Real>
  __device__ void rotate(const Angles<Real, kPairs>& a) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      T& x1 = kInterleaved && kVec > 1 ? half[0].at[(2 * i) % kVec] : half[0].at[i % kVec];
      T& x2 = kInterleaved && kVec > 1 ? half[0].at[(2 * i + 1) % kVec] : half[kLoads - 1].at[i % kVec];
      const Real first = static_cast<Real>(x1);
      const Real second = static_cast<Real>(x2);
      x1 = static_cast<T>(fused(first, a.cos1[i], -product(second, a.sin1[i])));
      x2 = static_cast<T>(fused(second, a.cos2[i], product(first, a.sin2[i])));
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

// The elements that partial rotary leaves alone.
template <class T>
__device__ void copy_rest(const RopeParams& p, const RopeHeads& x, Token token, int lane) {
  const int rest = static_cast<int>(p.head_dim - p.rotary_dim);
  if (rest == 0 || x.in == x.out) return;
  for (int64_t i = lane; i < x.num_heads * rest; i += kWarp) {
    const int64_t head = i / rest;
    const int64_t at = p.rotary_dim + i % rest;
    head_out<T>(x, token, head)[at] = head_in<T>(x, token, head)[at];
  }
}

// kSameAngles: 32 is a multiple of the items per head, so a lane meets the same pairs in every head.
template <class T, int kVec, bool kInterleaved, bool kSameAngles>
__global__ void __launch_bounds__(kThreads) rope_qk_kernel(RopeParams p, FaultFlag fault) {
  using Work = Item<T, kVec, kInterleaved>;
  using Real = real_t<T>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t slot = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (slot >= p.batch * p.seqlen) return;
  const Token token{slot / p.seqlen, slot % p.seqlen};
  const int rotary_half = static_cast<int>(p.rotary_dim / 2);
  const int items_per_head = rotary_half / Work::kPairs;
  const int num_items = static_cast<int>(p.q.num_heads + p.k.num_heads) * items_per_head;

  Angles<Real, Work::kPairs> angles;
  if (kSameAngles)
    load_angles<Work::kPairs, kInterleaved>(p, token, lane % items_per_head * Work::kPairs, fault, angles);

  for (int base = lane; base < num_items; base += kWarp * kUnroll) {
    Work work[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int item = base + u * kWarp;
      if (item >= num_items) break;
      const int head = item / items_per_head;
      const bool is_q = head < p.q.num_heads;
      const T* in = is_q ? head_in<T>(p.q, token, head) : head_in<T>(p.k, token, head - p.q.num_heads);
#pragma unroll
      for (int l = 0; l < Work::kLoads; ++l) {
        const int at = Work::offset(item % items_per_head, l, rotary_half);
        work[u].half[l] = *reinterpret_cast<const Vec<T, kVec>*>(in + at);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int item = base + u * kWarp;
      if (item >= num_items) break;
      const int head = item / items_per_head;
      const int in_head = item % items_per_head;
      if (!kSameAngles) load_angles<Work::kPairs, kInterleaved>(p, token, in_head * Work::kPairs, fault, angles);
      work[u].rotate(angles);
      const bool is_q = head < p.q.num_heads;
      T* out = is_q ? head_out<T>(p.q, token, head) : head_out<T>(p.k, token, head - p.q.num_heads);
#pragma unroll
      for (int l = 0; l < Work::kLoads; ++l) {
        const int at = Work::offset(in_head, l, rotary_half);
        *reinterpret_cast<Vec<T, kVec>*>(out + at) = work[u].half[l];
      }
    }
  }
  copy_rest<T>(p, p.q, token, lane);
  copy_rest<T>(p, p.k, token, lane);
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

template <class T, int kVec, bool kInterleaved>
void launch_items(const RopeParams& p, const CudaLaunch& launch) {
  constexpr int kPairs = Item<T, kVec, kInterleaved>::kPairs;
  const int64_t items_per_head = p.rotary_dim / 2 / kPairs;
  const bool same = items_per_head > 0 && kWarp % items_per_head == 0;
  const auto kernel = same ? rope_qk_kernel<T, kVec, kInterleaved, true> : rope_qk_kernel<T, kVec, kInterleaved, false>;
  const int64_t blocks = ceil_div(p.batch * p.seqlen, kThreads / kWarp);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  check_launch("rope_qk_kernel");
}

template <class T>
void launch_rope(const RopeParams& p, const CudaLaunch& launch) {
  constexpr int kVec = 16 / sizeof(T);
  const int64_t step = p.interleaved ? kVec : 2 * kVec;  // rotary elements that an item covers
  const bool vector = p.rotary_dim % step == 0 && aligned(p.q, sizeof(T), 16) && aligned(p.k, sizeof(T), 16);
  if (p.interleaved) {
    vector ? launch_items<T, kVec, true>(p, launch) : launch_items<T, 1, true>(p, launch);
  } else {
    vector ? launch_items<T, kVec, false>(p, launch) : launch_items<T, 1, false>(p, launch);
  }
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
