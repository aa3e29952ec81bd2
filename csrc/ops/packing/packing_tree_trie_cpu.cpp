// The trie of samples, over blocks of tokens: all samples of a run agree up to some depth, there they are sorted by
// their next block, and each run of equal blocks goes on separately. A token is compared once for each block that it is
// in, and sorted once for each fork that it follows.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/fork_alignment.h"
#include "core/interval.h"
#include "ops/packing/packing_plan.h"
#include "ops/packing/packing_tree_plan.h"

namespace packing_ops {

namespace {

// How many tokens are equal before the first that is not; memcmp is several times faster at it than a loop.
template <class Token>
int64_t common_prefix(const Token* a, const Token* b, int64_t count) {
  int64_t i = 0;
  while (i + kForkAlignment <= count && std::memcmp(a + i, b + i, kForkAlignment * sizeof(Token)) == 0) {
    i += kForkAlignment;
  }
  while (i < count && a[i] == b[i]) ++i;
  return i;
}

template <class Token>
class Trie {
 public:
  Trie(const PrefixTreeParams& p, PrefixTreePlan& plan)
      : p_(p),
        plan_(plan),
        tokens_(static_cast<const Token*>(p.tokens.data)),
        first_block_(units_of(p.min_shared, kForkAlignment) * kForkAlignment),
        order_(p.num_samples) {
    std::iota(order_.begin(), order_.end(), 0);
    plan.end_nodes.resize(p.num_samples);
  }

  void build() {
    plan_.nodes.push_back({-1, -1, 0, 0});
    open(fork({0, p_.num_samples}, 0, 0));
    while (!open_.empty()) {
      const Branch branch = open_.back();
      open_.pop_back();
      grow(branch);
    }
  }

 private:
  // Samples that leave a fork together: order_[run]. Those that end within their next block are first, and what they
  // have of it the others have too.
  struct Branch {
    int32_t parent;
    int64_t depth;  // of the fork
    Interval<int64_t> run;
    int32_t first;  // the lowest of the samples
  };

  int64_t length(int32_t sample) const { return p_.cu_seqlens[sample + 1] - p_.cu_seqlens[sample]; }
  const Token* tokens(int32_t sample, int64_t depth) const { return tokens_ + p_.cu_seqlens[sample] + depth; }
  // No fork is within a block: the first one is as long as min_shared.
  int64_t block(int64_t depth) const { return depth == 0 ? first_block_ : kForkAlignment; }
  int64_t rest(int32_t sample, int64_t depth) const { return std::min(length(sample) - depth, block(depth)); }
  bool compared(int32_t a, int32_t b) const { return p_.groups.data == nullptr || p_.groups[a] == p_.groups[b]; }

  int64_t common(int32_t a, int32_t b, int64_t depth) const {
    return common_prefix(tokens(a, depth), tokens(b, depth), std::min(rest(a, depth), rest(b, depth)));
  }

  // Lexicographic by the next block, a prefix before what it begins; equal ones in their order.
  bool before(int32_t a, int32_t b, int64_t depth) const {
    if (depth == 0 && !compared(a, b)) return p_.groups[a] < p_.groups[b];
    const int64_t shared = common(a, b, depth);
    const int64_t left = rest(a, depth);
    const int64_t right = rest(b, depth);
    if (shared < std::min(left, right)) return *tokens(a, depth + shared) < *tokens(b, depth + shared);
    return left != right ? left < right : a < b;
  }

  // The depth, a multiple of kForkAlignment, up to which all samples of the run are equal; they are up to `depth`.
  int64_t equal_until(const Interval<int64_t>& run, int64_t depth) const {
    const int32_t first = order_[run.begin];
    int64_t shared = length(first) - depth;
    for (int64_t i = run.begin + 1; i < run.end; ++i) {
      const int64_t count = std::min(shared, length(order_[i]) - depth);
      shared = common_prefix(tokens(first, depth), tokens(order_[i], depth), count);
    }
    return depth + shared / kForkAlignment * kForkAlignment;
  }

  void end_in(int32_t node, int32_t sample) {
    plan_.end_nodes[sample] = node;
    if (length(sample) <= plan_.nodes[node].end) return;
    plan_.nodes[node].end = length(sample);
    plan_.nodes[node].sample = sample;
  }

  // One segment, for as long as there is one way to go on.
  void grow(const Branch& branch) {
    const int32_t node = static_cast<int32_t>(plan_.nodes.size());
    plan_.nodes.push_back({branch.parent, branch.first, branch.depth, branch.depth});
    std::vector<Branch> next{branch};
    while (next.size() == 1) {
      Interval<int64_t> run = next[0].run;
      const int64_t depth = next[0].depth + block(next[0].depth);
      for (; !run.empty() && length(order_[run.begin]) < depth; ++run.begin) end_in(node, order_[run.begin]);
      if (run.empty()) return;
      plan_.nodes[node].sample = order_[run.begin];
      plan_.nodes[node].end = equal_until(run, depth);
      next = fork(run, plan_.nodes[node].end, node);
    }
    open(std::move(next));
  }

  // The branches of samples that are equal up to `depth`, where `node` ends.
  std::vector<Branch> fork(const Interval<int64_t>& run, int64_t depth, int32_t node) {
    int32_t* const end = order_.data() + run.end;
    int32_t* begin =
        std::stable_partition(order_.data() + run.begin, end, [&](int32_t sample) { return length(sample) == depth; });
    for (const int32_t* sample = order_.data() + run.begin; sample != begin; ++sample) end_in(node, *sample);
    std::sort(begin, end, [&](int32_t a, int32_t b) { return before(a, b, depth); });
    std::vector<Branch> branches;
    for (int32_t* sample = begin; sample != end; ++sample) {
      if (sample + 1 != end && compared(sample[0], sample[1])) {
        const int64_t shared = common(sample[0], sample[1], depth);
        if (shared == rest(sample[0], depth)) continue;  // the next one has all of it
        plan_.repeated_at_forks += shared;
      }
      const Interval<int64_t> samples{begin - order_.data(), sample + 1 - order_.data()};
      branches.push_back({node, depth, samples, *std::min_element(begin, sample + 1)});
      begin = sample + 1;
    }
    return branches;
  }

  // The first sample's branch on top.
  void open(std::vector<Branch> branches) {
    std::sort(branches.begin(), branches.end(), [](const Branch& a, const Branch& b) { return a.first > b.first; });
    open_.insert(open_.end(), branches.begin(), branches.end());
  }

  const PrefixTreeParams& p_;
  PrefixTreePlan& plan_;
  const Token* tokens_;
  const int64_t first_block_;
  std::vector<int32_t> order_;  // [num_samples]
  std::vector<Branch> open_;    // a stack, so that nodes are in depth-first order
};

}  // namespace

void build_trie(const PrefixTreeParams& p, PrefixTreePlan& plan) {
  p.tokens.is_int64 ? Trie<int64_t>(p, plan).build() : Trie<int32_t>(p, plan).build();
  for (size_t i = plan.nodes.size(); i-- > 0;) {
    TreeNode& node = plan.nodes[i];
    node.rows += node.end - node.begin;
    node.subtree_end = std::max(node.subtree_end, static_cast<int32_t>(i) + 1);
    if (node.parent < 0) continue;
    TreeNode& parent = plan.nodes[node.parent];
    parent.rows += node.rows;
    parent.subtree_end = std::max(parent.subtree_end, node.subtree_end);
  }
}

}  // namespace packing_ops
