// Arithmetic on one tile: a block of query rows against a block of keys, in float or double.
//
// A tile holds `tokens` query tokens of the `group` query heads that share one kv head: row = token * group + head.
// Scores are stored transposed, [key][row], so that softmax runs along rows of memory: no reduction inside a vector,
// hence the same bits however wide the vectors are used.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/interval.h"
#include "ops/attention/attention.h"

namespace packing_ops::attention::cpu {

constexpr int64_t kTile = 64;  // keys of a tile, and query rows where the group allows it

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The first of `count` tokens whose visible_end is beyond this key, or `count`.
inline int64_t first_beyond(const int32_t* visible_end, int64_t count, int64_t key) {
  return std::upper_bound(visible_end, visible_end + count, key) - visible_end;
}

// The mask of a tile: keys [t + low, t + high) are visible to token t; with visible_end, the end is
// visible_end[t] - first_key.
struct Band {
  int64_t low;
  int64_t high;
  int64_t tokens;
  int64_t keys;
  int64_t group;
  const int32_t* visible_end;  // [tokens] or null
  int64_t first_key;           // of the tile, in the document

  int64_t rows() const { return tokens * group; }

  // Keys visible to at least one of the rows; exact for a single row.
  Interval<int64_t> keys_of(Interval<int64_t> rows) const {
    const int64_t begin = std::clamp<int64_t>(rows.begin / group + low, 0, keys);
    const int64_t last = (rows.end - 1) / group;
    return {begin, std::clamp<int64_t>(visible_end ? visible_end[last] - first_key : last + high, begin, keys)};
  }
  // Rows that attend to at least one of the keys; exact for a single key.
  Interval<int64_t> rows_of(Interval<int64_t> tile_keys) const {
    const int64_t begin = visible_end ? first_beyond(visible_end, tokens, first_key + tile_keys.begin)
                                      : std::clamp<int64_t>(tile_keys.begin - high + 1, 0, tokens);
    return {begin * group, std::clamp<int64_t>(tile_keys.end - low, begin, tokens) * group};
  }
  bool all_visible() const {
    return tokens - 1 + low <= 0 && (visible_end ? visible_end[0] - first_key : high) >= keys;
  }
};

struct Tile {
  Band band;
  int64_t dim;         // of a product: head_dim of q and k, or of v, rounded up; the columns past head_dim are 0
  int64_t row_stride;  // rows rounded up

  Tile with_dim(int64_t other) const { return {band, other, row_stride}; }
};

// Lanes that the columns of every scratch matrix are rounded up to.
template <class T>
constexpr int64_t kLanes = 64 / sizeof(T);

// products[key][row] = keys[key] . rows_transposed[.][row]: where the key is visible to the row, other entries are left
// undefined.
template <class T>
void multiply(const Tile& tile, const T* keys, const T* rows_transposed, T* products);

// sums[row] += sum over its visible keys of weights[key][row] * values[key]. Weights of masked keys must be 0. They are
// multiplied too, a few per row, unless `exact`: for values that are NaN or Inf.
template <class T>
void accumulate_rows(const Tile& tile, const T* weights, const T* values, bool exact, T* sums);

// sums[key] += sum over the rows that attend to it of weights[key][row] * values[row], likewise.
template <class T>
void accumulate_keys(const Tile& tile, const T* weights, const T* values, bool exact, T* sums);

// What the online softmax knows of each row, [row_stride] each.
template <class T>
struct SoftmaxState {
  T* max;       // of the scores so far
  T* sum;       // of exp(score - max) so far
  T* rescale;   // out: factor that brings what was summed before this step to the new max
  T* tile_sum;  // scratch
};

// One step of the online softmax, of scores as p says. scores: products in, exp(score - max) out, 0 where hidden.
template <class T>
void softmax_step(const Tile& tile, const VarlenAttentionParams& p, T* scores, const SoftmaxState<T>& state);

// sums[row] *= factors[row]
template <class T>
void scale_rows(const Tile& tile, const T* factors, T* sums);

// scores: products in, probabilities out. grads: gradients of the probabilities in, of the products out. 0 where
// hidden.
template <class T>
void softmax_gradient(const Tile& tile, const VarlenAttentionParams& p, const T* lse, const T* delta, T* scores,
                      T* grads);

// transposed[c][r] = matrix[r][c]; columns from rows to row_stride become 0.
template <class T>
void transpose(const T* matrix, int64_t rows, int64_t dim, int64_t row_stride, T* transposed);

// a . b, size a multiple of kLanes
template <class T>
T dot(const T* a, const T* b, int64_t size);

template <class T>
bool all_finite(const T* values, int64_t count);

}  // namespace packing_ops::attention::cpu
