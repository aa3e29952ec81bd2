// Keys in pages or along the paths of a prefix tree: where in k and v a tile of keys starts.
#pragma once

#include "core/fork_alignment.h"
#include "ops/attention/cuda/args.cuh"
#include "ops/attention/cuda/mask.cuh"

namespace packing_ops::attention {

// Along a path. Both ends of the kForkAlignment keys that `key` is among are looked at: what a tile reads is in k,
// whatever the table holds.
__device__ __forceinline__ int64_t row_on_path(const Args& args, const DocumentView& d, int32_t key) {
  const KeyPages& pages = args.plan.pages;
  if (key >= d.keys) return 0;  // of a tile that has no key
  const int32_t block_end = (key | static_cast<int32_t>(kForkAlignment - 1)) + 1;
  const int32_t last = (block_end < d.keys ? block_end : d.keys) - 1;
  const int64_t row = pages.row_of_key[d.start_k + key];
  const int64_t last_row = pages.row_of_key[d.start_k + last];
  if (row >= 0 && last_row < pages.num_rows && last_row - row == last - key) return row;
  args.fault.raise(Fault::kRowOnPath, d.start_k + key);
  return 0;
}

// Of the backward, which has no pages.
__device__ __forceinline__ int64_t row_without_pages(const Args& args, const DocumentView& d, int32_t key) {
  return args.plan.pages.row_of_key == nullptr ? d.start_k + key : row_on_path(args, d, key);
}

// Row of key `key` of a document. The rows after it are those of the next keys, up to the end of the document or of
// kForkAlignment keys: a tile is in one page, or in one segment of a tree.
__device__ __forceinline__ int64_t row_of_key(const Args& args, const DocumentView& d, int32_t key) {
  const KeyPages& pages = args.plan.pages;
  if (!pages.used) return row_without_pages(args, d, key);
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
