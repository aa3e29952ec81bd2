// Inline assembly of sm_90a: wgmma of a warpgroup, d [64, N] += a [64, 16] b [16, N], accumulated in fp32.
// Warp w of the four holds rows 16 w to 16 w + 15 of d, in the layout of mma.sync's 16x8 blocks, and so it holds those
// of an a in registers.
#pragma once

#include <type_traits>

#include "core/ptx/mma.cuh"

namespace packing_ops::ptx {

// Descriptor of a matrix in shared memory: panels of 64 columns, a row 128 bytes whose 16-byte chunks are swizzled by
// the row. `panel`: bytes from one panel to the next, for wgmma that sums over rows and reads both.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t panel = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | static_cast<uint64_t>(panel >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// The descriptor of the matrix that starts `bytes` bytes further on.
__device__ __forceinline__ uint64_t advance_descriptor(uint64_t descriptor, int bytes) {
  return descriptor + static_cast<uint64_t>(bytes >> 4);
}

// Before the first wgmma, and after other instructions wrote registers that wgmma uses.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of this warp's groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Waits for all of them, after the arithmetic before it. ptxas moves a wait before the arithmetic of its basic block,
// which then does not overlap wgmma. So it follows a branch. `positive` is above 0 in every thread, which the
// compiler does not know: .aligned asks that all threads of the warpgroup take the same branch.
__device__ __forceinline__ void wgmma_wait_group_after(int positive) {
  if (positive > 0) {
    asm volatile("wgmma.wait_group.sync.aligned 0;  // positive" ::: "memory");  // unequal, or the compiler joins them
  } else {
    asm volatile("wgmma.wait_group.sync.aligned 0;  // never" ::: "memory");
  }
}

// After a wait: keeps the compiler from reading these accumulators before it.
template <int kCount>
__device__ __forceinline__ void fence_operands(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// What depends on x is worked out after this point, not before a loop around it, over which registers would
// hold it.
__device__ __forceinline__ void no_hoist(int32_t& x) {
  asm volatile("" : "+r"(x));
}

// clang-format off: SUMS_OF_N lists a thread's sums of N columns as operands, REGISTERS_N names them in the instruction.
#define PACKING_OPS_SUMS_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define PACKING_OPS_SUMS_32(i) \
  PACKING_OPS_SUMS_8(i), PACKING_OPS_SUMS_8(i + 8), PACKING_OPS_SUMS_8(i + 16), PACKING_OPS_SUMS_8(i + 24)
#define PACKING_OPS_SUMS_OF_32 PACKING_OPS_SUMS_8(0), PACKING_OPS_SUMS_8(8)
#define PACKING_OPS_REGISTERS_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define PACKING_OPS_REGISTERS_64 PACKING_OPS_REGISTERS_32 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PACKING_OPS_SUMS_OF_64 PACKING_OPS_SUMS_32(0)
#define PACKING_OPS_REGISTERS_96 PACKING_OPS_REGISTERS_64 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define PACKING_OPS_SUMS_OF_96 PACKING_OPS_SUMS_OF_64, PACKING_OPS_SUMS_8(32), PACKING_OPS_SUMS_8(40)
#define PACKING_OPS_REGISTERS_128 PACKING_OPS_REGISTERS_96 \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PACKING_OPS_SUMS_OF_128 PACKING_OPS_SUMS_OF_64, PACKING_OPS_SUMS_32(32)
#define PACKING_OPS_REGISTERS_192 PACKING_OPS_REGISTERS_128 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PACKING_OPS_SUMS_OF_192 PACKING_OPS_SUMS_OF_128, PACKING_OPS_SUMS_32(64)
#define PACKING_OPS_REGISTERS_256 PACKING_OPS_REGISTERS_192 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PACKING_OPS_SUMS_OF_256 PACKING_OPS_SUMS_OF_192, PACKING_OPS_SUMS_32(96)

// The operands after the sums: whether to add to them, whether b is transposed, then a and b.
#define PACKING_OPS_WGMMA(N, TYPE, ADD, OPERANDS, ...) \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, " ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE \
               " {" PACKING_OPS_REGISTERS_##N "}, " OPERANDS "; }" : PACKING_OPS_SUMS_OF_##N : __VA_ARGS__)
#define PACKING_OPS_WGMMAS(N, T, TYPE, ADD, BOTH_IN_SHARED, A_IN_REGISTERS) \
  template <class Element, bool kTrans, bool kTransA = false> requires std::is_same_v<Element, T> \
  __device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) { \
    PACKING_OPS_WGMMA(N, TYPE, ADD, BOTH_IN_SHARED, "r"(static_cast<int>(add)), "n"(kTrans), "l"(a), "l"(b), "n"(kTransA)); \
  } \
  template <class Element, bool kTrans> requires std::is_same_v<Element, T> \
  __device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add) { \
    PACKING_OPS_WGMMA(N, TYPE, ADD, A_IN_REGISTERS, "r"(static_cast<int>(add)), "n"(kTrans), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
  }

// wgmma<T, kTrans, kTransA>(d, a, b, add): d += a b, or d = a b. a: a descriptor, whose columns are summed over,
// with kTransA whose rows; or registers. b: a descriptor, whose columns are summed over, with kTrans whose rows.
PACKING_OPS_WGMMAS(32, __nv_bfloat16, "bf16", "%16", "%18, %19, add, 1, 1, %20, %17", "{%18, %19, %20, %21}, %22, add, 1, 1, %17")
PACKING_OPS_WGMMAS(32, __half, "f16", "%16", "%18, %19, add, 1, 1, %20, %17", "{%18, %19, %20, %21}, %22, add, 1, 1, %17")
PACKING_OPS_WGMMAS(64, __nv_bfloat16, "bf16", "%32", "%34, %35, add, 1, 1, %36, %33", "{%34, %35, %36, %37}, %38, add, 1, 1, %33")
PACKING_OPS_WGMMAS(64, __half, "f16", "%32", "%34, %35, add, 1, 1, %36, %33", "{%34, %35, %36, %37}, %38, add, 1, 1, %33")
PACKING_OPS_WGMMAS(96, __nv_bfloat16, "bf16", "%48", "%50, %51, add, 1, 1, %52, %49", "{%50, %51, %52, %53}, %54, add, 1, 1, %49")
PACKING_OPS_WGMMAS(96, __half, "f16", "%48", "%50, %51, add, 1, 1, %52, %49", "{%50, %51, %52, %53}, %54, add, 1, 1, %49")
PACKING_OPS_WGMMAS(128, __nv_bfloat16, "bf16", "%64", "%66, %67, add, 1, 1, %68, %65", "{%66, %67, %68, %69}, %70, add, 1, 1, %65")
PACKING_OPS_WGMMAS(128, __half, "f16", "%64", "%66, %67, add, 1, 1, %68, %65", "{%66, %67, %68, %69}, %70, add, 1, 1, %65")
PACKING_OPS_WGMMAS(192, __nv_bfloat16, "bf16", "%96", "%98, %99, add, 1, 1, %100, %97", "{%98, %99, %100, %101}, %102, add, 1, 1, %97")
PACKING_OPS_WGMMAS(192, __half, "f16", "%96", "%98, %99, add, 1, 1, %100, %97", "{%98, %99, %100, %101}, %102, add, 1, 1, %97")
PACKING_OPS_WGMMAS(256, __nv_bfloat16, "bf16", "%128", "%130, %131, add, 1, 1, %132, %129", "{%130, %131, %132, %133}, %134, add, 1, 1, %129")
PACKING_OPS_WGMMAS(256, __half, "f16", "%128", "%130, %131, add, 1, 1, %132, %129", "{%130, %131, %132, %133}, %134, add, 1, 1, %129")
// clang-format on

#undef PACKING_OPS_WGMMAS
#undef PACKING_OPS_WGMMA
#undef PACKING_OPS_SUMS_OF_256
#undef PACKING_OPS_SUMS_OF_192
#undef PACKING_OPS_SUMS_OF_128
#undef PACKING_OPS_SUMS_OF_96
#undef PACKING_OPS_SUMS_OF_64
#undef PACKING_OPS_SUMS_OF_32
#undef PACKING_OPS_REGISTERS_256
#undef PACKING_OPS_REGISTERS_192
#undef PACKING_OPS_REGISTERS_128
#undef PACKING_OPS_REGISTERS_96
#undef PACKING_OPS_REGISTERS_64
#undef PACKING_OPS_REGISTERS_32
#undef PACKING_OPS_SUMS_32
#undef PACKING_OPS_SUMS_8

}  // namespace packing_ops::ptx
