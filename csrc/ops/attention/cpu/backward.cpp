// Backward. With P = exp(score - lse), dP = dout . v and delta = rowsum(dout * out) - dlse:
//   dscore = P * (dP - delta),  dv_j = sum_i P dout_i,  dk_j = sum_i dscore q_i,  dq_i = sum_j dscore k_j
// (the derivative of a score by its product goes into dscore). Sums run over tiles in the order of the document,
// whoever computes them.
#include "ops/attention/cpu/work_items.h"

namespace packing_ops {

namespace attention::cpu {

namespace {

// Up to here a thread holds dk and dv of the whole document in scratch, so that one visit of a pair of tiles feeds dq,
// dk and dv. Longer documents are visited twice, by query tile for dq and by key tile for dk and dv: 7 products
// instead of 5, but scratch stays small and one document keeps all threads busy.
constexpr int64_t kKeysAtOnce = 4096;

template <class T>
struct QueryTile {
  Interval<int64_t> tokens;
  T* q;
  T* q_transposed;
  T* dout;
  T* dout_transposed;
  T* lse;
  T* delta;
};

template <class T>
struct KeyTile {
  Interval<int64_t> keys;
  T* k;
  T* v;
};

// What one visit of a pair of tiles adds to; null where it is not wanted.
template <class T>
struct Gradients {
  T* dq;
  T* dk;
  T* dv;
};

template <class Element>
class Backward {
 public:
  using T = accumulate_t<Element>;

  explicit Backward(const VarlenAttentionBackwardParams& p) : p_(p), g_(geometry_of<T>(p)) {}

  void run() const {
    compute_delta();
    int64_t keys_held = kTile;
    std::vector<Item> items = plan(keys_held);
    const int64_t rows = g_.row_stride({0, g_.tokens});
    const int64_t width = g_.dim + g_.dim_v;
    const int64_t scratch =
        2 * rows * width + rows * g_.dim + 2 * rows + kTile * (width + 2 * rows) + keys_held * width;
    for_each_item<T>(items, scratch, [&](const Item& item, ScratchArena<T> memory) {
      if (item.work == Work::kKeyTile) {
        key_tile(item, memory);
      } else {
        query_tiles(item, memory);
      }
    });
    if (p_.dsinks) compute_dsinks();
    clear_rows<Element>(p_.dq, p_.documents_q, p_.num_q_heads, p_.head_dim);
    clear_rows<Element>(p_.dk, p_.documents_k, p_.num_kv_heads, p_.head_dim);
    clear_rows<Element>(p_.dv, p_.documents_k, p_.num_kv_heads, p_.head_dim_v);
  }

 private:
  // lse, dlse and delta: [num_q_heads, total_q]
  int64_t row_at(int64_t head, int64_t token) const { return head * p_.documents_q.total + token; }
  T* delta() const { return static_cast<T*>(p_.delta); }
  const T* lse() const { return static_cast<const T*>(p_.lse); }
  Columns qk() const { return {p_.head_dim, g_.dim}; }
  Columns of_v() const { return {p_.head_dim_v, g_.dim_v}; }

  void compute_delta() const {
    constexpr int64_t kGrain = 16384;  // elements a thread should have
    const T* dlse = static_cast<const T*>(p_.dlse);
    parallel_for(0, p_.documents_q.end(), kGrain / (p_.num_q_heads * p_.head_dim_v) + 1,
                 [&](int64_t begin, int64_t end) {
                   T dout[kMaxHeadDim], out[kMaxHeadDim];
                   for (int64_t token = begin; token < end; ++token) {
                     for (int64_t head = 0; head < p_.num_q_heads; ++head) {
                       load_rows<Element>(p_.dout, token, 1, head, 1, of_v(), dout);
                       load_rows<Element>(p_.out, token, 1, head, 1, of_v(), out);
                       const int64_t row = row_at(head, token);
                       delta()[row] = dot(dout, out, g_.dim_v) - (dlse ? dlse[row] : T(0));
                     }
                   }
                 });
  }

  // A sink is a score with value 0: dsink = sum of P_sink * (0 - delta), in token order.
  void compute_dsinks() const {
    parallel_for(0, p_.num_q_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t head = begin; head < end; ++head) {
        const double sink = static_cast<const T*>(p_.sinks)[head];
        double sum = 0;
        for (int64_t token = 0; token < p_.documents_q.end(); ++token) {
          const int64_t row = row_at(head, token);
          if (lse()[row] == -std::numeric_limits<T>::infinity()) continue;
          sum -= std::exp(sink - lse()[row]) * delta()[row];
        }
        static_cast<T*>(p_.dsinks)[head] = static_cast<T>(sum);
      }
    });
  }

  std::vector<Item> plan(int64_t& keys_held) const {
    std::vector<Item> items;
    for (int64_t i = 0; i < p_.documents_q.num_documents; ++i) {
      const Document document = document_of(p_, i);
      const int64_t num_q = document.num_q(), num_k = document.num_k();
      const auto add = [&](Work work, int64_t begin, int64_t cost) {
        for (int64_t head = 0; head < p_.num_kv_heads; ++head) {
          items.push_back({int32_t(i), int32_t(head), int32_t(begin), work, cost * g_.group});
        }
      };
      if (num_k > kKeysAtOnce) {
        for_each_query_tile(document, g_, {0, num_q}, [&](Interval<int64_t> tokens) {
          add(Work::kQueryTile, tokens.begin, tokens.size() * document.visible_keys(g_, tokens).size());
        });
        for_each_tile({0, num_k}, kTile, num_k, [&](Interval<int64_t> keys) {
          add(Work::kKeyTile, keys.begin, keys.size() * document.tokens_attending_to(g_, keys).size());
        });
      } else if (num_q + num_k > 0) {
        add(Work::kDocument, 0, num_q * num_k);
        keys_held = std::max(keys_held, num_k);
      }
    }
    return items;
  }

  QueryTile<T> take_queries(ScratchArena<T>& memory) const {
    const int64_t rows = g_.row_stride({0, g_.tokens});
    QueryTile<T> queries{};
    for (T** matrix : {&queries.q, &queries.q_transposed}) *matrix = memory.take(rows * g_.dim);
    for (T** matrix : {&queries.dout, &queries.dout_transposed}) *matrix = memory.take(rows * g_.dim_v);
    queries.lse = memory.take(rows);
    queries.delta = memory.take(rows);
    return queries;
  }

  KeyTile<T> take_keys(ScratchArena<T>& memory) const {
    return {{}, memory.take(kTile * g_.dim), memory.take(kTile * g_.dim_v)};
  }

  void load_queries(const Document& document, int64_t kv_head, Interval<int64_t> tokens, QueryTile<T>& queries) const {
    const int64_t count = tokens.size(), stride = g_.row_stride(tokens);
    const int64_t first = document.q.begin + tokens.begin, first_head = kv_head * g_.group;
    queries.tokens = tokens;
    load_rows<Element>(p_.q, first, count, first_head, g_.group, qk(), queries.q);
    load_rows<Element>(p_.dout, first, count, first_head, g_.group, of_v(), queries.dout);
    transpose(queries.q, count * g_.group, g_.dim, stride, queries.q_transposed);
    transpose(queries.dout, count * g_.group, g_.dim_v, stride, queries.dout_transposed);
    std::fill_n(queries.lse, stride, T(0));
    std::fill_n(queries.delta, stride, T(0));
    for (int64_t r = 0; r < count * g_.group; ++r) {
      const int64_t row = row_at(first_head + r % g_.group, first + r / g_.group);
      // A row without weights: +inf makes every exp(score - lse) 0, where -inf - -inf would be NaN.
      const T value = lse()[row];
      queries.lse[r] = value == -std::numeric_limits<T>::infinity() ? -value : value;
      queries.delta[r] = delta()[row];
    }
  }

  void load_keys(const Document& document, const Item& item, Interval<int64_t> keys, KeyTile<T>& tile) const {
    const int64_t count = keys.size(), first = first_row(p_, item.document, document, keys.begin);
    tile.keys = keys;
    load_rows<Element>(p_.k, first, count, item.kv_head, 1, qk(), tile.k);
    load_rows<Element>(p_.v, first, count, item.kv_head, 1, of_v(), tile.v);
  }

  void visit(const Document& document, const QueryTile<T>& queries, const KeyTile<T>& keys, ScratchArena<T> memory,
             const Gradients<T>& gradients) const {
    const Tile tile = document.tile(g_, queries.tokens, keys.keys);
    const Tile values = tile.with_dim(g_.dim_v);
    T* scores = memory.take(kTile * tile.row_stride);
    T* grads = memory.take(kTile * tile.row_stride);
    multiply(tile, keys.k, queries.q_transposed, scores);
    multiply(values, keys.v, queries.dout_transposed, grads);
    softmax_gradient(tile, p_, queries.lse, queries.delta, scores, grads);
    if (gradients.dq) {
      accumulate_rows(tile, grads, keys.k, needs_exact(tile, keys.k, tile.band.keys), gradients.dq);
    }
    if (gradients.dk) {
      const int64_t rows = tile.band.rows();
      accumulate_keys(values, scores, queries.dout, needs_exact(values, queries.dout, rows), gradients.dv);
      accumulate_keys(tile, grads, queries.q, needs_exact(tile, queries.q, rows), gradients.dk);
    }
  }

  // dq of one query tile, or dq, dk and dv of a document.
  void query_tiles(const Item& item, ScratchArena<T> memory) const {
    const Document document = document_of(p_, item.document);
    const bool all_tiles = item.work == Work::kDocument;
    const Interval<int64_t> range{item.begin, all_tiles ? document.num_q() : item.begin + 1};
    const int64_t held = all_tiles ? document.num_k() : 0;
    QueryTile<T> queries = take_queries(memory);
    KeyTile<T> keys = take_keys(memory);
    T* dq = memory.take(g_.row_stride({0, g_.tokens}) * g_.dim);
    T* dk = memory.take(held * g_.dim);
    T* dv = memory.take(held * g_.dim_v);
    std::fill_n(dk, held * g_.dim, T(0));
    std::fill_n(dv, held * g_.dim_v, T(0));
    for_each_query_tile(document, g_, range, [&](Interval<int64_t> tokens) {
      const int64_t count = tokens.size();
      load_queries(document, item.kv_head, tokens, queries);
      std::fill_n(dq, count * g_.group * g_.dim, T(0));
      for_each_tile(document.visible_keys(g_, tokens), kTile, document.num_k(), [&](Interval<int64_t> visible) {
        load_keys(document, item, visible, keys);
        visit(document, queries, keys, memory,
              {dq, all_tiles ? dk + visible.begin * g_.dim : nullptr,
               all_tiles ? dv + visible.begin * g_.dim_v : nullptr});
      });
      store_rows<Element>(p_.dq, document.q.begin + tokens.begin, count, item.kv_head * g_.group, g_.group, qk(), dq);
    });
    if (!all_tiles) return;
    store_rows<Element>(p_.dk, document.k.begin, document.num_k(), item.kv_head, 1, qk(), dk);
    store_rows<Element>(p_.dv, document.k.begin, document.num_k(), item.kv_head, 1, of_v(), dv);
  }

  // dk and dv of one key tile.
  void key_tile(const Item& item, ScratchArena<T> memory) const {
    const Document document = document_of(p_, item.document);
    const Interval<int64_t> visible{item.begin, std::min(item.begin + kTile, document.num_k())};
    const int64_t count = visible.size();
    QueryTile<T> queries = take_queries(memory);
    KeyTile<T> keys = take_keys(memory);
    T* dk = memory.take(count * g_.dim);
    T* dv = memory.take(count * g_.dim_v);
    std::fill_n(dk, count * g_.dim, T(0));
    std::fill_n(dv, count * g_.dim_v, T(0));
    load_keys(document, item, visible, keys);
    for_each_query_tile(document, g_, document.tokens_attending_to(g_, visible), [&](Interval<int64_t> tokens) {
      load_queries(document, item.kv_head, tokens, queries);
      visit(document, queries, keys, memory, {nullptr, dk, dv});
    });
    store_rows<Element>(p_.dk, document.k.begin + visible.begin, count, item.kv_head, 1, qk(), dk);
    store_rows<Element>(p_.dv, document.k.begin + visible.begin, count, item.kv_head, 1, of_v(), dv);
  }

  const VarlenAttentionBackwardParams& p_;
  const Geometry g_;
};

}  // namespace

}  // namespace attention::cpu

void launch_varlen_attention_backward_cpu(const VarlenAttentionBackwardParams& p) {
  dispatch_float(p.dtype, [&](auto element) { attention::cpu::Backward<decltype(element)>(p).run(); });
}

}  // namespace packing_ops
