#include "ops/attention/cpu/tile.h"

#include <cmath>
#include <limits>

#include "core/macros.h"
#include "host/fast_exp.h"

namespace packing_ops::attention::cpu {

namespace {

template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

// --- matrix products ---

constexpr int64_t kDepthAtOnce = 128;  // longer sums are made of two, which round less
constexpr int kRowsAtOnce = 6;         // times one vector of columns: the sums stay in registers from AVX2 on

// result[i][j] (+)= sum over k of a(i, k) * b[k][j], with a(i, k) = a[i * a_row + k * a_depth], j < kLanes.
template <int kRows, bool kAdd, class T>
PACKING_OPS_INLINE void multiply_block(const T* __restrict a, int64_t a_row, int64_t a_depth, const T* __restrict b,
                                       int64_t b_row, Interval<int64_t> depth, T* __restrict result,
                                       int64_t result_row) {
  constexpr int kColumns = kLanes<T>;
  // Kept rolled, the inner loops become one vector each; unrolled early, GCC leaves them scalar.
  T sum[kRows][kColumns];
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 1
    for (int j = 0; j < kColumns; ++j) sum[i][j] = 0;
  }
  for (int64_t k = depth.begin; k < depth.end; ++k) {
    for (int i = 0; i < kRows; ++i) {
      const T factor = a[i * a_row + k * a_depth];
#pragma GCC unroll 1
      for (int j = 0; j < kColumns; ++j) sum[i][j] += factor * b[k * b_row + j];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    T* row = result + i * result_row;
#pragma GCC unroll 1
    for (int j = 0; j < kColumns; ++j) row[j] = kAdd ? row[j] + sum[i][j] : sum[i][j];
  }
}

// a(i, k) = data[i * row + k * depth]
template <class T>
struct Strided {
  const T* data;
  int64_t row;
  int64_t depth;
};

// The same for an interval of columns and 1 to kRowsAtOnce rows.
template <bool kAdd, class T>
PACKING_OPS_INLINE void multiply_rows(int64_t rows, Strided<T> a, const T* b, int64_t b_row, Interval<int64_t> depth,
                                      Interval<int64_t> columns, T* result, int64_t result_row) {
  for (int64_t j = columns.begin; j < columns.end; j += kLanes<T>) {
    switch (rows) {
      case 6:
        multiply_block<6, kAdd>(a.data, a.row, a.depth, b + j, b_row, depth, result + j, result_row);
        break;
      case 5:
        multiply_block<5, kAdd>(a.data, a.row, a.depth, b + j, b_row, depth, result + j, result_row);
        break;
      case 4:
        multiply_block<4, kAdd>(a.data, a.row, a.depth, b + j, b_row, depth, result + j, result_row);
        break;
      case 3:
        multiply_block<3, kAdd>(a.data, a.row, a.depth, b + j, b_row, depth, result + j, result_row);
        break;
      case 2:
        multiply_block<2, kAdd>(a.data, a.row, a.depth, b + j, b_row, depth, result + j, result_row);
        break;
      default:
        multiply_block<1, kAdd>(a.data, a.row, a.depth, b + j, b_row, depth, result + j, result_row);
    }
  }
}

// --- scores ---

// Columns that multiply() has filled for this key: those of the rows that attend to it, rounded out to whole vectors.
template <class T>
PACKING_OPS_INLINE Interval<int64_t> round_out_to_vectors(Interval<int64_t> rows) {
  if (rows.begin == rows.end) return rows;
  return {rows.begin / kLanes<T> * kLanes<T>, round_up(rows.end, kLanes<T>)};
}

PACKING_OPS_INLINE float fast_tanh(float x) {
  const float square = x * x;
  float q = -0.0061131828f;
  q = q * square + 0.0210100748f;
  q = q * square - 0.0538540669f;
  q = q * square + 0.1333279461f;
  q = q * square - 0.3333332837f;
  const float near_zero = q * square * x + x;
  const float size = x < 0 ? -x : x;
  const float decay = fast_exp(-2.0f * size);
  const float far = (1.0f - decay) / (1.0f + decay);
  return size < 0.625f ? near_zero : (x < 0 ? -far : far);
}

PACKING_OPS_INLINE double fast_tanh(double x) {
  return std::tanh(x);
}

// softcap 0 is off.
template <class T>
struct Scoring {
  T scale;
  T softcap;

  explicit Scoring(const VarlenAttentionParams& p)
      : scale(static_cast<T>(p.softmax_scale)), softcap(static_cast<T>(p.softcap)) {}
};

template <bool kCapped, class T>
PACKING_OPS_INLINE T score_of(const Scoring<T>& scoring, T product) {
  const T score = scoring.scale * product;
  return kCapped ? scoring.softcap * fast_tanh(score / scoring.softcap) : score;
}

template <bool kCapped, class T>
PACKING_OPS_INLINE void softmax_step_impl(const Tile& tile, const Scoring<T>& scoring, T* __restrict scores,
                                          const SoftmaxState<T>& state) {
  const int64_t stride = tile.row_stride;
  T* __restrict max = state.max;
  T* __restrict sum = state.sum;
  T* __restrict rescale = state.rescale;
  T* __restrict tile_sum = state.tile_sum;
  for (int64_t r = 0; r < stride; ++r) rescale[r] = max[r];
  for (int64_t key = 0; key < tile.band.keys; ++key) {
    T* __restrict row = scores + key * stride;
    const Interval<int64_t> visible = tile.band.rows_of({key, key + 1});
    const Interval<int64_t> computed = round_out_to_vectors<T>(visible);
    for (int64_t r = computed.begin; r < computed.end; ++r) row[r] = score_of<kCapped>(scoring, row[r]);
    std::fill(row + computed.begin, row + visible.begin, -kInfinity<T>);
    std::fill(row + visible.end, row + computed.end, -kInfinity<T>);
    for (int64_t r = computed.begin; r < computed.end; ++r) max[r] = row[r] > max[r] ? row[r] : max[r];
  }
  for (int64_t r = 0; r < stride; ++r) {
    tile_sum[r] = 0;
    rescale[r] = fast_exp(rescale[r] - (max[r] == -kInfinity<T> ? T(0) : max[r]));
  }
  for (int64_t key = 0; key < tile.band.keys; ++key) {
    T* __restrict row = scores + key * stride;
    const Interval<int64_t> computed = round_out_to_vectors<T>(tile.band.rows_of({key, key + 1}));
    std::fill(row, row + computed.begin, T(0));
    std::fill(row + computed.end, row + stride, T(0));
    for (int64_t r = computed.begin; r < computed.end; ++r) {
      // A row without a visible key so far keeps max -inf; -inf - 0 gives weight 0, where -inf - -inf would give NaN.
      row[r] = fast_exp(row[r] - (max[r] == -kInfinity<T> ? T(0) : max[r]));
      tile_sum[r] += row[r];
    }
  }
  for (int64_t r = 0; r < stride; ++r) sum[r] = sum[r] * rescale[r] + tile_sum[r];
}

template <bool kCapped, class T>
PACKING_OPS_INLINE void softmax_gradient_impl(const Tile& tile, const Scoring<T>& scoring, const T* __restrict lse,
                                              const T* __restrict delta, T* __restrict scores, T* __restrict grads) {
  const int64_t stride = tile.row_stride;
  for (int64_t key = 0; key < tile.band.keys; ++key) {
    T* __restrict row = scores + key * stride;
    T* __restrict grad = grads + key * stride;
    const Interval<int64_t> visible = tile.band.rows_of({key, key + 1});
    const Interval<int64_t> computed = round_out_to_vectors<T>(visible);
    for (int64_t r = computed.begin; r < computed.end; ++r) {
      const T score = score_of<kCapped>(scoring, row[r]);
      T slope = scoring.scale;
      if constexpr (kCapped) slope *= T(1) - (score / scoring.softcap) * (score / scoring.softcap);
      row[r] = fast_exp(score - lse[r]);
      grad[r] = row[r] * (grad[r] - delta[r]) * slope;
    }
    for (T* hidden : {row, grad}) {
      std::fill(hidden, hidden + visible.begin, T(0));
      std::fill(hidden + visible.end, hidden + stride, T(0));
    }
  }
}

}  // namespace

template <class T>
PACKING_OPS_MULTIVERSION void multiply(const Tile& tile, const T* keys, const T* rows_transposed, T* products) {
  for (int64_t i = 0; i < tile.band.keys; i += kRowsAtOnce) {
    const int64_t count = std::min<int64_t>(kRowsAtOnce, tile.band.keys - i);
    const Interval<int64_t> columns = round_out_to_vectors<T>(tile.band.rows_of({i, i + count}));
    T* to = products + i * tile.row_stride;
    const Interval<int64_t> first{0, std::min(tile.dim, kDepthAtOnce)};
    multiply_rows<false>(count, {keys + i * tile.dim, tile.dim, 1}, rows_transposed, tile.row_stride, first, columns,
                         to, tile.row_stride);
    if (first.end == tile.dim) continue;
    multiply_rows<true>(count, {keys + i * tile.dim, tile.dim, 1}, rows_transposed, tile.row_stride,
                        {first.end, tile.dim}, columns, to, tile.row_stride);
  }
}

template <class T>
PACKING_OPS_MULTIVERSION void accumulate_rows(const Tile& tile, const T* weights, const T* values, bool exact,
                                              T* sums) {
  const int64_t step = exact ? 1 : kRowsAtOnce;
  for (int64_t i = 0; i < tile.band.rows(); i += step) {
    const int64_t count = std::min(step, tile.band.rows() - i);
    multiply_rows<true>(count, {weights + i, 1, tile.row_stride}, values, tile.dim, tile.band.keys_of({i, i + count}),
                        {0, tile.dim}, sums + i * tile.dim, tile.dim);
  }
}

template <class T>
PACKING_OPS_MULTIVERSION void accumulate_keys(const Tile& tile, const T* weights, const T* values, bool exact,
                                              T* sums) {
  const int64_t step = exact ? 1 : kRowsAtOnce;
  for (int64_t i = 0; i < tile.band.keys; i += step) {
    const int64_t count = std::min(step, tile.band.keys - i);
    multiply_rows<true>(count, {weights + i * tile.row_stride, tile.row_stride, 1}, values, tile.dim,
                        tile.band.rows_of({i, i + count}), {0, tile.dim}, sums + i * tile.dim, tile.dim);
  }
}

template <class T>
PACKING_OPS_MULTIVERSION void softmax_step(const Tile& tile, const VarlenAttentionParams& p, T* scores,
                                           const SoftmaxState<T>& state) {
  const Scoring<T> scoring(p);
  if (scoring.softcap > 0) {
    softmax_step_impl<true>(tile, scoring, scores, state);
  } else {
    softmax_step_impl<false>(tile, scoring, scores, state);
  }
}

template <class T>
PACKING_OPS_MULTIVERSION void softmax_gradient(const Tile& tile, const VarlenAttentionParams& p, const T* lse,
                                               const T* delta, T* scores, T* grads) {
  const Scoring<T> scoring(p);
  if (scoring.softcap > 0) {
    softmax_gradient_impl<true>(tile, scoring, lse, delta, scores, grads);
  } else {
    softmax_gradient_impl<false>(tile, scoring, lse, delta, scores, grads);
  }
}

template <class T>
PACKING_OPS_MULTIVERSION void scale_rows(const Tile& tile, const T* factors, T* sums) {
  for (int64_t r = 0; r < tile.band.rows(); ++r) {
    for (int64_t c = 0; c < tile.dim; ++c) sums[r * tile.dim + c] *= factors[r];
  }
}

template <class T>
PACKING_OPS_MULTIVERSION void transpose(const T* matrix, int64_t rows, int64_t dim, int64_t row_stride, T* transposed) {
  for (int64_t c = 0; c < dim; ++c) {
    T* __restrict to = transposed + c * row_stride;
    for (int64_t r = 0; r < rows; ++r) to[r] = matrix[r * dim + c];
    std::fill(to + rows, to + row_stride, T(0));
  }
}

template <class T>
PACKING_OPS_MULTIVERSION T dot(const T* a, const T* b, int64_t size) {
  // A sum per lane, then the lanes in order.
  T lanes[kLanes<T>] = {};
  for (int64_t i = 0; i < size; i += kLanes<T>) {
#pragma GCC unroll 1
    for (int64_t lane = 0; lane < kLanes<T>; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  }
  T sum = 0;
  for (const T lane : lanes) sum += lane;
  return sum;
}

template <class T>
PACKING_OPS_MULTIVERSION bool all_finite(const T* values, int64_t count) {
  // Inf and NaN are the values whose difference with themselves is not 0; counted, so that the loop stays a vector.
  int64_t odd = 0;
  for (int64_t i = 0; i < count; ++i) odd += values[i] - values[i] != 0;
  return odd == 0;
}

#define PACKING_OPS_TILE(T)                                                                                 \
  template void multiply<T>(const Tile&, const T*, const T*, T*);                                           \
  template void accumulate_rows<T>(const Tile&, const T*, const T*, bool, T*);                              \
  template void accumulate_keys<T>(const Tile&, const T*, const T*, bool, T*);                              \
  template void softmax_step<T>(const Tile&, const VarlenAttentionParams&, T*, const SoftmaxState<T>&);     \
  template void softmax_gradient<T>(const Tile&, const VarlenAttentionParams&, const T*, const T*, T*, T*); \
  template void scale_rows<T>(const Tile&, const T*, T*);                                                   \
  template void transpose<T>(const T*, int64_t, int64_t, int64_t, T*);                                      \
  template T dot<T>(const T*, const T*, int64_t);                                                           \
  template bool all_finite<T>(const T*, int64_t);

PACKING_OPS_TILE(float)
PACKING_OPS_TILE(double)

}  // namespace packing_ops::attention::cpu
