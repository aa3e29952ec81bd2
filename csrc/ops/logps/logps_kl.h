// How far apart two models' predictions of the next token are: what is done with the logits of both. The products that
// make them, and the gradients, are torch's (packing_ops/losses/kl.py).
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/launch.h"

namespace packing_ops {

// A scaled logit is z = (logits + bias) * inv_temperature. Logits of a head are [rows, columns]; numbers next to them
// are Real: float64 for float64 logits, else float32.
struct KlHead {
  const void* logits = nullptr;
  int64_t row_stride = 0;      // elements from one row to the next
  const void* bias = nullptr;  // [columns], or null
  double inv_temperature = 1;
};

// With P the student's and Q the teacher's softmax, M = beta Q + (1 - beta) P:
// beta 0: KL(Q || P). beta 1: KL(P || Q). Between: beta KL(Q || M) + (1 - beta) KL(P || M).
struct KlParams {
  DType dtype = DType::kFloat32;  // of both heads' logits
  KlHead student;
  KlHead teacher;
  int64_t rows = 0;
  int64_t columns = 0;               // forward: the whole vocabulary; backward: some of it
  const int32_t* targets = nullptr;  // [rows]; rows below 0 are left out: numbers and gradient 0
  double beta = 0;

  // All [rows]: results of the forward; the backward reads them, but for the divergence.
  void* divergence = nullptr;
  void* student_lse = nullptr;  // log of the sum of exp(z)
  void* teacher_lse = nullptr;
  void* student_kl = nullptr;  // KL(P || M); 0 for beta 0

  // Only backward. out = d(divergence) / d(z) of the student, of rows with a target; it may be the student's logits.
  // With scales it is rounded as without, then multiplied: who keeps it and multiplies later has the same bits. Not so
  // in float16, whose range it may leave.
  const void* scales = nullptr;  // [rows]; 0: zeros, whatever the logits are
  void* out = nullptr;           // [rows, columns], of their dtype
  int64_t out_stride = 0;        // elements from one row to the next
};

// out = dz * scales, a number to a row: d(logits) from the d(z) that keep_logits kept. A scale of 0 does not hide NaN.
struct KlKeptParams {
  DType dtype = DType::kFloat32;  // of dz and out
  int64_t rows = 0;
  int64_t columns = 0;
  const void* dz = nullptr;
  int64_t dz_stride = 0;         // elements from one row to the next
  const void* scales = nullptr;  // [rows], Real
  void* out = nullptr;
  int64_t out_stride = 0;
};

void launch_kl_rows_cpu(const KlParams& p);
void launch_kl_chunk_backward_cpu(const KlParams& p);
void launch_kl_scale_kept_cpu(const KlKeptParams& p);

void launch_kl_rows_cuda(const KlParams& p, const CudaLaunch& launch);
void launch_kl_chunk_backward_cuda(const KlParams& p, const CudaLaunch& launch);
void launch_kl_scale_kept_cuda(const KlKeptParams& p, const CudaLaunch& launch);

}  // namespace packing_ops
