// The divergence of beta 0 and 1 is made of sums of one pass (RowSums), other formulas are those of logps_kl_cpu.cpp.
// The order of the sums depends only on the columns.
#include <cub/block/block_reduce.cuh>

#include "ops/logps/logps_kl.cuh"

namespace packing_ops {

namespace {

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
  // KL(A || B), the sum of A (log A - log B): the maxima cancel. Infinite where A has weight and B does not.
  __device__ Real kl() const {
    const Real weight = power_of<T>((max_without_b - lse_a()) * kLogE<T>);
    return weighted / sum_a + log(sum_b / sum_a) + (weight > Real(0) ? infinity<Real>() : Real(0));
  }
};

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
  const auto exponent_a = [&](Real logit) { return (logit - shift_a) * factor_a; };
  const auto exponent_b = [&](Real logit) { return (logit - shift_b) * factor_b; };
  RowSums<T> sums{max_a * a.inv_temperature, max_b * b.inv_temperature, 0, 0, 0, -infinity<Real>()};
#pragma unroll
  for (int u = 0; u < kGrainVectors<T>; ++u) {
#pragma unroll
    for (int i = 0; i < Row<T>::kVec; ++i) {
      const Real x = exponent_a(of_a[u][i]);
      const Real y = exponent_b(of_b[u][i]);
      const Real weight = power_of<T>(x);
      sums.sum_a += weight;
      sums.sum_b += power_of<T>(y);
      if (kWeighted) sums.weighted += term(weight, x, y);
    }
  }
  if (kWeighted && !isfinite(sums.weighted)) {  // rare: from memory again, without entries where b is -inf
    sums.weighted = 0;
#pragma unroll 1
    for (int n = 0; n < kGrain / kWarp; ++n) {
      const int vector = n / Row<T>::kVec * kWarp + static_cast<int>(threadIdx.x) % kWarp;
      const int column = first + vector * Row<T>::kVec + n % Row<T>::kVec;
      if (column >= columns) break;
      const Real logit = altered(a, static_cast<Real>(a.logits[column]), column);
      const Real x = exponent_a(logit);
      const Real y = exponent_b(altered(b, static_cast<Real>(b.logits[column]), column));
      if (y == -infinity<Real>()) {
        sums.max_without_b = max_of(sums.max_without_b, logit * a.inv_temperature);
      } else {
        sums.weighted += term(power_of<T>(x), x, y);
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

}  // namespace

void launch_kl_rows_cuda(const KlParams& p, const CudaLaunch& launch) {
  if (p.rows == 0) return;
  dispatch_kl(p, [&](auto element, auto kind) {
    const auto kernel = kl_rows_kernel<decltype(element), decltype(kind)::value>;
    kernel<<<static_cast<unsigned>(p.rows), kThreads, 0, stream_of(launch)>>>(p);
  });
  check_launch("kl_rows_kernel");
}

}  // namespace packing_ops
