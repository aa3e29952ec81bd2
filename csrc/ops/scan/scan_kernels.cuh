// The kernels of gated_delta_rule and mamba2_scan, each in a file of its name.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/scan/scan_chunks.cuh"
#include "ops/scan/scan_tile.cuh"

namespace packing_ops::scan {

// Throws where this GPU does not have the shared memory.
void allow_shared(const void* kernel, int bytes);
bool has_shared(int bytes);

constexpr int kSmallestShared = 99 << 10;  // of the GPUs that are served

// call(whether the op corrects) as a constant.
template <class Call>
void dispatch_corrects(const ScanParams& p, const Call& call) {
  if (p.corrects) return call(std::true_type{});
  call(std::false_type{});
}

// call(stages) as a constant: two where the shared memory is there, so that copies overlap with products. float32 has
// one: it is served, not tuned.
template <class T, int kBytesOfTwo, class Call>
void dispatch_stages(const Call& call) {
  if constexpr (sizeof(T) == 4) {
    call(std::integral_constant<int, 1>{});
  } else if constexpr (kBytesOfTwo <= kSmallestShared) {
    call(std::integral_constant<int, 2>{});
  } else {
    if (has_shared(kBytesOfTwo)) return call(std::integral_constant<int, 2>{});
    call(std::integral_constant<int, 1>{});
  }
}

template <class T>
void launch_prepare(const ScanParams& p, const Chunks& chunks, const CudaLaunch& launch);

// Forward: out and final_state. Or, to keep for the backward: chunks.states and, where the op corrects,
// chunks.corrected.
template <class T>
void launch_walk(const ScanParams& p, const Chunks& chunks, bool keep, const CudaLaunch& launch);

// dv, dinitial_state, chunks.dstates and, where the op corrects, chunks.dcorrected.
template <class T>
void launch_walk_back(const ScanBackwardParams& p, const Chunks& chunks, const CudaLaunch& launch);

// dq, dk, dg, dbeta and, where the op does not correct, dskip.
template <class T>
void launch_gradients(const ScanBackwardParams& p, const Chunks& chunks, const CudaLaunch& launch);

}  // namespace packing_ops::scan
