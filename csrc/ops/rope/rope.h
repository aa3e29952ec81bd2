// RoPE: rotates pairs of elements of q and k by the angle of their token. One launch for both.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/launch.h"
#include "core/view.h"

namespace packing_ops {

constexpr int64_t kMaxRopeSections = 8;

// q or k, [batch, seqlen, num_heads, head_dim] in any order of strides (elements), last dim contiguous.
struct RopeHeads {
  const void* in = nullptr;
  void* out = nullptr;  // may be in
  int64_t num_heads = 0;
  int64_t in_batch = 0, in_token = 0, in_head = 0;
  int64_t out_batch = 0, out_token = 0, out_head = 0;
};

// cos or sin, strides in elements, entries contiguous.
// A cache [max_positions, width] is addressed by the token's position, a gathered table
// [rows, batch, seqlen, width] by the token itself (strides of 0 repeat a row or a batch).
struct RopeTable {
  const void* data = nullptr;
  int64_t row = 0, batch = 0, token = 0;
};

struct RopeParams {
  DType dtype = DType::kFloat32;        // of q and k
  DType table_dtype = DType::kFloat32;  // of cos and sin
  int64_t batch = 0;
  int64_t seqlen = 0;
  int64_t head_dim = 0;
  int64_t rotary_dim = 0;  // even, at most head_dim; the elements after it are copied
  RopeHeads q;
  RopeHeads k;  // num_heads = 0 when there is no k

  RopeTable cos;
  RopeTable sin;
  bool full_table = false;  // width = rotary_dim, an entry per element; else rotary_dim / 2, an entry per pair

  // [rows, position_batches, seqlen], rows > 1 with sections only; null data = gathered tables.
  // Strides in elements, 0 where a dimension repeats.
  IndexView position_ids;
  int64_t position_row = 0, position_batch = 0, position_token = 0;
  int64_t position_batches = 1;
  int64_t max_positions = 0;

  // Section i holds pairs section_ends[i - 1] up to section_ends[i] and takes its angles from row i % rows.
  int64_t rows = 1;
  int64_t num_sections = 1;
  int64_t section_ends[kMaxRopeSections] = {};

  bool interleaved = false;  // pairs (2i, 2i + 1); else (i, i + rotary_dim / 2)
  bool conjugate = false;    // the transposed rotation: backward
};

void launch_rope_qk_cpu(const RopeParams& p);

}  // namespace packing_ops
