// One block per row of both heads' logits, read in 16-byte vectors. Formulas as in logps_kl_cpu.cpp; the order of the
// sums depends on the columns alone.
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

// Vectors of kGrain columns that one lane of a warp loads.
template <class T>
constexpr int kGrainVectors = kGrain / (kWarp * Row<T>::kVec);

// What scaled logits are measured from: log p = (z - max) - log_sum.
template <class Real>
struct Norm {
  Real max, log_sum;
  __device__ Real logp(Real z) const { return (z - max) - log_sum; }
};

// p * (logp - of), 0 where there is no weight, whatever its logarithm.
template <class Real>
__device__ Real term(Real p, Real logp, Real of) {
  return p == Real(0) ? Real(0) : p * (logp - of);
}

template <class T, Kind kKind>
struct Terms {
  using Real = accumulate_t<T>;
  Real student, teacher;  // sums of KL(P || M) and KL(Q || M)

  __device__ void add(Real logp, Real logq, Real beta) {
    const Real p = kKind == Kind::kForward ? Real(0) : power_of<T>(logp * kLogE<T>);
    const Real q = kKind == Kind::kReverse ? Real(0) : power_of<T>(logq * kLogE<T>);
    if constexpr (kKind == Kind::kMixed) {
      const Real mixture = log_of<T>(beta * q + (Real(1) - beta) * p);
      student += term(p, logp, mixture);
      teacher += term(q, logq, mixture);
    } else if constexpr (kKind == Kind::kForward) {
      teacher += term(q, logq, logp);
    } else {
      student += term(p, logp, logq);
    }
  }
};

// The terms of kGrain columns from first on, by one warp; the same in each lane.
template <class T, Kind kKind>
__device__ Terms<T, kKind> terms_of_grain(const Head<T>& student, const Head<T>& teacher, int first, int columns,
                                          const Norm<accumulate_t<T>> (&norms)[2], accumulate_t<T> beta) {
  using Real = accumulate_t<T>;
  constexpr int kVec = Row<T>::kVec;
  Real of_student[kGrainVectors<T>][kVec];
  Real of_teacher[kGrainVectors<T>][kVec];
  load_grain<T, false>(student.logits, first, columns, student, of_student);
  load_grain<T, false>(teacher.logits, first, columns, teacher, of_teacher);
  Terms<T, kKind> terms{0, 0};
#pragma unroll
  for (int u = 0; u < kGrainVectors<T>; ++u) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const Real z = of_student[u][i] * student.inv_temperature;
      const Real teacher_z = of_teacher[u][i] * teacher.inv_temperature;
      terms.add(norms[0].logp(z), norms[1].logp(teacher_z), beta);
    }
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    if (kKind != Kind::kForward) terms.student += __shfl_xor_sync(0xffffffffu, terms.student, offset);
    if (kKind != Kind::kReverse) terms.teacher += __shfl_xor_sync(0xffffffffu, terms.teacher, offset);
  }
  return terms;
}

// The norms of both heads' rows. Even warps take the student's grains, odd ones the teacher's; the first of each adds
// them one by one in their order.
template <class T>
__device__ void find_norms(const KlParams& p, Norm<accumulate_t<T>> (&norms)[2]) {
  using Real = accumulate_t<T>;
  __shared__ Sums<T> held[2][kHeld];
  static_assert(kWarps % 2 == 0);
  const int columns = static_cast<int>(p.columns);
  const int grains = ceil_div(columns, kGrain);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const bool leader = threadIdx.x % kWarp == 0;
  const Head<T> head(warp % 2 == 0 ? p.student : p.teacher, blockIdx.x);
  const Real factor = head.inv_temperature * kLogE<T>;
  Sums<Real> all{-infinity<Real>()};
  for (int first = 0; first < grains; first += kHeld) {
    const int count = min(kHeld, grains - first);
    for (int i = warp / 2; i < count; i += kWarps / 2) {
      const Sums<T> sums = sums_of_grain<T, false>(head.logits, (first + i) * kGrain, columns, head, factor);
      if (leader) held[warp % 2][i] = sums;
    }
    __syncthreads();
    // Between grains: logits with their temperature, natural exponents.
    for (int i = 0; leader && warp < 2 && i < count; ++i) {
      const Sums<T>& sums = held[warp][i];
      all = all.plus({sums.max * head.inv_temperature, sums.sum}, Real(1));
    }
    __syncthreads();
  }
  if (leader && warp < 2) norms[warp] = {all.max, log(all.sum)};
  __syncthreads();
}

template <class T, Kind kKind>
__global__ void __launch_bounds__(kThreads) kl_rows_kernel(KlParams p) {
  using Real = accumulate_t<T>;
  __shared__ Norm<Real> norms[2];
  __shared__ Terms<T, kKind> held[kHeld];
  const int64_t row = blockIdx.x;
  const bool counts = p.targets[row] >= 0;
  Terms<T, kKind> all{0, 0};
  if (counts) {
    find_norms<T>(p, norms);
    const Head<T> student(p.student, row);
    const Head<T> teacher(p.teacher, row);
    const int columns = static_cast<int>(p.columns);
    const int grains = ceil_div(columns, kGrain);
    for (int first = 0; first < grains; first += kHeld) {
      const int count = min(kHeld, grains - first);
      for (int i = static_cast<int>(threadIdx.x) / kWarp; i < count; i += kWarps) {
        const Terms<T, kKind> terms =
            terms_of_grain<T, kKind>(student, teacher, (first + i) * kGrain, columns, norms, static_cast<Real>(p.beta));
        if (threadIdx.x % kWarp == 0) held[i] = terms;
      }
      __syncthreads();
      for (int i = 0; threadIdx.x == 0 && i < count; ++i) {
        all.student += held[i].student;
        all.teacher += held[i].teacher;
      }
      __syncthreads();
    }
  }
  if (threadIdx.x != 0) return;
  const Real beta = static_cast<Real>(p.beta);
  static_cast<Real*>(p.divergence)[row] =
      kKind == Kind::kMixed ? beta * all.teacher + (Real(1) - beta) * all.student : all.teacher + all.student;
  static_cast<Real*>(p.student_lse)[row] = counts ? norms[0].max + norms[0].log_sum : Real(0);
  static_cast<Real*>(p.teacher_lse)[row] = counts ? norms[1].max + norms[1].log_sum : Real(0);
  static_cast<Real*>(p.student_kl)[row] = all.student;
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
      const Real mixture = log_of<T>(beta * power_of<T>(logq * kLogE<T>) + (Real(1) - beta) * p);
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
  const auto lies_as_out = [out](const T* other) {
    return (reinterpret_cast<uintptr_t>(other) ^ reinterpret_cast<uintptr_t>(out)) % 16 == 0;
  };
  if (!lies_as_out(logits) || !lies_as_out(of_teacher)) layout.vectors = 0;
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

}  // namespace packing_ops
