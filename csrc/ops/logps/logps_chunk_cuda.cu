// One block per row of logits, read in 16-byte vectors. Formulas as in logps_cpu.cpp.
#include "ops/logps/logps.h"
#include "ops/logps/logps_softmax.cuh"

namespace packing_ops {

namespace {

// f of LogpsChunkParams, the row's scale and its mask.
template <class T, bool kAltered, bool kMasked>
struct Scaling {
  using Real = accumulate_t<T>;
  const Real* bias;
  const uint32_t* __restrict__ mask;  // of the row
  Real inner, scale;

  __device__ Scaling(const LogpsChunkParams& p, int64_t row)
      : bias(static_cast<const Real*>(p.bias)),
        mask(kMasked ? p.mask + row * ceil_div(p.columns, 32) : nullptr),
        inner(static_cast<Real>(p.inner)),
        scale(static_cast<const Real*>(p.scales)[row]) {}
  template <int kCount>
  __device__ uint32_t allowed(int column) const {
    if (!kMasked) return ~0u;
    const int place = column % 32;
    const uint32_t bits = mask[column / 32] >> place;
    return place > 32 - kCount ? bits | mask[column / 32 + 1] << (32 - place) : bits;
  }
  template <int kCount>
  __device__ void alter(Real (&logits)[kCount], int column) const {
    if (!kAltered) return;
    if (bias) add_bias(bias + column, logits);
    if (inner == Real(0)) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) logits[i] = tanh_of<T>(inner * logits[i]);
  }
  // d(z) to d(logit).
  __device__ Real slope(Real altered) const {
    if (!kAltered || inner == Real(0)) return scale;
    return scale * inner * (Real(1) - altered * altered);
  }
};

// The statistics of a row so far, in memory.
template <class Real>
struct State {
  Real *max, *sum, *chosen, *weighted, *squares, *total, *top1;

  __device__ State(const LogpsChunkParams& p, int64_t row) {
    const auto at = [row](void* rows) { return static_cast<Real*>(rows) + row; };
    max = at(p.max);
    sum = at(p.sum);
    chosen = at(p.chosen);
    weighted = at(p.weighted);
    squares = at(p.squares);
    total = at(p.total);
    top1 = at(p.top1);
  }
  template <bool kMore>
  __device__ Sums<Real> load() const {
    if constexpr (kMore) return {*max, *sum, *weighted, *squares, *total, *top1};
    return {*max, *sum, 0, 0, 0, 0};
  }
  template <bool kMore>
  __device__ void store(const Sums<Real>& all) const {
    *max = all.max;
    *sum = all.sum;
    if constexpr (kMore) {
      *weighted = all.weighted;
      *squares = all.squares;
      *total = all.total;
      *top1 = all.top1;
    }
  }
};

template <class T, bool kAltered, bool kMasked, bool kMore>
__global__ void __launch_bounds__(kThreads) logps_chunk_kernel(LogpsChunkParams p, FaultFlag fault) {
  using Real = accumulate_t<T>;
  __shared__ Sums<T> held[kHeld];
  const int64_t row = blockIdx.x;
  if (p.targets[row] < 0) return;
  const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;
  Scaling<T, kAltered, kMasked> scaling(p, row);
  if (!(scaling.scale > Real(0) && scaling.scale < infinity<Real>())) {
    fault.raise(Fault::kTemperatureOutside, row);
    scaling.scale = NAN;
  }
  const Real factor = scaling.scale * kLogE<T>;  // the temperature is left to the exponents
  const int columns = static_cast<int>(p.columns);
  const int grains = ceil_div(columns, kGrain);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const State<Real> state(p, row);
  Sums<Real> all = state.template load<kMore>();
  for (int first = 0; first < grains; first += kHeld) {
    const int count = min(kHeld, grains - first);
    for (int i = warp; i < count; i += kWarps) {
      const Sums<T> sums = sums_of_grain<T, kMore>(logits, (first + i) * kGrain, columns, scaling, factor);
      if (threadIdx.x % kWarp == 0) held[i] = sums;
    }
    __syncthreads();
    // Between grains and chunks: logits with their temperature, natural exponents, entries of the vocabulary.
    for (int i = 0; threadIdx.x == 0 && i < count; ++i) {
      const Sums<T> own = held[i];
      const Sums<Real> grain{own.max * scaling.scale,   own.sum,
                             own.weighted / kLogE<T>,   own.squares,
                             own.total * scaling.scale, own.top1 + static_cast<Real>(p.first)};
      all = all.plus(grain, Real(1));
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  state.template store<kMore>(all);
  const int64_t target = p.targets[row] - p.first;
  if (target >= 0 && target < p.columns) {
    const auto column = static_cast<int>(target);
    const bool allowed = (scaling.template allowed<1>(column) & 1) != 0;
    const Real z = scaling.scale * altered(scaling, static_cast<Real>(logits[target]), column);
    *state.chosen = allowed ? z : -infinity<Real>();
  }
}

// d(logit), as LogpsChunkParams has d(z).
template <class T, bool kAltered, bool kMasked, bool kMore>
struct Gradient {
  using Real = accumulate_t<T>;
  Scaling<T, kAltered, kMasked> scaling;
  Real lse, grad, plain, by_log = 0, by_p = 0, even = 0;
  int target;  // column in this chunk, or -1

  __device__ Gradient(const LogpsChunkParams& p, int64_t row) : scaling(p, row) {
    const auto at = [row](const void* rows) { return static_cast<const Real*>(rows)[row]; };
    lse = at(p.lse);
    grad = at(p.grad);
    plain = at(p.plain);
    if (kMore) {
      by_log = at(p.by_log);
      by_p = at(p.by_p);
      even = at(p.even);
    }
    const int64_t column = p.targets[row] - p.first;
    target = column >= 0 && column < p.columns ? static_cast<int>(column) : -1;
  }
  __device__ bool is_zero() const {
    const Real zero = 0;
    return grad == zero && plain == zero && (!kMore || (by_log == zero && by_p == zero && even == zero));
  }
  __device__ Real operator()(Real logit, int column) const {
    const Real value = altered(scaling, logit, column);
    const Real logp = value * scaling.scale - lse;
    const Real weight = power_of<T>(logp * kLogE<T>);
    Real slope = plain;
    if (kMore) slope += weight == Real(0) ? Real(0) : by_log * logp - by_p * weight;
    Real of_z = (column == target ? grad : Real(0)) - weight * slope;
    if (kMore) of_z += even;
    return of_z * scaling.slope(value);
  }
};

template <class T, bool kAltered, bool kMasked, bool kMore>
__global__ void __launch_bounds__(kThreads) logps_chunk_backward_kernel(LogpsChunkParams p) {
  using Real = accumulate_t<T>;
  using Vector = typename Row<T>::Vector;
  constexpr int kVec = Row<T>::kVec;
  const int64_t row = blockIdx.x;
  T* logits = static_cast<T*>(p.logits) + row * p.row_stride;
  const Row<T> layout(logits, static_cast<int>(p.columns));
  Vector* vectors = reinterpret_cast<Vector*>(logits + layout.before);
  const Gradient<T, kAltered, kMasked, kMore> gradient(p, row);
  if (p.targets[row] < 0 || gradient.is_zero()) {
    for (int v = static_cast<int>(threadIdx.x); v < layout.vectors; v += kThreads) set_zero(vectors[v]);
    for (int i = static_cast<int>(threadIdx.x); i < layout.singles(); i += kThreads) {
      logits[layout.single(i)] = static_cast<T>(Real(0));
    }
    return;
  }
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
      const uint32_t allowed = gradient.scaling.template allowed<kVec>(column);
#pragma unroll
      for (int i = 0; i < kVec; i += 2) {
        const Real one = gradient(loaded[u].get(i), column + i);
        const Real two = gradient(loaded[u].get(i + 1), column + i + 1);
        loaded[u].set_pair(i, (allowed >> i & 1) != 0 ? one : Real(0), (allowed >> i & 2) != 0 ? two : Real(0));
      }
      vectors[v] = loaded[u];
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < layout.singles(); i += kThreads) {
    const int column = layout.single(i);
    const bool allowed = (gradient.scaling.template allowed<1>(column) & 1) != 0;
    logits[column] = static_cast<T>(allowed ? gradient(static_cast<Real>(logits[column]), column) : Real(0));
  }
}

// f(element type, kAltered, kMasked, kMore) as constants. A mask has a separate instance, so that it costs nobody
// else.
template <class F>
void dispatch_chunk(const LogpsChunkParams& p, bool more, F&& f) {
  dispatch_logits(p.dtype, [&](auto element) {
    const auto with = [&](auto altered, auto masked) {
      more ? f(element, altered, masked, std::true_type{}) : f(element, altered, masked, std::false_type{});
    };
    if (p.mask) return with(std::true_type{}, std::true_type{});
    p.bias || p.inner != 0 ? with(std::true_type{}, std::false_type{}) : with(std::false_type{}, std::false_type{});
  });
}

}  // namespace

void launch_logps_chunk_cuda(const LogpsChunkParams& p, const CudaLaunch& launch) {
  if (p.rows == 0 || p.columns == 0) return;
  dispatch_chunk(p, p.weighted != nullptr, [&](auto element, auto altered, auto masked, auto more) {
    const auto kernel = logps_chunk_kernel<decltype(element), altered.value, masked.value, more.value>;
    kernel<<<static_cast<unsigned>(p.rows), kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  });
  check_launch("logps_chunk_kernel");
}

void launch_logps_chunk_backward_cuda(const LogpsChunkParams& p, const CudaLaunch& launch) {
  if (p.rows == 0 || p.columns == 0) return;
  dispatch_chunk(p, p.by_log != nullptr, [&](auto element, auto altered, auto masked, auto more) {
    const auto kernel = logps_chunk_backward_kernel<decltype(element), altered.value, masked.value, more.value>;
    kernel<<<static_cast<unsigned>(p.rows), kThreads, 0, stream_of(launch)>>>(p);
  });
  check_launch("logps_chunk_backward_kernel");
}

}  // namespace packing_ops
