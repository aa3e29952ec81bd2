// What the sm_80 kernels read: attention.h's params with the geometry worked out. Strides count elements.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/fault.h"
#include "core/segment.h"
#include "ops/attention/cuda/plan.h"

namespace packing_ops::attention {

// Quotients by a number that only the host divides by.
struct Divisor {
  uint32_t value = 1;
  uint32_t inverse = UINT32_MAX;  // 2^32 / value, rounded down

  Divisor() = default;
  explicit Divisor(uint32_t value) : value(value), inverse(static_cast<uint32_t>(((uint64_t{1} << 32) - 1) / value)) {}
  __device__ uint32_t quotient(uint32_t x) const {
    const uint32_t least = __umulhi(x, inverse);  // it or one less
    return x - least * value >= value ? least + 1 : least;
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
  float* dq_sum = nullptr;       // [plan.sum_tiles, a row tile's sums], partial sums of dq
  bool all_row_stats = false;    // of every row, not just where a document has several key tiles
  int32_t* order = nullptr;      // next unit of each backward list, then whose turn it is at each tile of dq_sum
  static constexpr int kClaims = 4;
  int64_t order_size = 0;
  PlanView plan;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t group = 0;           // num_heads / num_kv_heads
  uint32_t group_inverse = 0;  // 2^22 / group, rounded up: times x / 2^22 it is x / group for x < 2^12
  Divisor kv_heads;            // by num_kv_heads
  Divisor group_size;          // by group
  int32_t head_dim = 0;
  int32_t whole_group = 0;  // the group where head_dim is padded and 16 packed rows are whole tokens: simple loads
  float softmax_scale = 0;
  float softcap = 0;
  FaultFlag fault;
};

}  // namespace packing_ops::attention
