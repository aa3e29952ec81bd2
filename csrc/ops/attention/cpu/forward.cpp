// Forward: the online softmax over key tiles, one (document, kv head, query tile) at a time.
#include "ops/attention/cpu/work_items.h"

namespace packing_ops {

namespace attention::cpu {

namespace {

template <class Element>
class Forward {
 public:
  using T = accumulate_t<Element>;

  explicit Forward(const VarlenAttentionParams& p) : p_(p), g_(geometry_of<T>(p)) {}

  void run() const {
    std::vector<Item> items = plan();
    const int64_t rows = g_.row_stride({0, g_.tokens});
    const int64_t scratch = (2 * rows + kTile) * g_.dim + (rows + kTile) * g_.dim_v + kTile * rows + 4 * rows;
    for_each_item<T>(items, scratch, [&](const Item& item, ScratchArena<T> memory) {
      const Document document = document_of(p_, item.document);
      for_each_query_tile(document, g_, {item.begin, item.begin + 1},
                          [&](Interval<int64_t> tokens) { query_tile(document, item, tokens, memory); });
    });
    clear_rows<Element>(p_.out, p_.documents_q, p_.num_q_heads, p_.head_dim_v);
    for (int64_t head = 0; head < p_.num_q_heads; ++head) {
      std::fill(lse_at(head, p_.documents_q.end()), lse_at(head + 1, 0), -std::numeric_limits<T>::infinity());
    }
  }

 private:
  T* lse_at(int64_t head, int64_t token) const { return static_cast<T*>(p_.lse) + head * p_.documents_q.total + token; }

  std::vector<Item> plan() const {
    std::vector<Item> items;
    for (int64_t i = 0; i < p_.documents_q.num_documents; ++i) {
      const Document document = document_of(p_, i);
      for_each_query_tile(document, g_, {0, document.num_q()}, [&](Interval<int64_t> tokens) {
        const Interval<int64_t> visible = document.visible_keys(g_, tokens);
        const int64_t cost = (tokens.size()) * g_.group * (visible.size());
        for (int64_t head = 0; head < p_.num_kv_heads; ++head) {
          items.push_back({int32_t(i), int32_t(head), int32_t(tokens.begin), Work::kQueryTile, cost});
        }
      });
    }
    return items;
  }

  void query_tile(const Document& document, const Item& item, Interval<int64_t> tokens, ScratchArena<T> memory) const {
    const int64_t count = tokens.size();
    const int64_t first_head = item.kv_head * g_.group;
    const int64_t stride = g_.row_stride(tokens);
    const Columns qk{p_.head_dim, g_.dim}, of_v{p_.head_dim_v, g_.dim_v};

    T* q = memory.take(stride * g_.dim);
    T* q_transposed = memory.take(stride * g_.dim);
    T* sums = memory.take(stride * g_.dim_v);
    T* k = memory.take(kTile * g_.dim);
    T* v = memory.take(kTile * g_.dim_v);
    T* scores = memory.take(kTile * stride);
    const SoftmaxState<T> state{memory.take(stride), memory.take(stride), memory.take(stride), memory.take(stride)};

    load_rows<Element>(p_.q, document.q.begin + tokens.begin, count, first_head, g_.group, qk, q);
    transpose(q, count * g_.group, g_.dim, stride, q_transposed);
    std::fill_n(sums, stride * g_.dim_v, T(0));
    start_softmax(first_head, stride, state);

    for_each_tile(document.visible_keys(g_, tokens), kTile, document.num_k(), [&](Interval<int64_t> keys) {
      const Tile tile = document.tile(g_, tokens, keys);
      const Tile values = tile.with_dim(g_.dim_v);
      const int64_t row = first_row(p_, item.document, document, keys.begin);
      load_rows<Element>(p_.k, row, tile.band.keys, item.kv_head, 1, qk, k);
      load_rows<Element>(p_.v, row, tile.band.keys, item.kv_head, 1, of_v, v);
      multiply(tile, k, q_transposed, scores);
      softmax_step(tile, p_, scores, state);
      scale_rows(values, state.rescale, sums);
      accumulate_rows(values, scores, v, needs_exact(values, v, tile.band.keys), sums);
    });

    finish(document, tokens, first_head, state, sums);
    store_rows<Element>(p_.out, document.q.begin + tokens.begin, count, first_head, g_.group, of_v, sums);
  }

  // A sink is a score before the first key, with value 0.
  void start_softmax(int64_t first_head, int64_t stride, const SoftmaxState<T>& state) const {
    constexpr T kNothing = -std::numeric_limits<T>::infinity();
    const T* sinks = static_cast<const T*>(p_.sinks);
    for (int64_t r = 0; r < stride; ++r) {
      state.max[r] = sinks ? sinks[first_head + r % g_.group] : kNothing;
      state.sum[r] = state.max[r] == kNothing ? T(0) : T(1);
    }
  }

  void finish(const Document& document, Interval<int64_t> tokens, int64_t first_head, const SoftmaxState<T>& state,
              T* sums) const {
    for (int64_t token = tokens.begin, r = 0; token < tokens.end; ++token) {
      for (int64_t head = first_head; head < first_head + g_.group; ++head, ++r) {
        const T share = state.sum[r] == 0 ? T(0) : 1 / state.sum[r];
        for (int64_t c = 0; c < g_.dim_v; ++c) sums[r * g_.dim_v + c] *= share;
        *lse_at(head, document.q.begin + token) = state.max[r] + std::log(state.sum[r]);
      }
    }
  }

  const VarlenAttentionParams& p_;
  const Geometry g_;
};

}  // namespace

}  // namespace attention::cpu

void launch_varlen_attention_cpu(const VarlenAttentionParams& p) {
  dispatch_float(p.dtype, [&](auto element) { attention::cpu::Forward<decltype(element)>(p).run(); });
}

}  // namespace packing_ops
