// What the sm_80 kernels read: attention.h's params with the geometry worked out. Strides count elements.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/segment.h"
#include "ops/attention/attention_plan.h"

namespace packing_ops::sm80 {

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
  float* dq_sum = nullptr;       // [row tiles, num_kv_heads, a row tile's sums], partial sums of dq
  bool sums_by_key = false;      // which row tiles: see sum_tile
  bool all_row_stats = false;    // of every row, not just where a document has several key tiles
  int32_t* order = nullptr;      // next unit of each backward list, then key tiles done for each (row tile, kv head)
  static constexpr int kClaims = 4;
  int64_t order_size = 0;
  PlanView plan;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t group = 0;           // num_heads / num_kv_heads
  uint32_t group_inverse = 0;  // 2^22 / group, rounded up: x * it / 2^22 is x / group below 2^12
  Divisor kv_heads;            // by num_kv_heads
  Divisor group_size;          // by group
  int32_t head_dim = 0;
  int32_t whole_group = 0;  // the group where head_dim is padded and 16 packed rows are whole tokens: simple loads
  float softmax_scale = 0;
  float softcap = 0;

  // First tile of a document in dq_sum. Only documents of more than one key tile have sums, and no two of those start
  // within a key tile of each other, so that their tiles are apart either way; the smaller way is taken.
  PACKING_OPS_HOST_DEVICE int64_t sum_tile(int64_t first_row_tile, int64_t document, int64_t start_k) const {
    return first_row_tile + (sums_by_key ? start_k / plan.tiles.backward_keys : document);
  }
};

}  // namespace packing_ops::sm80
