#pragma once

#ifdef __CUDACC__
#define PACKING_OPS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PACKING_OPS_HOST_DEVICE inline
#endif

// One body, compiled for several x86-64 levels and picked when the library loads: the wheel stays portable.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define PACKING_OPS_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PACKING_OPS_MULTIVERSION
#endif
#define PACKING_OPS_INLINE inline __attribute__((always_inline))
