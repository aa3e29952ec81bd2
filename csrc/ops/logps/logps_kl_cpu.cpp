// The specification: row by row, in pieces of kPiece logits of both heads. A row is read twice: for the lse of both,
// then for the terms of the divergence, whose logarithms are those of log_softmax: a second lse would be rounded
// once more.
#include "ops/logps/logps_kl.h"
#include "ops/logps/logps_softmax.h"

namespace packing_ops {

namespace {

// A piece of one head: scaled logits, or their log-probabilities and probabilities.
template <class Real>
struct Piece {
  alignas(64) Real logp[kPiece];
  alignas(64) Real p[kPiece];
};

template <class Real>
struct Head {
  const KlHead& head;
  Real inv_temperature = static_cast<Real>(head.inv_temperature);

  PACKING_OPS_INLINE void load(const Logits<Real>& access, int64_t row, int64_t from, int64_t count, Real* z) const {
    access.load(head.logits, row * head.row_stride + from, count, z);
    if (head.bias) {
      const Real* bias = static_cast<const Real*>(head.bias) + from;
      for (int64_t j = 0; j < count; ++j) z[j] += bias[j];
    }
    for (int64_t j = 0; j < count; ++j) z[j] *= inv_temperature;
  }
  PACKING_OPS_INLINE Sums<Real> sums(const Logits<Real>& access, int64_t row, int64_t columns,
                                     Piece<Real>& scratch) const {
    Sums<Real> sums;
    for (int64_t from = 0; from < columns; from += kPiece) {
      const int64_t count = std::min(kPiece, columns - from);
      load(access, row, from, count, scratch.logp);
      sums = sums + sums_of<false>(scratch.logp, count, scratch.p, from);
    }
    return sums;
  }
  PACKING_OPS_INLINE void probabilities(const Logits<Real>& access, int64_t row, int64_t from, int64_t count, Real max,
                                        Real log_sum, Piece<Real>& piece) const {
    load(access, row, from, count, piece.logp);
    for (int64_t j = 0; j < count; ++j) piece.logp[j] = (piece.logp[j] - max) - log_sum;
    fast_exp(piece.logp, count, piece.p);
  }
};

// log M, with M at least the smallest normal number: where M underflows and p or q does not, a logarithm of 0 would
// make their term infinite.
template <class Real>
PACKING_OPS_INLINE void log_mixture(const Real* p, const Real* q, Real beta, int64_t count, Real* out) {
  constexpr Real kSmallest = std::numeric_limits<Real>::min();
  for (int64_t j = 0; j < count; ++j) {
    const Real mixture = beta * q[j] + (Real(1) - beta) * p[j];
    out[j] = fast_log(mixture < kSmallest ? kSmallest : mixture);
  }
}

// The sum of p * (logp - of). What has no weight adds nothing, whatever its logarithm.
template <class Real>
PACKING_OPS_INLINE Real sum_of_terms(const Piece<Real>& piece, const Real* of, int64_t count, Real* scratch) {
  for (int64_t j = 0; j < count; ++j) {
    const Real term = piece.p[j] * (piece.logp[j] - of[j]);
    scratch[j] = piece.p[j] == Real(0) ? Real(0) : term;
  }
  const auto size = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(count)));
  std::fill(scratch + count, scratch + size, Real(0));
  return fold(scratch, size, [](Real a, Real b) { return a + b; });
}

template <class Real>
PACKING_OPS_MULTIVERSION void kl_of_rows(const KlParams& p, const Logits<Real>& access, int64_t begin, int64_t end) {
  Piece<Real> student, teacher;
  alignas(64) Real mixture[kPiece];
  alignas(64) Real scratch[kPiece];
  const Head<Real> student_head{p.student}, teacher_head{p.teacher};
  const Real beta = static_cast<Real>(p.beta);
  const bool mixed = p.beta > 0 && p.beta < 1;
  for (int64_t row = begin; row < end; ++row) {
    Real divergence = 0, student_lse = 0, teacher_lse = 0, student_kl = 0, teacher_kl = 0;
    if (p.targets[row] >= 0) {
      const Sums<Real> of_student = student_head.sums(access, row, p.columns, student);
      const Sums<Real> of_teacher = teacher_head.sums(access, row, p.columns, teacher);
      const Real student_log = std::log(of_student.sum);
      const Real teacher_log = std::log(of_teacher.sum);
      student_lse = of_student.max + student_log;
      teacher_lse = of_teacher.max + teacher_log;
      for (int64_t from = 0; from < p.columns; from += kPiece) {
        const int64_t count = std::min(kPiece, p.columns - from);
        student_head.probabilities(access, row, from, count, of_student.max, student_log, student);
        teacher_head.probabilities(access, row, from, count, of_teacher.max, teacher_log, teacher);
        if (mixed) log_mixture(student.p, teacher.p, beta, count, mixture);
        if (p.beta < 1) teacher_kl += sum_of_terms(teacher, mixed ? mixture : student.logp, count, scratch);
        if (p.beta > 0) student_kl += sum_of_terms(student, mixed ? mixture : teacher.logp, count, scratch);
      }
      divergence = mixed ? beta * teacher_kl + (Real(1) - beta) * student_kl : teacher_kl + student_kl;
    }
    static_cast<Real*>(p.divergence)[row] = divergence;
    static_cast<Real*>(p.student_lse)[row] = student_lse;
    static_cast<Real*>(p.teacher_lse)[row] = teacher_lse;
    static_cast<Real*>(p.student_kl)[row] = student_kl;
  }
}

// d(z) of the student: beta 0: P - Q; beta 1: P * (log P - log Q - student_kl); between: (1 - beta) * P * (log P - log
// M - student_kl).
template <class Real>
PACKING_OPS_MULTIVERSION void kl_grad_rows(const KlParams& p, const Logits<Real>& access, int64_t begin, int64_t end) {
  Piece<Real> student, teacher;
  alignas(64) Real mixture[kPiece];
  alignas(64) char rounded[kPiece * sizeof(Real)];
  const Head<Real> student_head{p.student}, teacher_head{p.teacher};
  const Real beta = static_cast<Real>(p.beta);
  const bool mixed = p.beta > 0 && p.beta < 1;
  for (int64_t row = begin; row < end; ++row) {
    const Real scale = p.scales ? static_cast<const Real*>(p.scales)[row] : Real(1);
    const Real student_kl = static_cast<const Real*>(p.student_kl)[row];
    for (int64_t from = 0; from < p.columns; from += kPiece) {
      const int64_t count = std::min(kPiece, p.columns - from);
      Real* dz = student.logp;
      if (p.targets[row] < 0 || scale == Real(0)) {
        std::fill(dz, dz + count, Real(0));
      } else {
        student_head.probabilities(access, row, from, count, static_cast<const Real*>(p.student_lse)[row], Real(0),
                                   student);
        teacher_head.probabilities(access, row, from, count, static_cast<const Real*>(p.teacher_lse)[row], Real(0),
                                   teacher);
        if (mixed) log_mixture(student.p, teacher.p, beta, count, mixture);
        if (p.beta == 0) {
          for (int64_t j = 0; j < count; ++j) dz[j] = student.p[j] - teacher.p[j];
        } else {
          const Real* of = mixed ? mixture : teacher.logp;
          const Real weight = mixed ? Real(1) - beta : Real(1);
          for (int64_t j = 0; j < count; ++j) {
            const Real slope = weight * student.p[j] * (student.logp[j] - of[j] - student_kl);
            dz[j] = student.p[j] == Real(0) ? Real(0) : slope;
          }
        }
      }
      if (p.scales && p.dtype == DType::kBFloat16) {
        access.store(dz, Real(1), 0, count, rounded);
        access.load(rounded, 0, count, dz);
      }
      access.store(dz, scale, row * p.out_stride + from, count, p.out);
    }
  }
}

template <class Real>
void kl_scale_kept_rows(const KlKeptParams& p, const Logits<Real>& access, int64_t begin, int64_t end) {
  alignas(64) Real piece[kPiece];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t from = 0; from < p.columns; from += kPiece) {
      const int64_t count = std::min(kPiece, p.columns - from);
      access.load(p.dz, row * p.dz_stride + from, count, piece);
      access.store(piece, static_cast<const Real*>(p.scales)[row], row * p.out_stride + from, count, p.out);
    }
  }
}

}  // namespace

void launch_kl_rows_cpu(const KlParams& p) {
  dispatch_float(p.dtype, [&](auto element) {
    const auto access = logits_of<decltype(element)>();
    for_rows(p.rows, p.columns, [&](int64_t begin, int64_t end) { kl_of_rows(p, access, begin, end); });
  });
}

void launch_kl_chunk_backward_cpu(const KlParams& p) {
  dispatch_float(p.dtype, [&](auto element) {
    const auto access = logits_of<decltype(element)>();
    for_rows(p.rows, p.columns, [&](int64_t begin, int64_t end) { kl_grad_rows(p, access, begin, end); });
  });
}

void launch_kl_scale_kept_cpu(const KlKeptParams& p) {
  dispatch_float(p.dtype, [&](auto element) {
    const auto access = logits_of<decltype(element)>();
    for_rows(p.rows, p.columns, [&](int64_t begin, int64_t end) { kl_scale_kept_rows(p, access, begin, end); });
  });
}

}  // namespace packing_ops
