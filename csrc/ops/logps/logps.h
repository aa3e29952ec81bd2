// Log-probabilities of the next token: the softmax part, over one chunk of the vocabulary at a time. The products that
// make the logits, and their gradients, are torch's (packing_ops/losses/logps.py).
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
  int32_t* targets = nullptr;  // [total], the label of the next slot; -1: no target
};

struct LogpsRowsParams {
  const int32_t* targets = nullptr;  // [total]
  int64_t total = 0;
  int64_t* rows = nullptr;  // [size], the slots with a target, ascending, then -1
  int64_t size = 0;
};

// Entries of the vocabulary that a row's softmax is over, as compressed sparse rows. Row t has set t + ahead. Without
// such a set, or with an empty one, its softmax is over all entries.
struct LogpsAllowedParams {
  IndexView ids;  // [size]
  int64_t size = 0;
  IndexView offsets;                 // [total + 1]
  const int32_t* targets = nullptr;  // [total]
  int64_t total = 0;
  int64_t vocab = 0;
  int64_t ahead = 0;
  int32_t* checked_ids = nullptr;      // [size]; on a GPU -1 for what is not in the vocabulary
  int64_t* checked_offsets = nullptr;  // [total + 1], by row, each from 0 to size
};

struct LogpsMaskParams {
  const int32_t* ids = nullptr;  // [size], as checked
  int64_t size = 0;
  const int64_t* offsets = nullptr;  // [total + 1]
  int64_t total = 0;
  const int64_t* index = nullptr;  // [rows], the set of each, -1 without one; or null: the sets in their order
  int64_t rows = 0;
  int64_t first = 0;  // bit 0 is this entry of the vocabulary
  int64_t columns = 0;
  int64_t words = 0;         // of a row
  uint32_t* mask = nullptr;  // [rows, words], a bit for each column, the lowest first

  // Where a row's ids are; never outside of them.
  PACKING_OPS_HOST_DEVICE Interval<int64_t> set_of(int64_t row) const {
    const int64_t t = index ? index[row] : row;
    if (t < 0 || t >= total) return {0, 0};
    const int64_t begin = offsets[t], end = offsets[t + 1];
    return {begin < 0 ? 0 : begin, end > size ? size : end};
  }
  PACKING_OPS_HOST_DEVICE bool has_column(int64_t column) const { return column >= 0 && column < columns; }
};

// z = scale * f(logit + bias) with f(x) = x, or tanh(inner * x). Everything but the logits is Real: float64 for float64
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
  const void* scales = nullptr;      // [rows], above 0
  double inner = 0;                  // 0: f(x) = x
  const uint32_t* mask = nullptr;    // [rows, ceil(columns / 32)], or null: z is -inf where its bit is 0

  // Forward: online softmax of the columns so far, the rows of the op's state [3 or 7, rows].
  void* max = nullptr;
  void* sum = nullptr;       // of exp(z - max)
  void* chosen = nullptr;    // z of the target
  void* weighted = nullptr;  // sum of exp(z - max) * (z - max); or null, as all that follow
  void* squares = nullptr;   // sum of exp(2 * (z - max))
  void* total = nullptr;     // sum of z
  void* top1 = nullptr;      // entry of the first largest z

  // Backward, all [rows]. With p = exp(z - lse), and chosen 1 at the target, else 0:
  // d(z) = grad * chosen - p * (plain + by_log * log p - by_p * p) + even.
  const void* lse = nullptr;  // log of the sum of exp(z), over the whole vocabulary
  const void* grad = nullptr;
  const void* plain = nullptr;
  const void* by_log = nullptr;  // or null, as all that follow
  const void* by_p = nullptr;
  const void* even = nullptr;
};

void launch_logps_targets_cpu(const LogpsTargetsParams& p);
void launch_logps_rows_cpu(const LogpsRowsParams& p);
void launch_logps_allowed_cpu(const LogpsAllowedParams& p);
void launch_logps_allowed_mask_cpu(const LogpsMaskParams& p);
void launch_logps_chunk_cpu(const LogpsChunkParams& p);
void launch_logps_chunk_backward_cpu(const LogpsChunkParams& p);

void launch_logps_targets_cuda(const LogpsTargetsParams& p, const CudaLaunch& launch);
void launch_logps_rows_cuda(const LogpsRowsParams& p, const CudaLaunch& launch);
void launch_logps_allowed_cuda(const LogpsAllowedParams& p, const CudaLaunch& launch);
void launch_logps_allowed_mask_cuda(const LogpsMaskParams& p, const CudaLaunch& launch);
void launch_logps_chunk_cuda(const LogpsChunkParams& p, const CudaLaunch& launch);
void launch_logps_chunk_backward_cuda(const LogpsChunkParams& p, const CudaLaunch& launch);

}  // namespace packing_ops
