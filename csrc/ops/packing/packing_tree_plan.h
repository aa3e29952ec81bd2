// How the CPU kernel thinks of a prefix tree.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/packing/packing.h"

namespace packing_ops {

// A segment of the trees before capacity cuts them.
struct TreeNode {
  int32_t parent;
  int32_t sample;           // the first sample that has all of its tokens
  int64_t begin;            // depths: these are the tokens begin:end of the sample
  int64_t end;              // of a node with children a multiple of kForkAlignment
  int64_t rows = 0;         // of its subtree
  int32_t subtree_end = 0;  // its subtree are the nodes from itself to here
};

// A segment of a bin: a node, and above it those that have no other child in the bin.
struct TreeSegment {
  int32_t node;
  int64_t begin;  // depth
};

struct PrefixTreePlan {
  std::vector<TreeNode> nodes;     // in depth-first order; node 0 has no tokens, its children are the trees
  std::vector<int32_t> end_nodes;  // [num_samples], where each sample ends: at nodes[].end or inside
  int64_t repeated_at_forks = 0;   // rows that children repeat since their fork is no deeper

  std::vector<TreeSegment> segments;  // bin after bin, each bin in depth-first order
  std::vector<int64_t> bin_offsets;   // [bins + 1], of segments
  std::vector<int32_t> sample_bins;   // [num_samples]
  int64_t num_rows = 0;               // of the segments
};

// packing_tree_trie_cpu.cpp: nodes, end_nodes, repeated_at_forks.
void build_trie(const PrefixTreeParams& p, PrefixTreePlan& plan);

// packing_tree_cut_cpu.cpp: the others.
void place_trees(const PrefixTreeParams& p, PrefixTreePlan& plan);

}  // namespace packing_ops
