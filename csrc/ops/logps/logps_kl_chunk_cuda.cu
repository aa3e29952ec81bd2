// Formulas as in logps_kl_cpu.cpp.
#include "ops/logps/logps_kl.cuh"

namespace packing_ops {

namespace {

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

}  // namespace

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
