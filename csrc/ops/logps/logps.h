// Log-probabilities of the next token: the softmax part, over one chunk of the vocabulary at a time. The products that
// make the logits, and their gradients, are torch's (packing_ops/logps.py).
#pragma once

#include <cstdint>

#include "core/documents.h"
#include "core/dtype.h"
#include "core/launch.h"
#include "core/view.h"

namespace packing_ops {

struct LogpsTargetsParams {
  Documents documents;
  IndexView labels;  // [total]
  int64_t ignore_index = -100;
  int64_t vocab = 0;
  int32_t* targets = nullptr;  // [total], the label of the next slot; -1: none
};

// A scaled logit is z = (logits + bias) * inv_temperature. Everything but the logits is Real: float64 for float64
// logits, else float32. Rows without a target are left out: their state stays as it is, their gradient is 0.
struct LogpsChunkParams {
  DType dtype = DType::kFloat32;  // of logits
  void* logits = nullptr;         // [rows, columns]; backward: d(logits) takes their place
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;            // elements from one row to the next
  const void* bias = nullptr;        // [columns], or null
  const int32_t* targets = nullptr;  // [rows]
  int64_t first = 0;                 // column 0 is this entry of the vocabulary
  double inv_temperature = 1;

  // Forward: online softmax of the columns so far, the rows of the op's state [3 or 4, rows].
  void* max = nullptr;
  void* sum = nullptr;       // of exp(z - max)
  void* chosen = nullptr;    // z of the target
  void* weighted = nullptr;  // sum of exp(z - max) * (z - max): for the entropy, or null

  // Backward, all [rows].
  const void* lse = nullptr;  // log of the sum of exp(z), over the whole vocabulary
  const void* grad_logps = nullptr;
  const void* entropy = nullptr;       // or null, as its gradient
  const void* grad_entropy = nullptr;  // or null
};

void launch_logps_targets_cpu(const LogpsTargetsParams& p);
void launch_logps_chunk_cpu(const LogpsChunkParams& p);
void launch_logps_chunk_backward_cpu(const LogpsChunkParams& p);

void launch_logps_targets_cuda(const LogpsTargetsParams& p, const CudaLaunch& launch);
void launch_logps_chunk_cuda(const LogpsChunkParams& p, const CudaLaunch& launch);
void launch_logps_chunk_backward_cuda(const LogpsChunkParams& p, const CudaLaunch& launch);

}  // namespace packing_ops
