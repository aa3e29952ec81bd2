// The paths of a prefix tree: which rows of k and v each segment's queries see.
#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "core/error.h"
#include "ops/attention/attention.h"

namespace packing_ops {

namespace {

int64_t path_length(const PrefixPathsParams& p, int64_t segment) {
  return segment < 0 ? 0 : p.cu_seqlens[segment + 1] - p.cu_seqlens[segment];
}

// Depth-first order: the parent is the segment before, or one of that one's ancestors.
bool follows(const PrefixPathsParams& p, int64_t segment) {
  int64_t open = segment - 1;
  while (open >= 0 && open != p.parents[segment]) open = p.parents[open];
  return open == p.parents[segment];
}

void check_parent(const PrefixPathsParams& p, int64_t segment) {
  const int64_t parent = p.parents[segment];
  check(parent >= -1 && parent < segment, "parents: expected -1 or an earlier segment at index ", segment, ", got ",
        parent);
  if (p.forks_anywhere) return;
  check(follows(p, segment), "parents: expected segments in depth-first order, got ", parent, " at index ", segment,
        ", whose subtree has ended before");
  if (parent < 0) return;
  const int64_t length = p.segments[parent].size();
  check(length % kForkAlignment == 0, "parents: expected segments with children to have a multiple of ", kForkAlignment,
        " tokens, got ", length, " in segment ", parent, ", the parent of segment ", segment);
}

}  // namespace

void launch_prefix_path_lengths_cpu(const PrefixPathsParams& p) {
  p.cu_seqlens[0] = 0;
  for (int64_t i = 0; i < p.segments.num_documents; ++i) {
    check_parent(p, i);
    const int64_t end = p.cu_seqlens[i] + path_length(p, p.parents[i]) + p.segments[i].size();
    check(end <= std::numeric_limits<int32_t>::max(),
          "parents: expected paths of fewer than 2**31 tokens together, got ", end, " up to segment ", i);
    p.cu_seqlens[i + 1] = static_cast<int32_t>(end);
  }
}

void launch_prefix_path_rows_cpu(const PrefixPathsParams& p) {
  const int64_t total = p.segments.total;
  const int32_t num_keys = p.cu_seqlens[p.segments.num_documents];
  // A path is the parent's path, then the segment's rows.
  for (int64_t i = 0; i < p.segments.num_documents; ++i) {
    const int64_t parent = p.parents[i], inherited = path_length(p, parent);
    int32_t* path = p.row_of_key + p.cu_seqlens[i];
    if (parent >= 0) std::copy_n(p.row_of_key + p.cu_seqlens[parent], inherited, path);
    std::iota(path + inherited, p.row_of_key + p.cu_seqlens[i + 1], static_cast<int32_t>(p.segments[i].begin));
  }
  // The keys of each row, by counting.
  std::fill_n(p.key_offsets, total + 1, 0);
  for (int32_t i = 0; i < num_keys; ++i) ++p.key_offsets[p.row_of_key[i] + 1];
  std::partial_sum(p.key_offsets, p.key_offsets + total + 1, p.key_offsets);
  std::vector<int32_t> next(p.key_offsets, p.key_offsets + total);
  for (int32_t i = 0; i < num_keys; ++i) p.keys_of_row[next[p.row_of_key[i]]++] = i;
}

}  // namespace packing_ops
