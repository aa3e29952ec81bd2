// Varlen attention: every query row of a document attends to the keys of the same document.
//
//   score  s(i, j) = softmax_scale * q_i . k_j, then softcap * tanh(s / softcap) where softcap > 0
//   mask   with n queries and m keys, query i has key position i' = i + m - n (bottom-right aligned) and attends to
//   keys
//          i' - window_left <= j <= i' + window_right; -1 is open, causal is window_right 0
//          with visible_end: i' - window_left <= j < visible_end_i, which never decreases in a document
//   lse_i  = log(sum_j exp(s(i, j)) + exp(sink)), out_i = sum_j exp(s(i, j) - lse_i) v_j
//
// A row without a visible key has out 0 and lse = sink, or -inf without one.
#pragma once

#include <cstdint>
#include <optional>

#include "core/documents.h"
#include "core/dtype.h"
#include "core/fork_alignment.h"
#include "core/launch.h"

namespace packing_ops {

constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kMaxGroup = 1024;    // q heads to a kv head on CUDA
constexpr int64_t kMaxKeys = 1 << 29;  // in pages, of a document; rows of all pages on CUDA

// [total, num_heads, head_dim] with any strides, counted in elements; head_dim is contiguous.
struct AttentionTensor {
  void* data = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

// Keys in pages. Rows are counted over all of k (and of v): key j of document i is row
// block_table[i][j / page_size] * page_rows + j % page_size. Every key tile divides page_size, or a document has one
// page: a tile is in one. On a GPU values are clamped where they are read, as in Documents.
//
// Or along the paths of a prefix tree: documents_k counts the keys of the paths, and row_of_key has the row of each. In
// every kForkAlignment keys of a path, counted from its start, the rows follow each other.
struct KeyPages {
  bool used = false;                     // else documents_k says how many keys there are
  const int32_t* seqused_k = nullptr;    // [num_documents], keys of each document
  int64_t max_keys = 0;                  // of a document: those that its pages hold
  const int32_t* block_table = nullptr;  // [num_documents, max_keys / page_size]
  int64_t table_stride = 0;              // from a document to the next one
  int64_t num_pages = 0;
  int64_t page_size = kForkAlignment;   // a multiple of it, or max_keys
  int64_t page_rows = 0;                // from a page to the next one, at least page_size
  const int32_t* row_of_key = nullptr;  // [documents_k.total], or null: keys are end to end
  int64_t num_rows = 0;                 // of k, with row_of_key

  PACKING_OPS_HOST_DEVICE int64_t keys(int64_t document) const {
    const int64_t value = seqused_k[document];
    return value < 0 ? 0 : (value > max_keys ? max_keys : value);
  }
};

// The numbers of a call as the ops take them. set_call checks them for VarlenAttentionParams.
struct AttentionCallOptions {
  bool causal;
  std::optional<double> softmax_scale;  // 1 / sqrt(head_dim) without it
  int64_t window_left;
  int64_t window_right;
  double softcap;
};

struct VarlenAttentionParams {
  Documents documents_q;
  Documents documents_k;  // as many documents as documents_q; without cu_seqlens if keys are in pages
  KeyPages pages;
  DType dtype = DType::kFloat32;
  int64_t num_q_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;    // of q and k
  int64_t head_dim_v = 0;  // of v and out
  double softmax_scale = 1;
  double softcap = 0;  // 0 = off
  int64_t window_left = -1;
  int64_t window_right = -1;
  AttentionTensor q;                     // [total_q, num_q_heads, head_dim]
  AttentionTensor k;                     // [total_k, num_kv_heads, head_dim], or rows of pages
  AttentionTensor v;                     // [total_k, num_kv_heads, head_dim_v], likewise
  const void* sinks = nullptr;           // [num_q_heads], dtype of lse, or null
  AttentionTensor out;                   // [total_q, num_q_heads, head_dim_v]
  void* lse = nullptr;                   // [num_q_heads, total_q], float64 for float64 inputs, else float32
  int32_t* plan = nullptr;               // CUDA: the work-list of AttentionPlanParams
  void* scratch = nullptr;               // CUDA
  int32_t device = 0;                    // CUDA: its index
  const int32_t* visible_end = nullptr;  // [total_q], keys of the document, or null: then window_right is the limit
};

// out and lse are inputs here.
struct VarlenAttentionBackwardParams : VarlenAttentionParams {
  AttentionTensor dout;        // like out
  const void* dlse = nullptr;  // like lse, or null
  void* delta = nullptr;       // scratch like lse: rowsum(dout * out) - dlse
  AttentionTensor dq;          // like q
  AttentionTensor dk;          // like k
  AttentionTensor dv;          // like v
  void* dsinks = nullptr;      // like sinks
};

// The work-list of a batch on a GPU: good for every call with these lengths, heads, head_dims, window and visible_end.
struct AttentionPlanParams {
  Documents documents_q;
  Documents documents_k;  // of no rows if keys are in pages: such a plan serves only the forward
  int64_t num_q_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;
  int64_t window_left = -1;
  int64_t window_right = -1;
  int32_t* plan = nullptr;  // [attention_plan_size]
  int32_t device = 0;
  const int32_t* visible_end = nullptr;  // as in VarlenAttentionParams
  KeyPages pages;                        // its seqused_k and max_keys
};

// What the plan of a call is made from.
inline AttentionPlanParams plan_params(const VarlenAttentionParams& p) {
  const Documents no_rows{nullptr, p.documents_k.num_documents, 0};
  return {p.documents_q, p.pages.used ? no_rows : p.documents_k,
          p.num_q_heads, p.num_kv_heads,
          p.head_dim,    p.head_dim_v,
          p.window_left, p.window_right,
          p.plan,        p.device,
          p.visible_end, p.pages};
}

// The keys of each segment of a prefix tree: the rows of its ancestors, then its rows. One such list after the other.
struct PrefixPathsParams {
  Documents segments;
  bool forks_anywhere = false;       // at any token, and segments in any order after their parents
  const int32_t* parents = nullptr;  // [num_segments], -1 for a root
  int32_t* cu_seqlens = nullptr;     // [num_segments + 1], of the paths
  int32_t* row_of_key = nullptr;     // [cu_seqlens[num_segments]]
  int32_t* key_offsets = nullptr;    // [segments.total + 1]
  int32_t* keys_of_row = nullptr;    // like row_of_key: for each row its keys, ascending
};

// Checks the tree and writes cu_seqlens; then the other outputs, whose sizes it says.
void launch_prefix_path_lengths_cpu(const PrefixPathsParams& p);
void launch_prefix_path_rows_cpu(const PrefixPathsParams& p);

void launch_varlen_attention_cpu(const VarlenAttentionParams& p);
void launch_varlen_attention_backward_cpu(const VarlenAttentionBackwardParams& p);

// Entries of AttentionPlanParams::plan: enough for the tiles of any head_dim.
constexpr int64_t attention_plan_size(const AttentionPlanParams& p) {
  const int64_t group = p.num_q_heads / p.num_kv_heads;
  const int64_t documents = p.documents_q.num_documents;
  const int64_t cu_seqlens = (2 * (documents + 1) + 7) / 8;  // keys_of_row of both
  // A copy of visible_end, and the first token that sees each key.
  const int64_t visible = p.visible_end == nullptr ? 0 : p.documents_q.total + p.documents_k.total;
  // group / 32: row tiles of at least 32 rows. 1 / 32: units of resident rows, of at least 32 tokens.
  // Pages: 4 more, so that a plan of them does not pass for another's.
  const int64_t entries =
      cu_seqlens + p.documents_q.total * (group + 1) / 32 + p.documents_k.total / 32 + 6 * documents;
  return 16 + 8 * entries + visible + (p.pages.used ? 4 : 0);
}

// Bytes of `scratch`.
int64_t attention_scratch_cuda(const VarlenAttentionParams& p);
int64_t attention_backward_scratch_cuda(const VarlenAttentionBackwardParams& p);
void launch_attention_plan_cuda(const AttentionPlanParams& p, const CudaLaunch& launch);
void launch_varlen_attention_cuda(const VarlenAttentionParams& p, const CudaLaunch& launch);
void launch_varlen_attention_backward_cuda(const VarlenAttentionBackwardParams& p, const CudaLaunch& launch);

}  // namespace packing_ops
