// Backward. With P = exp(score - lse), dP = dout . v and delta = rowsum(dout * out) - dlse:
//   dscore = P * (dP - delta),  dv_j = sum_i P dout_i,  dk_j = sum_i dscore q_i,  dq_i = sum_j dscore k_j
// (scale and softcap go into dscore). Sums run over tiles in the order of the document, whoever computes them.
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
  Range tokens;
  T* q;
  T* q_transposed;
  T* dout;
  T* dout_transposed;
  T* lse;
  T* delta;
};

template <class T>
struct KeyTile {
  Range keys;
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
    const int64_t scratch = 5 * rows * g_.dim + 2 * rows + 2 * kTile * (g_.dim + rows) + 2 * keys_held * g_.dim;
    for_each_item<T>(items, scratch, [&](const Item& item, Scratch<T> memory) {
      if (item.work == Work::kKeyTile) {
        key_tile(item, memory);
      } else {
        query_tiles(item, memory);
      }
    });
    if (p_.dsinks) compute_dsinks();
    clear_rows<Element>(p_.dq, p_.documents_q, p_.num_q_heads, p_.head_dim);
    clear_rows<Element>(p_.dk, p_.documents_k, p_.num_kv_heads, p_.head_dim);
    clear_rows<Element>(p_.dv, p_.documents_k, p_.num_kv_heads, p_.head_dim);
  }

 private:
  // lse, dlse and delta: [num_q_heads, total_q]
  int64_t row_at(int64_t head, int64_t token) const { return head * p_.documents_q.total + token; }
  T* delta() const { return static_cast<T*>(p_.delta); }
  const T* lse() const { return static_cast<const T*>(p_.lse); }

  void compute_delta() const {
    constexpr int64_t kGrain = 16384;  // elements a thread should have
    const T* dlse = static_cast<const T*>(p_.dlse);
    parallel_for(0, p_.documents_q.end(), kGrain / (p_.num_q_heads * p_.head_dim) + 1, [&](int64_t begin, int64_t end) {
      T dout[kMaxHeadDim], out[kMaxHeadDim];
      for (int64_t token = begin; token < end; ++token) {
        for (int64_t head = 0; head < p_.num_q_heads; ++head) {
          load_rows<Element>(p_, p_.dout, token, 1, head, 1, g_.dim, dout);
          load_rows<Element>(p_, p_.out, token, 1, head, 1, g_.dim, out);
          const int64_t row = row_at(head, token);
          delta()[row] = dot(dout, out, g_.dim) - (dlse ? dlse[row] : T(0));
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
      const auto add_tiles = [&](Work work, int64_t step, int64_t size, auto seen) {
        for_each_tile({0, size}, step, size, [&](Range tile) {
          const Range other = seen(tile);
          add(work, tile.begin, (tile.end - tile.begin) * (other.end - other.begin));
        });
      };
      if (num_k > kKeysAtOnce) {
        add_tiles(Work::kQueryTile, g_.tokens, num_q, [&](Range t) { return document.keys_seen_by(g_, t); });
        add_tiles(Work::kKeyTile, kTile, num_k, [&](Range t) { return document.tokens_that_see(g_, t); });
      } else if (num_q + num_k > 0) {
        add(Work::kDocument, 0, num_q * num_k);
        keys_held = std::max(keys_held, num_k);
      }
    }
    return items;
  }

  QueryTile<T> take_queries(Scratch<T>& memory) const {
    const int64_t rows = g_.row_stride({0, g_.tokens});
    QueryTile<T> queries{};
    for (T** matrix : {&queries.q, &queries.q_transposed, &queries.dout, &queries.dout_transposed}) {
      *matrix = memory.take(rows * g_.dim);
    }
    queries.lse = memory.take(rows);
    queries.delta = memory.take(rows);
    return queries;
  }

  KeyTile<T> take_keys(Scratch<T>& memory) const {
    return {{}, memory.take(kTile * g_.dim), memory.take(kTile * g_.dim)};
  }

  void load_queries(const Document& document, int64_t kv_head, Range tokens, QueryTile<T>& queries) const {
    const int64_t count = tokens.end - tokens.begin, stride = g_.row_stride(tokens);
    const int64_t first = document.q.start + tokens.begin, first_head = kv_head * g_.group;
    queries.tokens = tokens;
    load_rows<Element>(p_, p_.q, first, count, first_head, g_.group, g_.dim, queries.q);
    load_rows<Element>(p_, p_.dout, first, count, first_head, g_.group, g_.dim, queries.dout);
    transpose(queries.q, count * g_.group, g_.dim, stride, queries.q_transposed);
    transpose(queries.dout, count * g_.group, g_.dim, stride, queries.dout_transposed);
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

  void load_keys(const Document& document, int64_t kv_head, Range keys, KeyTile<T>& tile) const {
    const int64_t count = keys.end - keys.begin, first = document.k.start + keys.begin;
    tile.keys = keys;
    load_rows<Element>(p_, p_.k, first, count, kv_head, 1, g_.dim, tile.k);
    load_rows<Element>(p_, p_.v, first, count, kv_head, 1, g_.dim, tile.v);
  }

  void visit(const Document& document, const QueryTile<T>& queries, const KeyTile<T>& keys, Scratch<T> memory,
             const Gradients<T>& gradients) const {
    const Tile tile = document.tile(g_, queries.tokens, keys.keys);
    const Scoring<T> scoring{static_cast<T>(p_.softmax_scale), static_cast<T>(p_.softcap)};
    T* scores = memory.take(kTile * tile.row_stride);
    T* grads = memory.take(kTile * tile.row_stride);
    multiply(tile, keys.k, queries.q_transposed, scores);
    multiply(tile, keys.v, queries.dout_transposed, grads);
    softmax_gradient(tile, scoring, queries.lse, queries.delta, scores, grads);
    if (gradients.dq) {
      accumulate_rows(tile, grads, keys.k, needs_exact(tile, keys.k, tile.band.keys), gradients.dq);
    }
    if (gradients.dk) {
      const int64_t rows = tile.band.rows();
      accumulate_keys(tile, scores, queries.dout, needs_exact(tile, queries.dout, rows), gradients.dv);
      accumulate_keys(tile, grads, queries.q, needs_exact(tile, queries.q, rows), gradients.dk);
    }
  }

  // dq of one query tile, or dq, dk and dv of a whole document.
  void query_tiles(const Item& item, Scratch<T> memory) const {
    const Document document = document_of(p_, item.document);
    const bool whole = item.work == Work::kDocument;
    const Range range{item.begin, whole ? document.num_q() : item.begin + 1};
    const int64_t held = whole ? document.num_k() * g_.dim : 0;
    QueryTile<T> queries = take_queries(memory);
    KeyTile<T> keys = take_keys(memory);
    T* dq = memory.take(g_.row_stride({0, g_.tokens}) * g_.dim);
    T* dk = memory.take(held);
    T* dv = memory.take(held);
    std::fill_n(dk, held, T(0));
    std::fill_n(dv, held, T(0));
    for_each_tile(range, g_.tokens, document.num_q(), [&](Range tokens) {
      const int64_t count = tokens.end - tokens.begin;
      load_queries(document, item.kv_head, tokens, queries);
      std::fill_n(dq, count * g_.group * g_.dim, T(0));
      for_each_tile(document.keys_seen_by(g_, tokens), kTile, document.num_k(), [&](Range seen) {
        load_keys(document, item.kv_head, seen, keys);
        const int64_t at = seen.begin * g_.dim;
        visit(document, queries, keys, memory, {dq, whole ? dk + at : nullptr, whole ? dv + at : nullptr});
      });
      store_rows<Element>(p_, p_.dq, document.q.start + tokens.begin, count, item.kv_head * g_.group, g_.group, g_.dim,
                          dq);
    });
    if (!whole) return;
    store_rows<Element>(p_, p_.dk, document.k.start, document.num_k(), item.kv_head, 1, g_.dim, dk);
    store_rows<Element>(p_, p_.dv, document.k.start, document.num_k(), item.kv_head, 1, g_.dim, dv);
  }

  // dk and dv of one key tile.
  void key_tile(const Item& item, Scratch<T> memory) const {
    const Document document = document_of(p_, item.document);
    const Range seen{item.begin, std::min(item.begin + kTile, document.num_k())};
    const int64_t count = seen.end - seen.begin;
    QueryTile<T> queries = take_queries(memory);
    KeyTile<T> keys = take_keys(memory);
    T* dk = memory.take(count * g_.dim);
    T* dv = memory.take(count * g_.dim);
    std::fill_n(dk, count * g_.dim, T(0));
    std::fill_n(dv, count * g_.dim, T(0));
    load_keys(document, item.kv_head, seen, keys);
    for_each_tile(document.tokens_that_see(g_, seen), g_.tokens, document.num_q(), [&](Range tokens) {
      load_queries(document, item.kv_head, tokens, queries);
      visit(document, queries, keys, memory, {nullptr, dk, dv});
    });
    store_rows<Element>(p_, p_.dk, document.k.start + seen.begin, count, item.kv_head, 1, g_.dim, dk);
    store_rows<Element>(p_, p_.dv, document.k.start + seen.begin, count, item.kv_head, 1, g_.dim, dv);
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
