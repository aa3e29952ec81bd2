// causal_conv1d: every channel of a document is convolved with its taps, looking back.
#pragma once

#include <cstdint>

#include "core/documents.h"
#include "core/dtype.h"
#include "core/launch.h"

namespace packing_ops {

constexpr int64_t kMaxConvWidth = 8;

// out[t, c] = act(bias[c] + sum over i < width of weight[c, width - 1 - i] * x[t - i, c]). What is before the
// document is in initial_state; without one those terms are left out. Slots after the last document get zeros.
struct CausalConvParams {
  Documents documents;
  DType dtype = DType::kFloat32;  // of every tensor
  int64_t channels = 0;
  int64_t width = 0;
  bool silu = false;
  const void* x = nullptr;              // [total, channels]
  int64_t x_row = 0;                    // elements from a row to the next
  const void* weight = nullptr;         // [channels, width]
  const void* bias = nullptr;           // [channels], or null
  const void* initial_state = nullptr;  // [num_documents, channels, width - 1], the newest row last, or null
  void* out = nullptr;                  // [total, channels]
  void* final_state = nullptr;          // like initial_state, or null
};

struct CausalConvBackwardParams : CausalConvParams {
  const void* dout = nullptr;  // [total, channels]
  int64_t dout_row = 0;
  const void* dfinal_state = nullptr;  // or null
  void* dx = nullptr;                  // [total, channels]
  void* dweight = nullptr;             // [channels, width]
  void* dbias = nullptr;               // [channels], or null
  void* dinitial_state = nullptr;      // or null
  float* partial = nullptr;            // CUDA only: causal_conv1d_partial_sums(total) rows [width + 1, channels]
};

// Rows of the packed row whose sums for dweight and dbias are added up first.
constexpr int64_t kConvBackwardRows = 256;
constexpr int64_t causal_conv1d_partial_sums(int64_t total) {
  return (total + kConvBackwardRows - 1) / kConvBackwardRows;
}

void launch_causal_conv1d_cpu(const CausalConvParams& p);
void launch_causal_conv1d_cuda(const CausalConvParams& p, const CudaLaunch& launch);
void launch_causal_conv1d_backward_cpu(const CausalConvBackwardParams& p);
void launch_causal_conv1d_backward_cuda(const CausalConvBackwardParams& p, const CudaLaunch& launch);

}  // namespace packing_ops
