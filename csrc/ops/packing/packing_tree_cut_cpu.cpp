// Trees into bins. From the leaves up: what does not fit next to its path is cut at its children, and first-fit
// decreasing puts these, or what they were cut into, under as few copies of the node as it manages. The copies of node
// 0, above all trees, are the bins.
#include <algorithm>

#include "ops/packing/packing_tree_plan.h"

namespace packing_ops {

namespace {

// A copy of a node with some of what is below it.
struct Piece {
  int32_t node;
  int64_t rows;
  std::vector<int32_t> parts;  // pieces of its children, in their order; empty: all that is below
};

class Cut {
 public:
  Cut(const PrefixTreeParams& p, const std::vector<TreeNode>& nodes) : p_(p), nodes_(nodes), pieces_of_(nodes.size()) {
    // Children have higher numbers.
    for (size_t node = nodes.size(); node-- > 1;) {
      if (!fits(nodes[node])) cut(static_cast<int32_t>(node));
    }
    if (fits(nodes[0])) {
      pieces_of_[0] = {add(0, nodes[0].rows, {})};
    } else {
      cut(0);
    }
  }

  const std::vector<int32_t>& bins() const { return pieces_of_[0]; }
  const Piece& piece(int32_t index) const { return pieces_[index]; }

 private:
  bool fits(const TreeNode& node) const { return node.begin + node.rows <= p_.capacity; }

  int32_t add(int32_t node, int64_t rows, std::vector<int32_t> parts) {
    pieces_.push_back({node, rows, std::move(parts)});
    return static_cast<int32_t>(pieces_.size()) - 1;
  }

  void cut(int32_t node) {
    std::vector<int32_t> parts;
    for (int32_t child = node + 1; child < nodes_[node].subtree_end; child = nodes_[child].subtree_end) {
      if (fits(nodes_[child])) pieces_of_[child] = {add(child, nodes_[child].rows, {})};
      parts.insert(parts.end(), pieces_of_[child].begin(), pieces_of_[child].end());
    }
    const int64_t count = static_cast<int64_t>(parts.size());
    std::vector<int64_t> rows;
    for (const int32_t part : parts) rows.push_back(pieces_[part].rows);
    std::vector<int64_t> offsets(count + 1);
    std::vector<int64_t> items(count);
    int64_t copies = 0;
    PackFfdParams ffd;
    ffd.lengths = {rows.data(), true};
    ffd.num_sequences = count;
    ffd.capacity = p_.capacity - nodes_[node].end;
    ffd.bin_offsets = offsets.data();
    ffd.item_indices = items.data();
    ffd.num_bins = &copies;
    launch_pack_ffd_cpu(ffd);
    for (int64_t copy = 0; copy < copies; ++copy) {
      std::sort(items.begin() + offsets[copy], items.begin() + offsets[copy + 1]);
      int64_t sum = nodes_[node].end - nodes_[node].begin;
      std::vector<int32_t> below;
      for (int64_t i = offsets[copy]; i < offsets[copy + 1]; ++i) {
        below.push_back(parts[items[i]]);
        sum += rows[items[i]];
      }
      pieces_of_[node].push_back(add(node, sum, std::move(below)));
    }
  }

  const PrefixTreeParams& p_;
  const std::vector<TreeNode>& nodes_;
  std::vector<Piece> pieces_;
  std::vector<std::vector<int32_t>> pieces_of_;  // [nodes], of those that are cut and their siblings
};

// The segments of a piece, depth-first.
class Layout {
 public:
  Layout(const Cut& cut, PrefixTreePlan& plan) : cut_(cut), plan_(plan), bin_of_(plan.nodes.size(), -1) {
    plan.bin_offsets.push_back(0);
  }

  void add_bin(int32_t piece) {
    std::vector<Open> open{{piece, 0}};
    while (!open.empty()) {
      const auto [index, begin] = open.back();
      open.pop_back();
      const auto& [node, rows, parts] = cut_.piece(index);
      mark(node);
      if (parts.empty()) {
        put(node, begin);
        for (int32_t below = node + 1; below < plan_.nodes[node].subtree_end; ++below) {
          mark(below);
          put(below, plan_.nodes[below].begin);
        }
      } else if (parts.size() == 1) {
        open.push_back({parts[0], begin});  // one segment with it
      } else {
        put(node, begin);
        for (size_t i = parts.size(); i-- > 0;) open.push_back({parts[i], plan_.nodes[node].end});
      }
    }
    plan_.bin_offsets.push_back(static_cast<int64_t>(plan_.segments.size()));
  }

  // The first bin with a copy of the node.
  int32_t bin_of(int32_t node) const { return bin_of_[node]; }

 private:
  struct Open {
    int32_t piece;
    int64_t begin;
  };

  void mark(int32_t node) {
    if (bin_of_[node] < 0) bin_of_[node] = static_cast<int32_t>(plan_.bin_offsets.size()) - 1;
  }

  void put(int32_t node, int64_t begin) {
    if (node == 0) return;
    plan_.segments.push_back({node, begin});
    plan_.num_rows += plan_.nodes[node].end - begin;
  }

  const Cut& cut_;
  PrefixTreePlan& plan_;
  std::vector<int32_t> bin_of_;  // [nodes]
};

}  // namespace

void place_trees(const PrefixTreeParams& p, PrefixTreePlan& plan) {
  const Cut cut(p, plan.nodes);
  Layout layout(cut, plan);
  if (p.num_samples == 0) return;
  for (const int32_t piece : cut.bins()) layout.add_bin(piece);
  for (const int32_t node : plan.end_nodes) plan.sample_bins.push_back(layout.bin_of(node));
}

}  // namespace packing_ops
