// One block per row of logits, read in 16-byte vectors. Formulas as in logps_cpu.cpp; the order of the sums depends on
// the columns alone, not on how many there are beside them, nor on their alignment.
#include "core/documents.cuh"
#include "core/launch.cuh"
#include "core/ptx/mma.cuh"
#include "core/vec.cuh"
#include "ops/logps/logps.h"

namespace packing_ops {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kUnroll = 4;  // vectors in flight per thread, in backward
constexpr int kPairs = 2;   // pairs of slots per thread
// Columns of one sum, as in logps_cpu.cpp. Sums of a row are added one by one in their order: chunks that begin at a
// multiple of kGrain give equal bits.
constexpr int kGrain = 1024;
constexpr int kHeld = 64;  // sums of a row that wait in shared memory

// --- targets ---

template <class Label>
struct Target {
  const Label* labels;
  int num_documents;
  int total;
  int64_t ignore_index;
  int64_t vocab;
  FaultFlag fault;

  __device__ Label load(int t) const { return t + 1 < total ? labels[t + 1] : Label(0); }
  __device__ int32_t operator()(int t, Label next, int document, Interval<int> s) const {
    if (t + 1 >= s.end || document >= num_documents || next == ignore_index) return -1;
    if (next >= 0 && next < vocab) return static_cast<int32_t>(next);
    fault.raise(Fault::kLabelOutside, t + 1);
    return -1;
  }
};

template <class Label>
__global__ void __launch_bounds__(kThreads)
    logps_targets_kernel(Documents documents, int32_t* targets, Target<Label> target, FaultFlag fault) {
  fill_slots<kThreads, kPairs>(documents, targets, target);
  flag_cu_seqlens(documents, fault);
}

// --- logits ---

// Half types: powers of 2 by the approximate instruction, whose error is far below their rounding; else powers of e.
template <class T>
constexpr bool kBinary = sizeof(T) == 2;

// Exponents to base e times this are exponents to the base that power_of takes.
template <class T>
constexpr accumulate_t<T> kLogE = kBinary<T> ? 1.4426950408889634 : 1;

template <class T>
__device__ accumulate_t<T> power_of(accumulate_t<T> exponent) {
  if constexpr (kBinary<T>) {
    return ptx::exp2_approx(exponent);
  } else if constexpr (sizeof(T) == 4) {
    return expf(exponent);
  } else {
    return exp(exponent);
  }
}

template <class Real>
__device__ constexpr Real infinity() {
  return static_cast<Real>(__builtin_huge_val());
}

// Online softmax, the statistics of some columns of a row. With exponents e = factor * (z - max):
// sum of power_of(e), and weighted, the sum of power_of(e) * e.
template <class T>
struct Sums {
  using Real = accumulate_t<T>;
  Real max, sum, weighted;

  // The same sums over a larger max. Columns that are all -inf weigh nothing.
  __device__ Sums with_max(Real larger, Real factor) const {
    if (max == larger || sum == Real(0)) return {larger, sum, weighted};
    const Real below = (max - larger) * factor;
    const Real scale = power_of<T>(below);
    return {larger, scale * sum, scale == Real(0) ? Real(0) : scale * (weighted + below * sum)};
  }
  template <bool kEntropy>
  __device__ void add(Real exponent) {
    const Real weight = power_of<T>(exponent);
    sum += weight;
    if (kEntropy) weighted += weight == Real(0) ? Real(0) : weight * exponent;
  }
  __device__ Sums plus(const Sums& other, Real factor) const {
    const Real larger = max > other.max ? max : other.max;
    const Sums a = with_max(larger, factor);
    const Sums b = other.with_max(larger, factor);
    return {larger, a.sum + b.sum, a.weighted + b.weighted};
  }
};

__device__ inline float max_of(float a, float b) {
  return fmaxf(a, b);
}
__device__ inline double max_of(double a, double b) {
  return fmax(a, b);
}

// Where the vectors of a row begin and end; the few elements before and after them go one by one.
template <class T>
struct Row {
  static constexpr int kVec = 16 / sizeof(T);
  using Vector = Vec<T, kVec>;
  int before, vectors, columns;

  __device__ Row(const T* row, int columns) : columns(columns) {
    const int apart = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    before = apart == 0 ? 0 : kVec - apart;
    if (before > columns) before = columns;
    vectors = (columns - before) / kVec;
  }
  // The column of the i-th element outside of the vectors.
  __device__ int single(int i) const { return i < before ? i : i + vectors * kVec; }
  __device__ int singles() const { return columns - vectors * kVec; }
  __device__ int column(int vector) const { return before + vector * kVec; }
};

template <class Real, bool kBias>
struct Scaling {
  const Real* bias;
  Real inv_temperature;

  __device__ Real biased(Real logit, int column) const { return kBias ? logit + bias[column] : logit; }
  __device__ Real operator()(Real logit, int column) const { return biased(logit, column) * inv_temperature; }
};

template <class T, bool kBias>
__device__ Scaling<accumulate_t<T>, kBias> scaling_of(const LogpsChunkParams& p) {
  return {static_cast<const accumulate_t<T>*>(p.bias), static_cast<accumulate_t<T>>(p.inv_temperature)};
}

// The statistics of kGrain columns from first on, by one warp; the same in each lane.
template <class T, bool kBias, bool kEntropy>
__device__ Sums<T> sums_of_grain(const T* logits, int first, int columns, const Scaling<accumulate_t<T>, kBias>& scaled,
                                 accumulate_t<T> factor) {
  using Real = accumulate_t<T>;
  using Vector = typename Row<T>::Vector;
  constexpr int kVec = Row<T>::kVec;
  constexpr int kVectors = kGrain / (kWarp * kVec);
  const int begin = first + static_cast<int>(threadIdx.x) % kWarp * kVec;
  Real values[kVectors][kVec];
  // Which lane adds which columns in which order is the same in both branches.
  if (first + kGrain <= columns && reinterpret_cast<uintptr_t>(logits) % 16 == 0) {
    Vector loaded[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      loaded[u] = *reinterpret_cast<const Vector*>(logits + begin + u * kWarp * kVec);
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[u][i] = scaled.biased(loaded[u].get(i), begin + u * kWarp * kVec + i);
    }
  } else {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int column = begin + u * kWarp * kVec + i;
        values[u][i] = column < columns ? scaled.biased(static_cast<Real>(logits[column]), column) : -infinity<Real>();
      }
    }
  }
  Sums<T> sums{-infinity<Real>(), 0, 0};
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) sums.max = max_of(sums.max, values[u][i]);
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sums.max = max_of(sums.max, __shfl_xor_sync(0xffffffffu, sums.max, offset));
  }
  const Real shift = sums.max == -infinity<Real>() ? Real(0) : sums.max;
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) sums.template add<kEntropy>((values[u][i] - shift) * factor);
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sums.sum += __shfl_xor_sync(0xffffffffu, sums.sum, offset);
    if (kEntropy) sums.weighted += __shfl_xor_sync(0xffffffffu, sums.weighted, offset);
  }
  return sums;
}

template <class T, bool kBias, bool kEntropy>
__global__ void __launch_bounds__(kThreads) logps_chunk_kernel(LogpsChunkParams p) {
  using Real = accumulate_t<T>;
  __shared__ Sums<T> held[kHeld];
  const int64_t row = blockIdx.x;
  if (p.targets[row] < 0) return;
  const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;
  const Scaling<Real, kBias> scaled = scaling_of<T, kBias>(p);
  const Real factor = scaled.inv_temperature * kLogE<T>;  // the temperature is left to the exponents
  const int columns = static_cast<int>(p.columns);
  const int grains = ceil_div(columns, kGrain);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  Real* max = static_cast<Real*>(p.max) + row;
  Real* sum = static_cast<Real*>(p.sum) + row;
  Real* weighted = static_cast<Real*>(p.weighted) + row;
  Sums<Real> all{*max, *sum, kEntropy ? *weighted : Real(0)};
  for (int first = 0; first < grains; first += kHeld) {
    const int count = min(kHeld, grains - first);
    for (int i = warp; i < count; i += kWarps) {
      const Sums<T> sums = sums_of_grain<T, kBias, kEntropy>(logits, (first + i) * kGrain, columns, scaled, factor);
      if (threadIdx.x % kWarp == 0) held[i] = sums;
    }
    __syncthreads();
    // Between grains and chunks: logits with their temperature, natural exponents.
    for (int i = 0; threadIdx.x == 0 && i < count; ++i) {
      const Sums<Real> grain{held[i].max * scaled.inv_temperature, held[i].sum, held[i].weighted / kLogE<T>};
      all = all.plus(grain, Real(1));
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  *max = all.max;
  *sum = all.sum;
  if (kEntropy) *weighted = all.weighted;
  const int64_t target = p.targets[row] - p.first;
  if (target >= 0 && target < p.columns) {
    static_cast<Real*>(p.chosen)[row] = scaled(static_cast<Real>(logits[target]), static_cast<int>(target));
  }
}

// With P = exp(z - lse), the entropy H, and chosen 1 at the target, else 0:
// d(z) = grad_logps * (chosen - P) - grad_entropy * P * (log P + H).
template <class T, bool kBias, bool kEntropy>
struct Gradient {
  using Real = accumulate_t<T>;
  Scaling<Real, kBias> scaled;
  Real lse, grad, plain, grad_entropy;  // plain: grad + grad_entropy * H
  int target;                           // column in this chunk, or -1

  __device__ Real operator()(Real logit, int column) const {
    const Real logp = scaled(logit, column) - lse;
    const Real weight = power_of<T>(logp * kLogE<T>);
    Real slope = plain;
    if (kEntropy) slope += weight == Real(0) ? Real(0) : grad_entropy * logp;
    const Real chosen = column == target ? grad : Real(0);
    return (chosen - weight * slope) * scaled.inv_temperature;
  }
};

template <class T, int kVec>
__device__ void set_zero(Vec<T, kVec>& vector) {
  vector = {};
}

template <class T, bool kBias, bool kEntropy>
__global__ void __launch_bounds__(kThreads) logps_chunk_backward_kernel(LogpsChunkParams p) {
  using Real = accumulate_t<T>;
  using Vector = typename Row<T>::Vector;
  constexpr int kVec = Row<T>::kVec;
  const int64_t row = blockIdx.x;
  T* logits = static_cast<T*>(p.logits) + row * p.row_stride;
  const Row<T> layout(logits, static_cast<int>(p.columns));
  Vector* vectors = reinterpret_cast<Vector*>(logits + layout.before);
  const int target = p.targets[row];
  const Real grad = static_cast<const Real*>(p.grad_logps)[row];
  const Real grad_entropy = kEntropy ? static_cast<const Real*>(p.grad_entropy)[row] : Real(0);
  if (target < 0 || (grad == Real(0) && grad_entropy == Real(0))) {
    for (int v = static_cast<int>(threadIdx.x); v < layout.vectors; v += kThreads) set_zero(vectors[v]);
    for (int i = static_cast<int>(threadIdx.x); i < layout.singles(); i += kThreads) {
      logits[layout.single(i)] = static_cast<T>(Real(0));
    }
    return;
  }
  const int64_t chunk_column = target - p.first;
  const Real entropy = kEntropy ? static_cast<const Real*>(p.entropy)[row] : Real(0);
  const Gradient<T, kBias, kEntropy> gradient{
      scaling_of<T, kBias>(p),
      static_cast<const Real*>(p.lse)[row],
      grad,
      grad + grad_entropy * entropy,
      grad_entropy,
      chunk_column >= 0 && chunk_column < p.columns ? static_cast<int>(chunk_column) : -1,
  };
  for (int first = static_cast<int>(threadIdx.x); first < layout.vectors; first += kThreads * kUnroll) {
    Vector loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kThreads < layout.vectors) loaded[u] = vectors[first + u * kThreads];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int v = first + u * kThreads;
      if (v >= layout.vectors) continue;
      const int column = layout.column(v);
#pragma unroll
      for (int i = 0; i < kVec; i += 2) {
        const Real one = gradient(loaded[u].get(i), column + i);
        loaded[u].set_pair(i, one, gradient(loaded[u].get(i + 1), column + i + 1));
      }
      vectors[v] = loaded[u];
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < layout.singles(); i += kThreads) {
    const int column = layout.single(i);
    logits[column] = static_cast<T>(gradient(static_cast<Real>(logits[column]), column));
  }
}

// f(element type) for a floating dtype.
template <class F>
void dispatch_logits(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat64:
      return f(double{});
    case DType::kBFloat16:
      return f(__nv_bfloat16{});
    case DType::kFloat16:
      return f(__half{});
    default:
      return f(float{});
  }
}

}  // namespace

void launch_logps_targets_cuda(const LogpsTargetsParams& p, const CudaLaunch& launch) {
  const unsigned grid = grid_for(ceil_div(p.documents.total, 2 * kPairs), kThreads);
  const auto run = [&](auto label) {
    using Label = decltype(label);
    const Target<Label> target{static_cast<const Label*>(p.labels.data),
                               static_cast<int>(p.documents.num_documents),
                               static_cast<int>(p.documents.total),
                               p.ignore_index,
                               p.vocab,
                               launch.fault};
    logps_targets_kernel<<<grid, kThreads, 0, stream_of(launch)>>>(p.documents, p.targets, target, launch.fault);
  };
  p.labels.is_int64 ? run(int64_t{}) : run(int32_t{});
  check_launch("logps_targets_kernel");
}

void launch_logps_chunk_cuda(const LogpsChunkParams& p, const CudaLaunch& launch) {
  if (p.rows == 0 || p.columns == 0) return;
  dispatch_logits(p.dtype, [&](auto element) {
    using T = decltype(element);
    const auto kernel = p.weighted
                            ? (p.bias ? logps_chunk_kernel<T, true, true> : logps_chunk_kernel<T, false, true>)
                            : (p.bias ? logps_chunk_kernel<T, true, false> : logps_chunk_kernel<T, false, false>);
    kernel<<<static_cast<unsigned>(p.rows), kThreads, 0, stream_of(launch)>>>(p);
  });
  check_launch("logps_chunk_kernel");
}

void launch_logps_chunk_backward_cuda(const LogpsChunkParams& p, const CudaLaunch& launch) {
  if (p.rows == 0 || p.columns == 0) return;
  dispatch_logits(p.dtype, [&](auto element) {
    using T = decltype(element);
    const auto kernel =
        p.grad_entropy
            ? (p.bias ? logps_chunk_backward_kernel<T, true, true> : logps_chunk_backward_kernel<T, false, true>)
            : (p.bias ? logps_chunk_backward_kernel<T, true, false> : logps_chunk_backward_kernel<T, false, false>);
    kernel<<<static_cast<unsigned>(p.rows), kThreads, 0, stream_of(launch)>>>(p);
  });
  check_launch("logps_chunk_backward_kernel");
}

}  // namespace packing_ops
