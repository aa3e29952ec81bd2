// One block per row, read in 16-byte vectors. The divergence of beta 0 and 1 comes from sums of one pass (RowSums),
// other formulas are those of logps_kl_cpu.cpp. The order of the sums depends on the columns alone.
#include <cub/block/block_reduce.cuh>
#include <limits>

#include "ops/logps/logps_kl.h"
#include "ops/logps/logps_softmax.cuh"

namespace packing_ops {

namespace {

enum class Kind { kForward, kReverse, kMixed };  // beta 0, 1, between

// Half types: as power_of, a logarithm whose error is far below their rounding.
template <class T>
__device__ accumulate_t<T> log_of(accumulate_t<T> x) {
  if constexpr (kBinary<T>) {
    return __log2f(x) / kLogE<T>;
  } else if constexpr (sizeof(T) == 4) {
    return logf(x);
  } else {
    return log(x);
  }
}

// As in logps_kl_cpu.cpp.
template <class T>
__device__ accumulate_t<T> log_mixture(accumulate_t<T> p, accumulate_t<T> q, accumulate_t<T> beta) {
  using Real = accumulate_t<T>;
  constexpr Real kSmallest = std::numeric_limits<Real>::min();
  const Real mixture = beta * q + (Real(1) - beta) * p;
  return log_of<T>(mixture < kSmallest ? kSmallest : mixture);
}

template <class T>
struct Head {
  using Real = accumulate_t<T>;
  const T* logits;  // of this row
  const Real* bias;
  Real inv_temperature;

  __device__ Head(const KlHead& head, int64_t row)
      : logits(static_cast<const T*>(head.logits) + row * head.row_stride),
        bias(static_cast<const Real*>(head.bias)),
        inv_temperature(static_cast<Real>(head.inv_temperature)) {}

  // What load_grain takes: the temperature is left to the exponents.
  template <int kCount>
  __device__ void alter(Real (&values)[kCount], int column) const {
    if (bias) add_bias(bias + column, values);
  }
  template <int kCount>
  __device__ uint32_t allowed(int) const {
    return ~0u;
  }
  __device__ Real scaled(Real logit, int column) const { return altered(*this, logit, column) * inv_temperature; }
};

// p * (logp - of), 0 where there is no weight, whatever its logarithm.
template <class Real>
__device__ Real term(Real p, Real logp, Real of) {
  return p == Real(0) ? Real(0) : p * (logp - of);
}

// Of some columns of the rows of two heads A and B, with a and b their scaled logits less max_a and max_b: the sums of
// e^a, of e^b, and of e^a (a - b) where b is not -inf; and the largest scaled logit of A where b is. Natural exponents
// and logarithms.
template <class T>
struct RowSums {
  using Real = accumulate_t<T>;
  Real max_a, max_b, sum_a, sum_b, weighted, max_without_b;

  // The same sums over larger maxima.
  __device__ RowSums with_max(Real larger_a, Real larger_b) const {
    const Real below_a = max_a == larger_a ? Real(0) : max_a - larger_a;  // -inf may stay the maximum
    const Real below_b = max_b == larger_b ? Real(0) : max_b - larger_b;
    const Real scale = power_of<Real>(below_a);
    const Real sum = scale * sum_a;
    const bool empty = sum == Real(0) || max_b == -infinity<Real>();
    return {larger_a,
            larger_b,
            sum,
            power_of<Real>(below_b) * sum_b,
            empty ? Real(0) : scale * (weighted + (below_a - below_b) * sum_a),
            max_without_b};
  }
  __device__ RowSums operator+(const RowSums& other) const {
    const RowSums x = with_max(max_of(max_a, other.max_a), max_of(max_b, other.max_b));
    const RowSums y = other.with_max(x.max_a, x.max_b);
    return {x.max_a,
            x.max_b,
            x.sum_a + y.sum_a,
            x.sum_b + y.sum_b,
            x.weighted + y.weighted,
            max_of(x.max_without_b, y.max_without_b)};
  }
  __device__ Real lse_a() const { return max_a + log(sum_a); }
  __device__ Real lse_b() const { return max_b + log(sum_b); }
  // KL(A || B), the sum of A (log A - log B): the maxima cancel. Infinite where A has weight and B none.
  __device__ Real kl() const {
    const Real weight = power_of<T>((max_without_b - lse_a()) * kLogE<T>);
    return weighted / sum_a + log(sum_b / sum_a) + (weight > Real(0) ? infinity<Real>() : Real(0));
  }
};

// Vectors of kGrain columns that one lane of a warp loads.
template <class T>
constexpr int kGrainVectors = kGrain / (kWarp * Row<T>::kVec);

template <class T>
using Grain = accumulate_t<T>[kGrainVectors<T>][Row<T>::kVec];

template <class T>
__device__ accumulate_t<T> max_of_grain(const Grain<T>& values) {
  accumulate_t<T> max = -infinity<accumulate_t<T>>();
#pragma unroll
  for (int u = 0; u < kGrainVectors<T>; ++u) {
#pragma unroll
    for (int i = 0; i < Row<T>::kVec; ++i) max = max_of(max, values[u][i]);
  }
  return max;
}

// Of the columns that this lane loads of kGrain columns from first on. kWeighted: weighted too.
template <class T, bool kWeighted>
__device__ RowSums<T> row_sums_of_grain(const Head<T>& a, const Head<T>& b, int first, int columns) {
  using Real = accumulate_t<T>;
  Grain<T> of_a;
  Grain<T> of_b;
  load_grain<T, false>(a.logits, first, columns, a, of_a);
  load_grain<T, false>(b.logits, first, columns, b, of_b);
  const Real max_a = max_of_grain<T>(of_a);
  const Real max_b = max_of_grain<T>(of_b);
  const Real shift_a = max_a == -infinity<Real>() ? Real(0) : max_a;
  const Real shift_b = max_b == -infinity<Real>() ? Real(0) : max_b;
  const Real factor_a = a.inv_temperature * kLogE<T>;
  const Real factor_b = b.inv_temperature * kLogE<T>;
  const auto exponent_a = [&](int u, int i) { return (of_a[u][i] - shift_a) * factor_a; };
  const auto exponent_b = [&](int u, int i) { return (of_b[u][i] - shift_b) * factor_b; };
  RowSums<T> sums{max_a * a.inv_temperature, max_b * b.inv_temperature, 0, 0, 0, -infinity<Real>()};
#pragma unroll
  for (int u = 0; u < kGrainVectors<T>; ++u) {
#pragma unroll
    for (int i = 0; i < Row<T>::kVec; ++i) {
      const Real weight = power_of<T>(exponent_a(u, i));
      sums.sum_a += weight;
      sums.sum_b += power_of<T>(exponent_b(u, i));
      if (kWeighted) sums.weighted += term(weight, exponent_a(u, i), exponent_b(u, i));
    }
  }
  if (kWeighted && !isfinite(sums.weighted)) {  // rare: again without entries where b is -inf
    sums.weighted = 0;
#pragma unroll
    for (int u = 0; u < kGrainVectors<T>; ++u) {
#pragma unroll
      for (int i = 0; i < Row<T>::kVec; ++i) {
        if (exponent_b(u, i) == -infinity<Real>()) {
          sums.max_without_b = max_of(sums.max_without_b, of_a[u][i] * a.inv_temperature);
        } else {
          sums.weighted += term(power_of<T>(exponent_a(u, i)), exponent_a(u, i), exponent_b(u, i));
        }
      }
    }
  }
  sums.weighted /= kLogE<T>;
  return sums;
}

// f(first column) for each kGrain columns of this warp.
template <class F>
__device__ void for_grains_of_warp(int columns, const F& f) {
  for (int first = static_cast<int>(threadIdx.x) / kWarp * kGrain; first < columns; first += kWarps * kGrain) f(first);
}

// The sum over all threads, for all of them. In a fixed order.
template <class Value>
__device__ Value sum_of_block(const Value& value) {
  using Reduce = cub::BlockReduce<Value, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  __shared__ Value sum;
  const Value found = Reduce(storage).Reduce(value, [](const Value& a, const Value& b) { return a + b; });
  if (threadIdx.x == 0) sum = found;
  __syncthreads();
  return sum;
}

// KL(Q || M) and KL(P || M): their terms need the sums of both rows.
template <class T>
struct MixedTerms {
  using Real = accumulate_t<T>;
  Real teacher, student;

  __device__ MixedTerms operator+(const MixedTerms& other) const {
    return {teacher + other.teacher, student + other.student};
  }
  __device__ void add(Real logp, Real logq, Real beta) {
    const Real p = power_of<T>(logp * kLogE<T>);
    const Real q = power_of<T>(logq * kLogE<T>);
    const Real mixture = log_mixture<T>(p, q, beta);
    student += term(p, logp, mixture);
    teacher += term(q, logq, mixture);
  }
};

// Of the columns that this lane loads of all its warp's grains.
template <class T>
__device__ MixedTerms<T> mixed_terms(const Head<T>& student, const Head<T>& teacher, int columns,
                                     const RowSums<T>& sums, accumulate_t<T> beta) {
  using Real = accumulate_t<T>;
  const Real log_sum = log(sums.sum_a);
  const Real teacher_log_sum = log(sums.sum_b);
  MixedTerms<T> terms{0, 0};
  for_grains_of_warp(columns, [&](int first) {
    Grain<T> of_student;
    Grain<T> of_teacher;
    load_grain<T, false>(student.logits, first, columns, student, of_student);
    load_grain<T, false>(teacher.logits, first, columns, teacher, of_teacher);
#pragma unroll
    for (int u = 0; u < kGrainVectors<T>; ++u) {
#pragma unroll
      for (int i = 0; i < Row<T>::kVec; ++i) {
        const Real z = of_student[u][i] * student.inv_temperature;
        const Real teacher_z = of_teacher[u][i] * teacher.inv_temperature;
        terms.add((z - sums.max_a) - log_sum, (teacher_z - sums.max_b) - teacher_log_sum, beta);
      }
    }
  });
  return terms;
}

template <class T, Kind kKind>
__global__ void __launch_bounds__(kThreads) kl_rows_kernel(KlParams p) {
  using Real = accumulate_t<T>;
  constexpr bool kMixed = kKind == Kind::kMixed;
  constexpr bool kTeacherIsA = kKind == Kind::kForward;  // it weighs
  const int64_t row = blockIdx.x;
  const int columns = static_cast<int>(p.columns);
  const Real beta = static_cast<Real>(p.beta);
  Real divergence = 0, lse = 0, teacher_lse = 0, student_kl = 0;
  if (p.targets[row] >= 0) {
    const Head<T> student(p.student, row);
    const Head<T> teacher(p.teacher, row);
    const Head<T>& a = kTeacherIsA ? teacher : student;
    const Head<T>& b = kTeacherIsA ? student : teacher;
    RowSums<T> sums{-infinity<Real>(), -infinity<Real>(), 0, 0, 0, -infinity<Real>()};
    for_grains_of_warp(columns, [&](int first) { sums = sums + row_sums_of_grain<T, !kMixed>(a, b, first, columns); });
    sums = sum_of_block(sums);
    lse = kTeacherIsA ? sums.lse_b() : sums.lse_a();
    teacher_lse = kTeacherIsA ? sums.lse_a() : sums.lse_b();
    if constexpr (kMixed) {
      const MixedTerms<T> terms = sum_of_block(mixed_terms(student, teacher, columns, sums, beta));
      divergence = beta * terms.teacher + (Real(1) - beta) * terms.student;
      student_kl = terms.student;
    } else {
      divergence = sums.kl();
      student_kl = kTeacherIsA ? Real(0) : divergence;
    }
  }
  if (threadIdx.x != 0) return;
  static_cast<Real*>(p.divergence)[row] = divergence;
  static_cast<Real*>(p.student_lse)[row] = lse;
  static_cast<Real*>(p.teacher_lse)[row] = teacher_lse;
  static_cast<Real*>(p.student_kl)[row] = student_kl;
}

// d(z) of the student, as KlParams::out has it.
template <class T, Kind kKind>
struct Gradient {
  using Real = accumulate_t<T>;
  Head<T> student, teacher;
  Real lse, teacher_lse, student_kl, beta;
  Real weight;  // of KL(P || M)
  Real scale;

  __device__ Gradient(const KlParams& p, int64_t row)
      : student(p.student, row),
        teacher(p.teacher, row),
        lse(static_cast<const Real*>(p.student_lse)[row]),
        teacher_lse(static_cast<const Real*>(p.teacher_lse)[row]),
        student_kl(static_cast<const Real*>(p.student_kl)[row]),
        beta(static_cast<Real>(p.beta)),
        weight(kKind == Kind::kMixed ? Real(1) - beta : Real(1)),
        scale(p.scales ? static_cast<const Real*>(p.scales)[row] : Real(1)) {}
  __device__ Real operator()(Real logit, Real teacher_logit, int column) const {
    const Real dz = of_scaled_logit(logit, teacher_logit, column);
    constexpr bool kRounds = std::is_same_v<T, __nv_bfloat16>;
    return scale * (kRounds ? static_cast<Real>(static_cast<T>(dz)) : dz);
  }
  __device__ Real of_scaled_logit(Real logit, Real teacher_logit, int column) const {
    const Real logp = student.scaled(logit, column) - lse;
    const Real logq = teacher.scaled(teacher_logit, column) - teacher_lse;
    const Real p = power_of<T>(logp * kLogE<T>);
    if constexpr (kKind == Kind::kForward) {
      return p - power_of<T>(logq * kLogE<T>);
    } else if constexpr (kKind == Kind::kReverse) {
      return term(p, logp - student_kl, logq);
    } else {
      const Real mixture = log_mixture<T>(p, power_of<T>(logq * kLogE<T>), beta);
      return weight * term(p, logp - student_kl, mixture);
    }
  }
};

template <class T, Kind kKind>
__global__ void __launch_bounds__(kThreads) kl_chunk_backward_kernel(KlParams p) {
  using Real = accumulate_t<T>;
  using Vector = typename Row<T>::Vector;
  constexpr int kVec = Row<T>::kVec;
  const int64_t row = blockIdx.x;
  const Gradient<T, kKind> gradient(p, row);
  const T* logits = gradient.student.logits;
  const T* of_teacher = gradient.teacher.logits;
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
  const bool zero = p.targets[row] < 0 || gradient.scale == Real(0);
  Row<T> layout(out, static_cast<int>(p.columns));
  if (!same_alignment(logits, out) || !same_alignment(of_teacher, out)) layout.vectors = 0;
  const Vector* vectors = reinterpret_cast<const Vector*>(logits + layout.before);
  const Vector* teacher_vectors = reinterpret_cast<const Vector*>(of_teacher + layout.before);
  Vector* out_vectors = reinterpret_cast<Vector*>(out + layout.before);
  for (int first = static_cast<int>(threadIdx.x); first < layout.vectors; first += kThreads * kUnroll) {
    Vector loaded[kUnroll];
    Vector teacher_loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (zero || first + u * kThreads >= layout.vectors) continue;
      loaded[u] = vectors[first + u * kThreads];
      teacher_loaded[u] = teacher_vectors[first + u * kThreads];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int v = first + u * kThreads;
      if (v >= layout.vectors) continue;
      const int column = layout.column(v);
      if (zero) {
        set_zero(loaded[u]);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; i += 2) {
          const Real one = gradient(loaded[u].get(i), teacher_loaded[u].get(i), column + i);
          const Real two = gradient(loaded[u].get(i + 1), teacher_loaded[u].get(i + 1), column + i + 1);
          loaded[u].set_pair(i, one, two);
        }
      }
      out_vectors[v] = loaded[u];
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < layout.singles(); i += kThreads) {
    const int column = layout.single(i);
    const Real logit = static_cast<Real>(logits[column]);
    const Real found = zero ? Real(0) : gradient(logit, static_cast<Real>(of_teacher[column]), column);
    out[column] = static_cast<T>(found);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) kl_scale_kept_kernel(KlKeptParams p) {
  using Vector = typename Row<T>::Vector;
  constexpr int kVec = Row<T>::kVec;
  const int64_t row = blockIdx.x;
  const accumulate_t<T> scale = static_cast<const accumulate_t<T>*>(p.scales)[row];
  const T* dz = static_cast<const T*>(p.dz) + row * p.dz_stride;
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
  Row<T> layout(out, static_cast<int>(p.columns));
  if (!same_alignment(dz, out)) layout.vectors = 0;
  const Vector* vectors = reinterpret_cast<const Vector*>(dz + layout.before);
  Vector* out_vectors = reinterpret_cast<Vector*>(out + layout.before);
#pragma unroll kUnroll
  for (int v = static_cast<int>(threadIdx.x); v < layout.vectors; v += kThreads) {
    Vector vector = vectors[v];
#pragma unroll
    for (int i = 0; i < kVec; i += 2) vector.set_pair(i, scale * vector.get(i), scale * vector.get(i + 1));
    out_vectors[v] = vector;
  }
  for (int i = static_cast<int>(threadIdx.x); i < layout.singles(); i += kThreads) {
    const int column = layout.single(i);
    out[column] = static_cast<T>(scale * static_cast<accumulate_t<T>>(dz[column]));
  }
}

// f(element type, kind) as constants.
template <class F>
void dispatch_kl(const KlParams& p, F&& f) {
  dispatch_logits(p.dtype, [&](auto element) {
    if (p.beta == 0) return f(element, std::integral_constant<Kind, Kind::kForward>{});
    if (p.beta == 1) return f(element, std::integral_constant<Kind, Kind::kReverse>{});
    f(element, std::integral_constant<Kind, Kind::kMixed>{});
  });
}

}  // namespace

void launch_kl_rows_cuda(const KlParams& p, const CudaLaunch& launch) {
  if (p.rows == 0) return;
  dispatch_kl(p, [&](auto element, auto kind) {
    const auto kernel = kl_rows_kernel<decltype(element), decltype(kind)::value>;
    kernel<<<static_cast<unsigned>(p.rows), kThreads, 0, stream_of(launch)>>>(p);
  });
  check_launch("kl_rows_kernel");
}

void launch_kl_chunk_backward_cuda(const KlParams& p, const CudaLaunch& launch) {
  if (p.rows == 0 || p.columns == 0) return;
  dispatch_kl(p, [&](auto element, auto kind) {
    const auto kernel = kl_chunk_backward_kernel<decltype(element), decltype(kind)::value>;
    kernel<<<static_cast<unsigned>(p.rows), kThreads, 0, stream_of(launch)>>>(p);
  });
  check_launch("kl_chunk_backward_kernel");
}

void launch_kl_scale_kept_cuda(const KlKeptParams& p, const CudaLaunch& launch) {
  if (p.rows == 0 || p.columns == 0) return;
  dispatch_logits(p.dtype, [&](auto element) {
    kl_scale_kept_kernel<decltype(element)><<<static_cast<unsigned>(p.rows), kThreads, 0, stream_of(launch)>>>(p);
  });
  check_launch("kl_scale_kept_kernel");
}

}  // namespace packing_ops
