// Attention over keys in pages: check -> allocate -> fill the params -> launch. Its plan likewise.
#include <algorithm>
#include <tuple>

#include "host/launch.h"
#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/attention/attention_params.h"

namespace packing_ops {

namespace {

// Contiguous; keep it until the launch. On the CPU the values are checked too.
void take_seqused_k(Tensor& seqused_k, int64_t documents, int64_t max_keys, const Tensor& other,
                    const char* other_name) {
  check_dtype(seqused_k, "seqused_k", {DType::kInt32});
  check_same_device(seqused_k, "seqused_k", other, other_name);
  check_shape(seqused_k, "seqused_k", {documents}, "[num_documents] of cu_seqlens_q");
  seqused_k = dense(seqused_k);
  if (!seqused_k.is_cpu()) return;
  for (int64_t i = 0; i < documents; ++i) {
    const int32_t keys = static_cast<const int32_t*>(seqused_k.data_ptr())[i];
    check(keys >= 0 && keys <= max_keys, "seqused_k: expected 0 to ", max_keys,
          " keys, what a row of block_table holds, at index ", i, ", got ", keys);
  }
}

// On the CPU: the pages that hold keys.
void check_table(const KeyPages& pages, int64_t documents) {
  for (int64_t i = 0; i < documents; ++i) {
    for (int64_t page = 0; page * pages.page_size < pages.keys(i); ++page) {
      const int32_t id = pages.block_table[i * pages.table_stride + page];
      check(id >= 0 && id < pages.num_pages, "block_table: expected 0 to ", pages.num_pages - 1,
            ", the pages of k, at index [", i, ", ", page, "], got ", id);
    }
  }
}

// Pages as far apart as whole rows, as many in k as in v.
int64_t rows_between_pages(const Tensor& k, const Tensor& v) {
  const int64_t rows = k.stride(1) > 0 ? k.stride(0) / k.stride(1) : 0;
  for (const auto& [t, name] : {std::pair(&k, "k"), std::pair(&v, "v")}) {
    if (k.size(0) > 1 && (t->stride(0) != rows * t->stride(1) || rows < t->size(1))) {
      fail(name, ": expected pages as many rows apart in k as in v, at least page_size, got strides ", t->stride(0),
           " of pages and ", t->stride(1), " of rows in ", describe(*t));
    }
  }
  return rows;
}

KeyPages key_pages(const Tensor& k, const Tensor& v, const Tensor& block_table) {
  KeyPages pages;
  pages.used = true;
  pages.num_pages = k.size(0);
  pages.page_size = k.size(1);
  check_rank(block_table, "block_table", 2);
  // A document of one page has no tile that crosses into another.
  if (pages.page_size < 1 || (pages.page_size % kForkAlignment != 0 && block_table.size(1) > 1)) {
    fail("k: expected a page_size that is a multiple of ", kForkAlignment, ", got ", describe(k));
  }
  check_dtype(block_table, "block_table", {DType::kInt32});
  check_same_device(block_table, "block_table", k, "k");
  check_last_dim_contiguous(block_table, "block_table");
  pages.page_rows = rows_between_pages(k, v);
  const int64_t rows = rows_of_pages(k).total;
  check(!k.is_cuda() || rows <= kMaxKeys, "k: expected at most ", kMaxKeys, " rows on CUDA, got ", rows);
  pages.block_table = static_cast<const int32_t*>(block_table.data_ptr());
  pages.table_stride = block_table.stride(0);
  pages.max_keys = pages.num_pages == 0 ? 0 : std::min(block_table.size(1) * pages.page_size, kMaxKeys);
  return pages;
}

}  // namespace

// Forward only.
std::tuple<Tensor, Tensor> paged_attention(const Tensor& q, const Tensor& k, const Tensor& v, Tensor cu_seqlens_q,
                                           const Tensor& block_table, Tensor seqused_k, std::optional<Tensor> sinks,
                                           bool causal, std::optional<double> softmax_scale, int64_t window_left,
                                           int64_t window_right, double softcap, std::optional<Tensor> plan) {
  check_qkv(q, k, v, rows_of_pages);
  const Tensor rows_q = aligned_rows(q), rows_k = aligned_rows(k), rows_v = aligned_rows(v);
  take_cu_seqlens(cu_seqlens_q, "cu_seqlens_q", input_rows(q).total, q, "q");
  const int64_t documents = cu_seqlens_q.numel() - 1;
  VarlenAttentionParams p;
  p.documents_q = documents_view(cu_seqlens_q, input_rows(q).total);
  p.pages = key_pages(rows_k, rows_v, block_table);
  check(block_table.size(0) == documents, "block_table: expected [num_documents, pages] with the ", documents,
        " documents of cu_seqlens_q, got ", describe(block_table));
  take_seqused_k(seqused_k, documents, p.pages.max_keys, q, "q");
  p.pages.seqused_k = static_cast<const int32_t*>(seqused_k.data_ptr());
  if (q.is_cpu()) check_table(p.pages, documents);
  const Rows k_rows = rows_of_pages(rows_k), v_rows = rows_of_pages(rows_v);
  p.documents_k = {nullptr, documents, k_rows.total};
  set_call(p, q, k_rows, v_rows, sinks, {causal, softmax_scale, window_left, window_right, softcap});
  check_cuda_case(p, q, v);
  p.q = input_rows(rows_q).memory;
  p.k = k_rows.memory;
  p.v = v_rows.memory;
  return run_forward(p, q, sinks, plan);
}

// max_keys: of a document, what a row of block_table holds. Good for every block_table.
Tensor paged_attention_plan(Tensor cu_seqlens_q, Tensor seqused_k, int64_t total_q, int64_t max_keys, int64_t num_heads,
                            int64_t num_kv_heads, int64_t head_dim, bool causal, int64_t window_left,
                            int64_t window_right, std::optional<int64_t> head_dim_v) {
  check(total_q >= 0 && max_keys >= 0, "total_q, max_keys: expected 0 or more, got ", total_q, " and ", max_keys);
  take_cu_seqlens(cu_seqlens_q, "cu_seqlens_q", total_q, cu_seqlens_q, "cu_seqlens_q");
  const int64_t documents = cu_seqlens_q.numel() - 1;
  max_keys = std::min(max_keys, kMaxKeys);
  take_seqused_k(seqused_k, documents, max_keys, cu_seqlens_q, "cu_seqlens_q");
  AttentionPlanParams p =
      plan_geometry(num_heads, num_kv_heads, head_dim, head_dim_v, causal, window_left, window_right);
  p.documents_q = documents_view(cu_seqlens_q, total_q);
  p.documents_k = {nullptr, documents, 0};
  p.pages.used = true;
  p.pages.seqused_k = static_cast<const int32_t*>(seqused_k.data_ptr());
  p.pages.max_keys = max_keys;
  return made_plan(p, cu_seqlens_q);
}

PACKING_OPS_REGISTER(m) {
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
  m.impl("paged_attention_plan", TORCH_BOX(&paged_attention_plan));
}

}  // namespace packing_ops
