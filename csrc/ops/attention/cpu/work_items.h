// How documents are cut into tiles and items of work, and how tiles get into scratch memory.
//
// Everything here depends only on the document's lengths, the head geometry and the dtype: that is what makes
// the results of a document the same to the bit in any pack, on any number of threads.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "host/parallel.h"
#include "host/scalar.h"
#include "ops/attention/attention.h"
#include "ops/attention/cpu/tile.h"

namespace packing_ops::attention::cpu {

// --- geometry ---

struct Geometry {
  int64_t group;   // query heads per kv head
  int64_t tokens;  // query tokens of a tile; all heads of the group are in it
  int64_t dim;     // head_dim of q and k rounded up to whole vectors
  int64_t dim_v;   // head_dim of v likewise
  int64_t lanes;   // elements of a whole vector
  int64_t left;    // window; open ends are farther than any document is long
  int64_t right;

  int64_t row_stride(Interval<int64_t> tile_tokens) const { return round_up((tile_tokens.size()) * group, lanes); }
};

template <class T>
Geometry geometry_of(const VarlenAttentionParams& p) {
  constexpr int64_t kOpen = int64_t(1) << 40;
  Geometry g;
  g.group = p.num_q_heads / p.num_kv_heads;
  g.tokens = std::max<int64_t>(1, kTile / g.group);
  g.lanes = kLanes<T>;
  g.dim = round_up(p.head_dim, g.lanes);
  g.dim_v = round_up(p.head_dim_v, g.lanes);
  g.left = p.window_left < 0 ? kOpen : p.window_left;
  g.right = p.window_right < 0 ? kOpen : p.window_right;
  return g;
}

// One document; token numbers below count from its start.
struct Document {
  Interval<int64_t> q;
  Interval<int64_t> k;         // in pages: from 0
  const int32_t* visible_end;  // [num_q] or null: then the window's right side is the limit

  int64_t num_q() const { return q.size(); }
  int64_t num_k() const { return k.size(); }
  int64_t shift() const { return num_k() - num_q(); }  // query i has key position i + shift

  // Where the tile of query 0 starts, at most 0: tiles start at multiples of their size in key positions, so that dk
  // and dv of a row add up the same tiles for a chunk of the queries as for all of them.
  int64_t first_query_tile(const Geometry& g) const { return -((shift() % g.tokens + g.tokens) % g.tokens); }

  Interval<int64_t> visible_keys(const Geometry& g, Interval<int64_t> tokens) const {
    const int64_t begin = std::clamp<int64_t>(tokens.begin + shift() - g.left, 0, num_k());
    const int64_t end = visible_end ? visible_end[tokens.end - 1] : tokens.end + shift() + g.right;
    return {begin, std::clamp<int64_t>(end, begin, num_k())};
  }
  Interval<int64_t> tokens_attending_to(const Geometry& g, Interval<int64_t> keys) const {
    const int64_t begin = visible_end ? first_beyond(visible_end, num_q(), keys.begin)
                                      : std::clamp<int64_t>(keys.begin - shift() - g.right, 0, num_q());
    return {begin, std::clamp<int64_t>(keys.end - shift() + g.left, begin, num_q())};
  }
  Tile tile(const Geometry& g, Interval<int64_t> tokens, Interval<int64_t> keys) const {
    const int64_t diagonal = tokens.begin + shift() - keys.begin;
    const Band band{diagonal - g.left, diagonal + g.right + 1,
                    tokens.size(),     keys.size(),
                    g.group,           visible_end ? visible_end + tokens.begin : nullptr,
                    keys.begin};
    return {band, g.dim, g.row_stride(tokens)};
  }
};

inline Document document_of(const VarlenAttentionParams& p, int64_t i) {
  const Interval<int64_t> q = p.documents_q[i];
  const Interval<int64_t> k = p.pages.used ? Interval<int64_t>{0, p.pages.keys(i)} : p.documents_k[i];
  return {q, k, p.visible_end ? p.visible_end + q.begin : nullptr};
}

// The row of k and v where a tile of keys starts; document i's.
inline int64_t first_row(const VarlenAttentionParams& p, int64_t i, const Document& document, int64_t key) {
  static_assert(kForkAlignment % kTile == 0);  // a tile is in one page, or in one segment of a tree
  if (p.pages.row_of_key != nullptr) return p.pages.row_of_key[document.k.begin + key];
  if (!p.pages.used) return document.k.begin + key;
  const int64_t page = p.pages.block_table[i * p.pages.table_stride + key / p.pages.page_size];
  return page * p.pages.page_rows + key % p.pages.page_size;
}

// The tiles of `step`, counted from `first` (at most 0), that meet `range`; cut at 0 and at `size`.
template <class F>
void for_each_tile(Interval<int64_t> range, int64_t step, int64_t size, const F& f, int64_t first = 0) {
  for (int64_t begin = first + (range.begin - first) / step * step; begin < range.end; begin += step) {
    f(Interval<int64_t>{std::max<int64_t>(begin, 0), std::min(begin + step, size)});
  }
}

template <class F>
void for_each_query_tile(const Document& document, const Geometry& g, Interval<int64_t> tokens, const F& f) {
  for_each_tile(tokens, g.tokens, document.num_q(), f, document.first_query_tile(g));
}

// --- scratch ---

// Aligned arrays of one thread, cut from one allocation made before the threads start.
template <class T>
class ScratchArena {
 public:
  explicit ScratchArena(T* memory = nullptr) : next_(memory) {}

  T* take(int64_t count) {
    T* taken = next_;
    next_ += round_up(count, kLanes<T>);
    return taken;
  }

 private:
  T* next_;
};

// --- items of work ---

enum class Work : uint8_t {
  kQueryTile,  // one query tile against its visible keys
  kKeyTile,    // one key tile against the queries that attend to it
  kDocument    // all tiles
};

struct Item {
  int32_t document;
  int32_t kv_head;
  int32_t begin;  // first token or key of the tile
  Work work;
  int64_t cost;  // products of a row and a key, roughly
};

// f(item, scratch) for every item. Threads take the next item when they are free, so which thread computes an item,
// and when, is open; no bit of the item depends on it.
template <class T, class F>
void for_each_item(std::vector<Item>& items, int64_t scratch_count, const F& f) {
  constexpr int64_t kCostPerThread = 4096;  // less is done before a second thread has woken up
  int64_t cost = 0;
  int64_t largest_cost = 0;
  for (const Item& item : items) {
    cost += item.cost;
    largest_cost = std::max(largest_cost, item.cost);
  }
  const int64_t threads = std::min<int64_t>(get_num_threads(), std::max<int64_t>(items.size(), 1));
  const int64_t slots = std::clamp<int64_t>(cost / kCostPerThread, 1, threads);
  // The costliest first, if one of them, started last, would keep the other threads waiting.
  if (slots > 1 && largest_cost * slots * 16 > cost) {
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
  }
  const int64_t stride = round_up(scratch_count, 4096 / sizeof(T));
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, slots * stride * sizeof(T)),
                                                           &std::free);
  if (!memory) throw std::bad_alloc();
  std::atomic<size_t> next{0};
  parallel_for(0, slots, 1, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      T* slot_memory = static_cast<T*>(memory.get()) + slot * stride;
      for (size_t i = next++; i < items.size(); i = next++) f(items[i], ScratchArena<T>(slot_memory));
    }
  });
}

// --- moving tiles ---

template <class Element>
Element* token_address(const AttentionTensor& tensor, int64_t token, int64_t head) {
  return static_cast<Element*>(tensor.data) + token * tensor.token_stride + head * tensor.head_stride;
}

// head_dim, and what it is rounded up to.
struct Columns {
  int64_t head_dim;
  int64_t dim;
};

// rows[token * group + head][.] of a tile, in T, the columns from head_dim on 0.
template <class Element, class T>
void load_rows(const AttentionTensor& tensor, int64_t first_token, int64_t tokens, int64_t first_head, int64_t group,
               Columns columns, T* rows) {
  const auto [head_dim, dim] = columns;
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t head = 0; head < group; ++head, rows += dim) {
      const Element* from = token_address<const Element>(tensor, first_token + token, first_head + head);
      for (int64_t c = 0; c < head_dim; ++c) rows[c] = static_cast<T>(from[c]);
      std::fill(rows + head_dim, rows + dim, T(0));
    }
  }
}

template <class Element, class T>
void store_rows(const AttentionTensor& tensor, int64_t first_token, int64_t tokens, int64_t first_head, int64_t group,
                Columns columns, const T* rows) {
  const auto [head_dim, dim] = columns;
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t head = 0; head < group; ++head, rows += dim) {
      Element* to = token_address<Element>(tensor, first_token + token, first_head + head);
      for (int64_t c = 0; c < head_dim; ++c) to[c] = static_cast<Element>(rows[c]);
    }
  }
}

// Weights of masked keys are 0, but 0 * NaN is NaN: values that are not finite are kept away from rows that they are
// masked for.
template <class T>
bool needs_exact(const Tile& tile, const T* values, int64_t count) {
  return !tile.band.all_visible() && !all_finite(values, count * tile.dim);
}

// Rows past the last document hold 0.
template <class Element>
void clear_rows(const AttentionTensor& tensor, const Documents& documents, int64_t heads, int64_t head_dim) {
  for (int64_t token = documents.end(); token < documents.total; ++token) {
    for (int64_t head = 0; head < heads; ++head) {
      std::fill_n(token_address<Element>(tensor, token, head), head_dim, static_cast<Element>(0.0f));
    }
  }
}

}  // namespace packing_ops::attention::cpu
