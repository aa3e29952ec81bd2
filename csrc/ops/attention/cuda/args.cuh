// The argument of every attention kernel: the parameters of attention.h, and what is computed from them once per call.
// Strides count elements.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/documents.h"
#include "core/fault.h"
#include "ops/attention/cuda/plan.h"
#include "ops/attention/cuda/softmax.cuh"

namespace packing_ops::attention {

// Division by a number that is constant in a call, as a multiplication.
struct Divisor {
  uint32_t value = 1;
  uint32_t inverse = UINT32_MAX;  // 2^32 / value, rounded down

  Divisor() = default;
  explicit Divisor(uint32_t value) : value(value), inverse(static_cast<uint32_t>(((uint64_t{1} << 32) - 1) / value)) {}
  __device__ uint32_t quotient(uint32_t x) const {
    const uint32_t low = __umulhi(x, inverse);  // the quotient or one less
    return x - low * value >= value ? low + 1 : low;
  }
};

struct Args {
  AttentionTensor q, k, v, out;
  AttentionTensor dout, dq, dk, dv;
  Documents documents_q;
  Documents documents_k;
  float* lse = nullptr;          // [num_heads, total_q]
  const float* dlse = nullptr;   // [num_heads, total_q] or null
  const float* sinks = nullptr;  // [num_heads] or null
  float* dsinks = nullptr;       // [num_heads] or null
  float2* row_stats = nullptr;   // [total_q, num_heads]: lse * log2(e), rowsum(dout * out) - dlse
  float* partial_dq = nullptr;   // [plan.dq_ring_tiles, rows * head_dim of a tile]
  bool all_row_stats = false;    // of every row, not only in documents of several key tiles
  // Forward, null where its kernel does not need it: the next unit, which forward_resident.cuh or a memset sets to 0.
  // Backward, zeroed before its kernels: the next unit of each list (kWorkCounters of them), then the ticket of every
  // tile of partial_dq.
  int32_t* counters = nullptr;
  static constexpr int kWorkCounters = 4;
  int64_t num_counters = 0;
  PlanView plan;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t group = 0;           // num_heads / num_kv_heads
  uint32_t group_inverse = 0;  // 2^22 / group, rounded up: times x / 2^22 it is x / group for x < 2^12
  Divisor kv_heads;            // by num_kv_heads
  Divisor group_size;          // by group
  Divisor page_size;           // by plan.pages.page_size
  int32_t head_dim = 0;        // of q, k, dq and dk
  int32_t head_dim_v = 0;      // of v, out, dout and dv
  // group, if 16 packed rows are whole tokens and both head_dims are an instance's; else 0
  int32_t token_aligned_group = 0;
  ScoreArgs scores;
  const int32_t* visible_end = nullptr;  // the call's; kernels read plan.ends, which was checked
  FaultFlag fault;
};

}  // namespace packing_ops::attention
