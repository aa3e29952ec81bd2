// dq, dk, dg, dbeta and dskip, when both states of every chunk are known: a block for a chunk and a head of k, whose
// heads of v it takes one after the other.
#include "ops/scan/scan_gates.h"
#include "ops/scan/scan_gradients.cuh"

namespace packing_ops::scan {

namespace gradients {

namespace {

template <class T, int kDim, bool kCorrects>
struct Gradients {
  static constexpr int kTiles = kDim / 16;        // of a warp: 16 rows, half of the columns
  static constexpr int kPairTiles = kChunk / 16;  // the same of a matrix [64, 64]
  static constexpr int kPiece = piece_of<T, kDim>();

  const Shared<T, kDim, kCorrects>& shared;
  int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  int half = static_cast<int>(threadIdx.x) / 128;
  int column = half * kDim / 2;
  int pair_column = half * kChunk / 2;
  float dq[kTiles][4] = {};
  float dk[kTiles][4] = {};

  // to += scales products; the rows' dot products with `rows` are kept.
  __device__ __forceinline__ void add(float (&products)[kTiles][4], Tile<T, kDim> rows, float (&to)[kTiles][4],
                                      RowSum kind, const float* scales, float sign, const float* more) {
    float dots[2] = {};
    const int first = row + lane_of() / 4;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        const int i = first + 8 * lower;
        const float scale = sign * scales[i];
        const float factor = more ? more[i] : 1.0f;
        const Vec<T, 2> pair = rows.pair(i, column + 8 * tile + lane_of() % 4 * 2);
        const float x = scale * products[tile][2 * lower];
        const float y = scale * products[tile][2 * lower + 1];
        dots[lower] += pair.get(0) * x + pair.get(1) * y;
        to[tile][2 * lower] += factor * x;
        to[tile][2 * lower + 1] += factor * y;
        products[tile][2 * lower] = products[tile][2 * lower + 1] = 0.0f;
      }
    }
    store_row_sums(dots[0], dots[1], row, shared.sums->rows[kind]);
  }

  // What the states have to do with a head's rows, and the products that dscores and dcorrections are made of.
  template <int kStages>
  __device__ __forceinline__ void through_states(const Work<T>& work, float (&of_scores)[kPairTiles][4],
                                                 float (&of_corrections)[kPairTiles][4]) {
    const RowScales& scales = shared.sums->scales;
    Steps<T, kDim, kStages, kCorrects> steps{work, shared, static_cast<int>(work.p.head_dim_v) / kPiece};
    float products[kTiles][4] = {};
    float dot_values = 0.0f;
    float dot_states = 0.0f;
    if constexpr (kStages == 2) steps.load(kDout, 0, 0);
    steps.template each<kDout>([&](const Stage<T, kDim>& stage, int) {
      multiply(products, stage.rows, row, stage.state, column, 0, kPiece);
      multiply_pairs(of_scores, stage);
    });
    add(products, shared.queries, dq, kOfQueries, scales.q, 1.0f, nullptr);
    if constexpr (kCorrects) {
      steps.template each<kDcorrected>([&](const Stage<T, kDim>& stage, int piece) {
        Vector values[kOfValues];
        load_values(work, piece, values);
        multiply(products, stage.rows, row, stage.state, column, 0, kPiece);
        multiply_pairs(of_corrections, stage);
        dot_values += dot_of_values(work, stage, values);
      });
      add(products, shared.keys, dk, kOfKeys, scales.k, -1.0f, scales.beta);
    }
    steps.template each<kCorrected>([&](const Stage<T, kDim>& stage, int piece) {
      Vector states[kOfStates];
      load_states(work, piece, states);
      multiply(products, stage.rows, row, stage.state, column, 0, kPiece);
      dot_states += dot_of_states(stage, states);
    });
    add(products, shared.keys, dk, kOfEnd, scales.to_end, 1.0f, kCorrects ? nullptr : scales.beta);
    store_dots(dot_values, dot_states);
  }

  __device__ __forceinline__ void multiply_pairs(float (&pairs)[kPairTiles][4], const Stage<T, kDim>& stage) const {
    multiply<Order::kPlain, Order::kTransposed>(pairs, stage.rows, row, stage.corrected, pair_column, 0, kPiece);
  }

  // What the sums below read of memory, in vectors: loaded before a step's products, so that they hide its latency.
  using Vector = Vec<T, 16 / static_cast<int>(sizeof(T))>;
  static constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  static constexpr int kOfValues = kChunk * kPiece / (kVector * kThreads);
  static constexpr int kOfStates = kDim * kPiece / (kVector * kThreads);
  static_assert(kOfValues > 0 && kOfStates > 0);

  __device__ static int value_column(int i) { return (static_cast<int>(threadIdx.x) % 4 + 4 * i) * kVector; }
  __device__ static int state_at(int i) { return (static_cast<int>(threadIdx.x) + kThreads * i) * kVector; }

  __device__ __forceinline__ void load_values(const Work<T>& work, int piece, Vector (&to)[kOfValues]) const {
    const int row = static_cast<int>(threadIdx.x) / 4;
    if (row >= work.chunk.rows) return;
    const HeadRows& v = work.p.v;
    const T* values = static_cast<const T*>(v.data) + (work.chunk.row + row) * v.token + work.head * v.head + piece;
#pragma unroll
    for (int i = 0; i < kOfValues; ++i) to[i] = *reinterpret_cast<const Vector*>(values + value_column(i));
  }

  __device__ __forceinline__ void load_states(const Work<T>& work, int piece, Vector (&to)[kOfStates]) const {
    const T* states = work.state_of(work.chunks.states) + piece * kDim;
#pragma unroll
    for (int i = 0; i < kOfStates; ++i) to[i] = *reinterpret_cast<const Vector*>(states + state_at(i));
  }

  // dcorrected . v of a row, four threads each.
  __device__ __forceinline__ float dot_of_values(const Work<T>& work, const Stage<T, kDim>& stage,
                                                 const Vector (&values)[kOfValues]) const {
    const int row = static_cast<int>(threadIdx.x) / 4;
    if (row >= work.chunk.rows) return 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kOfValues; ++i) sum += dot(values[i], stage.rows.at(row, value_column(i)));
    return sum;
  }

  __device__ __forceinline__ float dot_of_states(const Stage<T, kDim>& stage, const Vector (&states)[kOfStates]) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kOfStates; ++i) {
      sum += dot(states[i], stage.state.at(state_at(i) / kDim, state_at(i) % kDim));
    }
    return sum;
  }

  __device__ static __forceinline__ float dot(const Vector& x, const T* shared_row) {
    const Vector y = *reinterpret_cast<const Vector*>(shared_row);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum += x.get(i) * y.get(i);
    return sum;
  }

  __device__ __forceinline__ void store_dots(float values, float states) const {
    for (int offset = 1; offset < 32; offset *= 2) {
      if (offset < 4) values += __shfl_xor_sync(0xffffffffu, values, offset);
      states += __shfl_xor_sync(0xffffffffu, states, offset);
    }
    if (threadIdx.x % 4 == 0) shared.sums->values[threadIdx.x / 4] = values;
    if (threadIdx.x % 32 == 0) shared.sums->through[threadIdx.x / 32] = states;
  }

  // The gradients of scores and corrections without their scales of rows, as factors of keys and queries; the sums of
  // their products with what they are gradients of, by rows and columns.
  __device__ __forceinline__ void through_pairs(float scale, float (&of_scores)[kPairTiles][4],
                                                float (&of_corrections)[kPairTiles][4]) {
    float scores[kPairTiles][4] = {};
    float corrections[kPairTiles][4] = {};
    multiply<Order::kPlain, Order::kTransposed>(scores, shared.queries, row, shared.keys, pair_column, 0, kDim);
    if constexpr (kCorrects) {
      multiply<Order::kPlain, Order::kTransposed>(corrections, shared.keys, row, shared.keys, pair_column, 0, kDim);
    }
    const RowScales& scales = shared.sums->scales;
    const int first = row + lane_of() / 4;
    float of_rows[3][2] = {};  // of scores, corrections (those on the diagonal without any) and skip
    float of_columns[kPairTiles][2] = {};
#pragma unroll
    for (int tile = 0; tile < kPairTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = first + e / 2 * 8;
        const int j = pair_column + 8 * tile + lane_of() % 4 * 2 + e % 2;
        const float decayed = decay<T>(j <= i ? scales.sums[i] - scales.sums[j] : 0.0f);  // no branch
        const float between = j <= i ? decayed * scales.k_norms[j] : 0.0f;
        const float score = j <= i ? scale * scales.q_norms[i] * between * of_scores[tile][e] : 0.0f;
        const float of_score = j < i ? score * scores[tile][e] : 0.0f;  // the diagonal's is of no g
        if constexpr (kCorrects) {
          const float correction = j < i ? -scales.k_norms[i] * between * of_corrections[tile][e] : 0.0f;
          const float of_correction = j < i ? correction * corrections[tile][e] : 0.0f;
          of_rows[0][e / 2] += of_score;
          of_rows[1][e / 2] += of_correction;
          of_columns[tile][e % 2] += of_score + scales.beta[i] * of_correction;
          of_scores[tile][e] = score;
          of_corrections[tile][e] = scales.beta[i] * correction;
        } else {
          of_rows[0][e / 2] += scales.beta[j] * of_score;
          of_rows[1][e / 2] += j == i ? score * scores[tile][e] : 0.0f;
          of_rows[2][e / 2] += j == i ? of_scores[tile][e] : 0.0f;
          of_columns[tile][e % 2] += of_score;
          of_scores[tile][e] = scales.beta[j] * score;
        }
      }
    }
    store_row_sums(of_rows[0][0], of_rows[0][1], row, shared.sums->rows[kOfScores]);
    store_row_sums(of_rows[1][0], of_rows[1][1], row, shared.sums->rows[kCorrects ? kOfCorrections : kOfDiagonal]);
    if constexpr (!kCorrects) store_row_sums(of_rows[2][0], of_rows[2][1], row, shared.sums->rows[kOfSkip]);
    store_column_sums(of_columns);
    const auto store = [&](Tile<T, kChunk> tile) {
      return [tile](int i, int j, float x, float y) { tile.set_pair(i, j, x, y); };
    };
    for_each_pair(of_scores, row, pair_column, store(shared.dscores));
    if constexpr (kCorrects) for_each_pair(of_corrections, row, pair_column, store(shared.dcorrections));
  }

  __device__ __forceinline__ void store_column_sums(float (&sums)[kPairTiles][2]) const {
#pragma unroll
    for (int tile = 0; tile < kPairTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float sum = sums[tile][j];
        for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (lane_of() < 4) shared.sums->columns[row / 16][pair_column + 8 * tile + lane_of() * 2 + j] = sum;
      }
    }
  }

  __device__ __forceinline__ void add_pairs() {
    multiply(dq, shared.dscores, row, shared.keys, column, 0, row + 16);
    multiply<Order::kTransposed, Order::kPlain>(dk, shared.dscores, row, shared.queries, column, row, kChunk);
    if constexpr (kCorrects) {
      multiply(dk, shared.dcorrections, row, shared.keys, column, 0, row + 16);
      multiply<Order::kTransposed, Order::kPlain>(dk, shared.dcorrections, row, shared.keys, column, row, kChunk);
    }
  }

  // dg, dbeta and dskip of a head, by the first warp.
  __device__ void store_gates(const Work<T>& work) const {
    const Sums& sums = *shared.sums;
    const auto of_row = [&](RowSum kind, int i) { return sums.rows[kind][0][i] + sums.rows[kind][1][i]; };
    float of_states = 0.0f;
    for (float part : sums.through) of_states += part;
    float of_end = 0.0f;
    float before[kChunk / 32];  // what earlier rows have added to the state, seen from its end
    for (int first = 0; first < kChunk; first += 32) {
      const float factor = kCorrects ? 1.0f : sums.scales.beta[first + lane_of()];
      const float upto = inclusive_sum(factor * of_row(kOfEnd, first + lane_of()));
      const float earlier = __shfl_up_sync(0xffffffffu, upto, 1);
      before[first / 32] = of_end + (lane_of() == 0 ? 0.0f : earlier);
      of_end += __shfl_sync(0xffffffffu, upto, 31);
    }
    float after = sums.scales.through[0] * of_states;
    for (int first = 0; first < kChunk; first += 32) {
      const int i = kChunk - 1 - first - lane_of();
      const float beta = sums.scales.beta[i];
      float columns = 0.0f;
      for (int part = 0; part < 4; ++part) columns += sums.columns[part][i];
      const float learned = kCorrects ? of_row(kOfKeys, i) + of_row(kOfCorrections, i) : columns;
      const float lost = kCorrects ? columns - beta * learned : beta * columns;
      const float gradient = of_row(kOfQueries, i) + of_row(kOfScores, i) - lost;
      const float sum = after + inclusive_sum(gradient);
      after = __shfl_sync(0xffffffffu, sum, 31);
      const float early = __shfl_sync(0xffffffffu, before[1 - first / 32], 31 - lane_of());
      if (i >= work.chunk.rows) continue;
      const int64_t at = (work.chunk.row + i) * work.p.num_v_heads + work.head;
      const float more = kCorrects ? sums.values[i] : of_row(kOfEnd, i) + of_row(kOfDiagonal, i);
      store_gate(work, at, {sum + early, more + learned});
      if constexpr (!kCorrects) static_cast<float*>(work.p.dskip)[at] = of_row(kOfSkip, i);
    }
  }

  __device__ void store_gate(const Work<T>& work, int64_t at, Gates<float> gradients) const {
    if constexpr (!kCorrects) {
      const Gates<float> gates = gates_of<float>(work.p, kCorrects, at, work.head);
      gradients = gradients_of_step(work.p, gates, work.head, gradients.g, gradients.beta);
    }
    static_cast<float*>(work.p.dg)[at] = gradients.g;
    static_cast<float*>(work.p.dbeta)[at] = gradients.beta;
  }

  // Through the norms, if there are any, and to memory.
  __device__ void store(const ScanBackwardParams& p, const Chunk& chunk, int64_t k_head, bool of_queries) {
    float (&gradient)[kTiles][4] = of_queries ? dq : dk;
    const Tile<T, kDim> rows = of_queries ? shared.queries : shared.keys;
    const float* norms = of_queries ? shared.sums->scales.q_norms : shared.sums->scales.k_norms;
    const auto& dots = shared.sums->rows[of_queries];
    if (p.l2norm) {
      float upper = 0.0f;
      float lower = 0.0f;
      for_each_pair(gradient, row, column, [&](int i, int j, float x, float y) {
        const Vec<T, 2> pair = rows.pair(i, j);
        const float dot = pair.get(0) * x + pair.get(1) * y;
        if (i == row + lane_of() / 4) {
          upper += dot;
        } else {
          lower += dot;
        }
      });
      store_row_sums(upper, lower, row, shared.sums->rows[of_queries]);
      __syncthreads();
    }
    T* to = static_cast<T*>(of_queries ? p.dq : p.dk) + (chunk.row * p.num_k_heads + k_head) * kDim;
    for_each_pair(gradient, row, column, [&](int i, int j, float x, float y) {
      if (i >= chunk.rows) return;
      const Vec<T, 2> pair = rows.pair(i, j);
      const float along = p.l2norm ? (dots[0][i] + dots[1][i]) * norms[i] * norms[i] : 0.0f;
      store_pair(to + i * p.num_k_heads * kDim + j, x - along * pair.get(0), y - along * pair.get(1));
    });
  }
};

template <class T>
__device__ void zero_rows(const ScanBackwardParams& p, const Chunk& chunk, int64_t k_head) {
  const int64_t heads = p.num_v_heads / p.num_k_heads;
  for (int64_t i = threadIdx.x; i < chunk.rows * p.head_dim; i += kThreads) {
    const int64_t at = ((chunk.row + i / p.head_dim) * p.num_k_heads + k_head) * p.head_dim + i % p.head_dim;
    static_cast<T*>(p.dq)[at] = static_cast<T*>(p.dk)[at] = static_cast<T>(0.0f);
  }
  for (int64_t i = threadIdx.x; i < chunk.rows * heads; i += kThreads) {
    const int64_t at = (chunk.row + i / heads) * p.num_v_heads + k_head * heads + i % heads;
    static_cast<float*>(p.dg)[at] = static_cast<float*>(p.dbeta)[at] = 0.0f;
    if (p.dskip) static_cast<float*>(p.dskip)[at] = 0.0f;
  }
}

template <class T, int kDim, int kStages, bool kCorrects>
__global__ void __launch_bounds__(kThreads, 1) gradients_kernel(ScanBackwardParams p, Chunks chunks) {
  extern __shared__ __align__(128) uint8_t shared[];
  const Chunk chunk = chunk_at(p.documents, blockIdx.x);
  const int64_t k_head = blockIdx.y;
  if (chunk.padding) return zero_rows<T>(p, chunk, k_head);
  if (chunk.rows == 0) return;
  const Shared<T, kDim, kCorrects> own(shared);
  const auto load = [&](const HeadRows& rows, Tile<T, kDim> tile) {
    const T* from = static_cast<const T*>(rows.data) + chunk.row * rows.token + k_head * rows.head;
    load_rows<kThreads, kChunk>(tile, from, rows.token, chunk.rows);
  };
  load(p.k, own.keys);
  load(p.q, own.queries);
  Gradients<T, kDim, kCorrects> gradients{own};
  const int64_t heads = p.num_v_heads / p.num_k_heads;
  for (int64_t head = k_head * heads; head < (k_head + 1) * heads; ++head) {
    const Work<T> work{p, chunks, chunk, chunk_index(p, blockIdx.x, head), head};
    load_bytes<kThreads>(&own.sums->scales, chunks.scales + work.index, sizeof(RowScales));
    float of_scores[kChunk / 16][4] = {};
    float of_corrections[kChunk / 16][4] = {};
    gradients.template through_states<kStages>(work, of_scores, of_corrections);
    gradients.through_pairs(static_cast<float>(p.scale), of_scores, of_corrections);
    __syncthreads();
    gradients.add_pairs();
    if (threadIdx.x < 32) gradients.store_gates(work);
    __syncthreads();  // before the next head's sums
  }
  gradients.store(p, chunk, k_head, true);
  __syncthreads();
  gradients.store(p, chunk, k_head, false);
}

}  // namespace

}  // namespace gradients

template <class T>
void launch_gradients(const ScanBackwardParams& p, const Chunks& chunks, const CudaLaunch& launch) {
  const auto with_stages = [&](auto dim, auto corrects, auto stages) {
    const dim3 grid(static_cast<unsigned>(chunk_places(p.documents)), static_cast<unsigned>(p.num_k_heads));
    constexpr int kBytes = gradients::Shared<T, dim, corrects>::bytes(stages);
    const auto kernel = gradients::gradients_kernel<T, dim, stages, corrects>;
    allow_shared(reinterpret_cast<const void*>(kernel), kBytes);
    kernel<<<grid, gradients::kThreads, kBytes, stream_of(launch)>>>(p, chunks);
    check_launch("gradients_kernel");
  };
  const auto with_dim = [&](auto dim) {
    dispatch_corrects(p, [&](auto corrects) {
      constexpr int kBytes = gradients::Shared<T, dim, corrects>::bytes(2);
      dispatch_stages<T, kBytes>([&](auto stages) { with_stages(dim, corrects, stages); });
    });
  };
  if (p.head_dim == 64) return with_dim(std::integral_constant<int, 64>{});
  if (p.head_dim == 128) return with_dim(std::integral_constant<int, 128>{});
  with_dim(std::integral_constant<int, 256>{});
}

template void launch_gradients<float>(const ScanBackwardParams&, const Chunks&, const CudaLaunch&);
template void launch_gradients<__half>(const ScanBackwardParams&, const Chunks&, const CudaLaunch&);
template void launch_gradients<__nv_bfloat16>(const ScanBackwardParams&, const Chunks&, const CudaLaunch&);

}  // namespace packing_ops::scan
