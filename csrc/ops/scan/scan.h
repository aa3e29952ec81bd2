// gated_delta_rule and mamba2_scan: linear attention whose state forgets; the first corrects what it holds for a key.
#pragma once

#include <cstdint>

#include "core/documents.h"
#include "core/dtype.h"
#include "core/launch.h"
#include "core/macros.h"

namespace packing_ops {

// Chunks are counted from a document's first token, so that a row's bits depend only on its document.
constexpr int64_t kScanChunk = 64;

// Rows of heads: [total, heads, dim], last dimension contiguous, strides in elements.
struct HeadRows {
  const void* data = nullptr;
  int64_t token = 0, head = 0;
};

// With S = 0 or the initial state before a document's first token, for each of its tokens and each head of v
//   S = exp(g) S
//   S = S + k (beta (v - S^T k))^T, or S + k (beta v)^T without the correction
//   out = scale S^T q + skip v
// Head h of v has head h / (num_v_heads / num_k_heads) of q and k. Slots after the last document get zeros.
// In mamba2_scan, which does not correct, C, B and x are q, k and v; g and beta are made of its dt: scan_gates.h.
// `Sums` below is float64 for float64 tensors, else float32.
struct ScanParams {
  Documents documents;
  DType dtype = DType::kFloat32;  // of q, k, v and out
  bool corrects = true;
  int64_t num_k_heads = 0;  // of q too
  int64_t num_v_heads = 0;
  int64_t head_dim = 0;  // of q and k
  int64_t head_dim_v = 0;
  double scale = 1;
  bool l2norm = false;  // q and k are divided by sqrt(their sum of squares + kNormEpsilon) first
  HeadRows q, k, v;
  const void* g = nullptr;     // Sums [total, num_v_heads]; null in mamba2_scan
  const void* beta = nullptr;  // like g; dt in mamba2_scan
  // Only of mamba2_scan: beta = clamp(softplus(dt + dt_bias), dt_min, dt_max) and g = a beta.
  const void* a = nullptr;        // Sums [num_v_heads]
  const void* dt_bias = nullptr;  // like a, or null
  const void* skip = nullptr;     // like a, or null
  bool softplus = false;
  double dt_min = 0, dt_max = 0;
  // Sums [num_documents, num_v_heads, head_dim, head_dim_v], in mamba2_scan the last two the other way round; or null.
  const void* initial_state = nullptr;
  void* out = nullptr;          // [total, num_v_heads, head_dim_v]
  void* final_state = nullptr;  // like initial_state, or null
  void* scratch = nullptr;      // CUDA only

  // Numbers from a row or column of a state to the next.
  PACKING_OPS_HOST_DEVICE int64_t state_row() const { return corrects ? head_dim_v : 1; }
  PACKING_OPS_HOST_DEVICE int64_t state_column() const { return corrects ? 1 : head_dim; }
};

constexpr double kNormEpsilon = 1e-6;

struct ScanBackwardParams : ScanParams {
  HeadRows dout;                       // like out
  const void* dfinal_state = nullptr;  // or null
  void* dq = nullptr;                  // [total, num_k_heads, head_dim]
  void* dk = nullptr;
  void* dv = nullptr;              // [total, num_v_heads, head_dim_v]
  void* dg = nullptr;              // [total, num_v_heads]; in mamba2_scan times beta, whose sum over tokens is da
  void* dbeta = nullptr;           // like dg; of dt in mamba2_scan
  void* dskip = nullptr;           // mamba2_scan only, like dg: dout . v, whose sum over tokens is the gradient of skip
  void* dinitial_state = nullptr;  // or null
};

// out = x silu(z), 0 in slots after the last document. Tensors are [total, num_heads, head_dim].
struct GateParams {
  Documents documents;
  DType dtype = DType::kFloat32;
  int64_t num_heads = 0, head_dim = 0;
  HeadRows x, z;
  void* out = nullptr;
};

struct GateBackwardParams : GateParams {
  HeadRows dout;
  void* dx = nullptr;
  void* dz = nullptr;
};

void launch_gate_cpu(const GateParams& p);
void launch_gate_cuda(const GateParams& p, const CudaLaunch& launch);
void launch_gate_backward_cpu(const GateBackwardParams& p);
void launch_gate_backward_cuda(const GateBackwardParams& p, const CudaLaunch& launch);

void launch_scan_cpu(const ScanParams& p);
void launch_scan_cuda(const ScanParams& p, const CudaLaunch& launch);
int64_t scan_scratch_bytes(const ScanParams& p);

void launch_scan_backward_cpu(const ScanBackwardParams& p);
void launch_scan_backward_cuda(const ScanBackwardParams& p, const CudaLaunch& launch);
int64_t scan_backward_scratch_bytes(const ScanParams& p);

}  // namespace packing_ops
