// Vectors of elements, moved as one access.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "core/accumulate.h"

namespace packing_ops {

__device__ inline float2 unpack(const __nv_bfloat162& pair) {
  return __bfloat1622float2(pair);
}
__device__ inline float2 unpack(const __half2& pair) {
  return __half22float2(pair);
}
__device__ inline void pack(float2 values, __nv_bfloat162& pair) {
  pair = __float22bfloat162_rn(values);
}
__device__ inline void pack(float2 values, __half2& pair) {
  pair = __float22half2_rn(values);
}

// kVec neighbouring elements, moved as one. Two halves of 16 bits stay in one register until they are computed with.
template <class T, int kVec, bool kPairs = (sizeof(T) == 2 && kVec > 1)>
struct alignas(sizeof(T) * kVec) Vec {
  T at[kVec];
  __device__ accumulate_t<T> get(int i) const { return static_cast<accumulate_t<T>>(at[i]); }
  __device__ void set(int i, accumulate_t<T> value) { at[i] = static_cast<T>(value); }
  __device__ void set_pair(int i, accumulate_t<T> first, accumulate_t<T> second) {
    set(i, first);
    set(i + 1, second);
  }
};

template <class T, int kVec>
struct alignas(sizeof(T) * kVec) Vec<T, kVec, true> {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  unsigned word[kVec / 2];
  __device__ float get(int i) const {
    const float2 both = unpack(reinterpret_cast<const Pair&>(word[i / 2]));
    return i % 2 == 0 ? both.x : both.y;
  }
  __device__ void set_pair(int i, float first, float second) {
    pack(float2{first, second}, reinterpret_cast<Pair&>(word[i / 2]));
  }
};

// Neighbouring elements of a row, rounded to T, as one access.
template <class T, int kVec>
__device__ __forceinline__ void store_row(const float (&values)[kVec], T* to) {
  Vec<T, kVec> x;
  if constexpr (kVec == 1) {
    x.set(0, values[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kVec; i += 2) x.set_pair(i, values[i], values[i + 1]);
  }
  *reinterpret_cast<Vec<T, kVec>*>(to) = x;
}

}  // namespace packing_ops
