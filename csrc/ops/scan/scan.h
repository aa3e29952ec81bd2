// gated_delta_rule: linear attention whose state forgets, and corrects what it holds for a key.
#pragma once

#include <cstdint>

#include "core/documents.h"
#include "core/dtype.h"
#include "core/launch.h"

namespace packing_ops {

// Chunks are counted from a document's first token, so that a row's bits depend on its document alone.
constexpr int64_t kScanChunk = 64;

// Rows of heads: [total, heads, dim], last dimension contiguous, strides in elements.
struct HeadRows {
  const void* data = nullptr;
  int64_t token = 0, head = 0;
};

// With S = 0 or the initial state before a document's first token, for each of its tokens and each head of v
//   S = exp(g) S
//   S = S + k (beta (v - S^T k))^T
//   out = scale S^T q
// Head h of v has head h / (num_v_heads / num_k_heads) of q and k. Slots after the last document get zeros.
// `Sums` below is float64 for float64 tensors, else float32.
struct GatedDeltaParams {
  Documents documents;
  DType dtype = DType::kFloat32;  // of q, k, v and out
  int64_t num_k_heads = 0;        // of q too
  int64_t num_v_heads = 0;
  int64_t head_dim = 0;  // of q and k
  int64_t head_dim_v = 0;
  double scale = 1;
  bool l2norm = false;  // q and k are divided by sqrt(their sum of squares + kNormEpsilon) first
  HeadRows q, k, v;
  const void* g = nullptr;              // Sums [total, num_v_heads]
  const void* beta = nullptr;           // like g
  const void* initial_state = nullptr;  // Sums [num_documents, num_v_heads, head_dim, head_dim_v], or null
  void* out = nullptr;                  // [total, num_v_heads, head_dim_v]
  void* final_state = nullptr;          // like initial_state, or null
  void* scratch = nullptr;              // CUDA only
};

constexpr double kNormEpsilon = 1e-6;

struct GatedDeltaBackwardParams : GatedDeltaParams {
  HeadRows dout;                       // like out
  const void* dfinal_state = nullptr;  // or null
  void* dq = nullptr;                  // [total, num_k_heads, head_dim]
  void* dk = nullptr;
  void* dv = nullptr;              // [total, num_v_heads, head_dim_v]
  void* dg = nullptr;              // like g
  void* dbeta = nullptr;           // like g
  void* dinitial_state = nullptr;  // or null
};

void launch_gated_delta_rule_cpu(const GatedDeltaParams& p);
void launch_gated_delta_rule_cuda(const GatedDeltaParams& p, const CudaLaunch& launch);
int64_t gated_delta_rule_scratch_bytes(const GatedDeltaParams& p);

void launch_gated_delta_rule_backward_cpu(const GatedDeltaBackwardParams& p);
void launch_gated_delta_rule_backward_cuda(const GatedDeltaBackwardParams& p, const CudaLaunch& launch);
int64_t gated_delta_rule_backward_scratch_bytes(const GatedDeltaParams& p);

}  // namespace packing_ops
