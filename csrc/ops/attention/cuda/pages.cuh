// Keys in pages: where in k and v a tile of keys starts.
#pragma once

#include "core/fork_alignment.h"
#include "ops/attention/cuda/args.cuh"
#include "ops/attention/cuda/mask.cuh"

namespace packing_ops::attention {

// Row of key `key` of a document. The rows after it are those of the next keys, up to the end of the document or of
// kForkAlignment keys: a tile lies in one page.
__device__ __forceinline__ int64_t row_of_key(const Args& args, const DocumentView& d, int32_t key) {
  const KeyPages& pages = args.plan.pages;
  if (!pages.used) return d.start_k + key;
  if (key >= d.keys || key >= pages.max_keys) return 0;  // of a tile that has no key
  const auto column = static_cast<int32_t>(args.page_size.quotient(key));
  int32_t page = pages.block_table[d.start_k * pages.table_stride + column];
  if (page < 0 || page >= pages.num_pages) {
    args.fault.raise(Fault::kPageOutside, d.start_k);
    page = 0;
  }
  return page * pages.page_rows + (key - column * static_cast<int32_t>(pages.page_size));
}

}  // namespace packing_ops::attention
