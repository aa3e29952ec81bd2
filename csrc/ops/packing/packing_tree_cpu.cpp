// The two steps of a prefix tree: the trie and its bins, then the rows of every bin.
#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "ops/packing/packing_tree_plan.h"

namespace packing_ops {

namespace {

class Writer {
 public:
  explicit Writer(const PrefixTreeParams& p) : p_(p), plan_(*p.plan), segment_of_(plan_.nodes.size(), -1) {}

  void write_segment(int64_t segment) {
    const auto [index, begin] = plan_.segments[segment];
    const TreeNode& node = plan_.nodes[index];
    const int64_t row = p_.segments[segment] - begin;
    const int64_t token = p_.cu_seqlens[node.sample];
    p_.segments[segment + 1] = static_cast<int32_t>(row + node.end);
    for (int64_t depth = begin; depth < node.end; ++depth) {
      p_.rows[row + depth] = token + depth;
      p_.position_ids[row + depth] = depth;
      p_.copies[row + depth] = 0;
    }
    int32_t above = index;
    for (; above > 0 && plan_.nodes[above].begin >= begin; above = plan_.nodes[above].parent) {
      segment_of_[above] = static_cast<int32_t>(segment);
    }
    p_.parents[segment] = segment_of_[above];  // of this bin: a segment follows its parent
  }

  // From the segment in which the sample ends up to its root. Copies are differences until sum_copies.
  void write_sample(int32_t sample) {
    int64_t* row_of_token = p_.row_of_token + p_.cu_seqlens[sample];
    int64_t end = p_.cu_seqlens[sample + 1] - p_.cu_seqlens[sample];
    for (int32_t segment = segment_of_[plan_.end_nodes[sample]]; segment >= 0; segment = p_.parents[segment]) {
      const int64_t begin = plan_.segments[segment].begin;
      const int64_t row = p_.segments[segment] - begin;
      for (int64_t depth = begin; depth < end; ++depth) row_of_token[depth] = row + depth;
      ++p_.copies[row + begin];
      if (row + end < p_.segments[segment + 1]) --p_.copies[row + end];
      end = begin;
    }
  }

  void sum_copies(int64_t segment) {
    int64_t* copies = p_.copies;
    std::partial_sum(copies + p_.segments[segment], copies + p_.segments[segment + 1], copies + p_.segments[segment]);
  }

 private:
  const PrefixTreeParams& p_;
  const PrefixTreePlan& plan_;
  std::vector<int32_t> segment_of_;  // [nodes], in the bin that is written; node 0 has no segment
};

void check_capacity(const PrefixTreeParams& p) {
  int64_t longest = 0;
  int64_t at = 0;
  for (int64_t i = 0; i < p.num_samples; ++i) {
    const int64_t length = p.cu_seqlens[i + 1] - p.cu_seqlens[i];
    if (length > longest) at = i;
    longest = std::max(longest, length);
  }
  check(p.capacity >= longest, "capacity: expected at least ", longest, ", the tokens of sample ", at, ", got ",
        p.capacity);
}

}  // namespace

void launch_plan_prefix_tree_cpu(const PrefixTreeParams& p) {
  check_capacity(p);
  build_trie(p, *p.plan);
  place_trees(p, *p.plan);
}

void launch_write_prefix_tree_cpu(const PrefixTreeParams& p) {
  const PrefixTreePlan& plan = *p.plan;
  std::vector<int32_t> by_bin(p.num_samples);
  std::iota(by_bin.begin(), by_bin.end(), 0);
  std::stable_sort(by_bin.begin(), by_bin.end(),
                   [&](int32_t a, int32_t b) { return plan.sample_bins[a] < plan.sample_bins[b]; });
  Writer writer(p);
  auto sample = by_bin.begin();
  p.segments[0] = 0;
  for (size_t bin = 0; bin + 1 < plan.bin_offsets.size(); ++bin) {
    const int64_t end = plan.bin_offsets[bin + 1];
    for (int64_t i = plan.bin_offsets[bin]; i < end; ++i) writer.write_segment(i);
    for (; sample != by_bin.end() && plan.sample_bins[*sample] == static_cast<int32_t>(bin); ++sample) {
      writer.write_sample(*sample);
    }
    for (int64_t i = plan.bin_offsets[bin]; i < end; ++i) writer.sum_copies(i);
  }
  std::copy(plan.bin_offsets.begin(), plan.bin_offsets.end(), p.bin_offsets);
  std::copy(plan.sample_bins.begin(), plan.sample_bins.end(), p.sample_bins);
  p.repeated[0] = plan.repeated_at_forks;
  p.repeated[1] = plan.num_rows - plan.nodes[0].rows;
}

}  // namespace packing_ops
