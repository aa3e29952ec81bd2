// A packed row as tensors hold it: [total, num_heads, head_dim], or with a batch of 1 before it. Then q, k, v and their
// gradients have the heads first, as models of transformers hold them, and out and dout the tokens, as they go on.
#pragma once

#include <utility>
#include <vector>

#include "host/tensor_view.h"
#include "ops/attention/attention.h"

namespace packing_ops {

struct Rows {
  int64_t total;
  int64_t num_heads;
  int64_t head_dim;
  AttentionTensor memory;
};

inline Rows rows_of(const Tensor& t, int64_t tokens, int64_t heads) {
  return {t.size(tokens), t.size(heads), t.size(t.dim() - 1), {t.data_ptr(), t.stride(tokens), t.stride(heads)}};
}

// q, k, v and their gradients.
inline Rows input_rows(const Tensor& t) {
  return t.dim() == 4 ? rows_of(t, 2, 1) : rows_of(t, 0, 1);
}

// k and v in pages, [num_pages, page_size, num_kv_heads, head_dim], as rows of which not all need be pages'.
inline Rows rows_of_pages(const Tensor& t) {
  Rows rows = rows_of(t, 1, 2);
  const int64_t between = rows.memory.token_stride > 0 ? t.stride(0) / rows.memory.token_stride : 0;
  rows.total = t.size(0) == 0 ? 0 : (t.size(0) - 1) * between + t.size(1);
  return rows;
}

// out and dout.
inline Rows output_rows(const Tensor& t) {
  return t.dim() == 4 ? rows_of(t, 1, 2) : rows_of(t, 0, 1);
}

inline std::vector<int64_t> output_sizes(const Tensor& q, int64_t head_dim_v) {
  if (q.dim() == 4) return {q.size(0), q.size(2), q.size(1), head_dim_v};
  return {q.size(0), q.size(1), head_dim_v};
}

// A gradient of q, k or v: its dimensions but for `total` tokens, the tokens first in memory.
inline Tensor empty_input_rows(const Tensor& t, int64_t total) {
  if (t.dim() == 3) return empty_as({total, t.size(1), t.size(2)}, t);
  std::vector<int64_t> strides = detail::contiguous_strides({1, total, t.size(1), t.size(3)});
  std::swap(strides[1], strides[2]);
  return empty_as({1, t.size(1), total, t.size(3)}, strides, t);
}

// 16-byte copies, and Hopper's tensor maps: a view that starts or steps off that grid, or steps by 0 or too far, is
// copied once.
inline Tensor aligned_rows(const Tensor& t) {
  if (!t.is_cuda() || dtype_of(t) == DType::kFloat32) return t;
  bool odd = reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 != 0;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) {
    constexpr int64_t kMost = int64_t{1} << 32;
    odd = odd || (t.size(i) > 1 && (t.stride(i) % 8 != 0 || t.stride(i) == 0 || t.stride(i) >= kMost));
  }
  return odd ? copy_of(t) : t;
}

// out, dout: autograd gives gradients in any layout; only a strided last dimension costs a copy.
inline Tensor dense_rows(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return aligned_rows(t.size(last) <= 1 || t.stride(last) == 1 ? t : dense(t));
}

}  // namespace packing_ops
