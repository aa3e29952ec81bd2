// Padding: which slots of a padded batch are real, and moving rows between padded and packed.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/launch.h"

namespace packing_ops {

// A slot is real where its mask is not zero. `unused` slots are packed with the others but do not count in seqused.
struct UnpadLayoutParams {
  DType mask_dtype = DType::kBool;
  DType unused_dtype = DType::kBool;
  const void* mask = nullptr;    // [batch, seqlen]
  const void* unused = nullptr;  // [batch, seqlen], or null
  int64_t batch = 0;
  int64_t seqlen = 0;
  int64_t* indices = nullptr;     // [batch * seqlen], -1 after the first total
  int32_t* cu_seqlens = nullptr;  // [batch + 1]
  int32_t* seqused = nullptr;     // [batch]
  int64_t* totals = nullptr;      // [2]: total, max_seqlen
  uint8_t* real = nullptr;        // [batch * seqlen] scratch, CPU only
  void* scratch = nullptr;        // CUDA only
};

// The columns between which every real slot of a mask is.
struct RealColumnsParams {
  DType mask_dtype = DType::kBool;
  const void* mask = nullptr;  // [batch, seqlen]
  int64_t batch = 0;
  int64_t seqlen = 0;
  int64_t* columns = nullptr;  // [2]: the first real column, and the one after the last; 0 and 0 without one
  int32_t* scratch = nullptr;  // CUDA only
};

// One tensor to move. Rows are moved as bytes, whatever their dtype; what is read may be strided between rows.
struct RowMove {
  const char* input = nullptr;  // gather: [batch, seqlen, row_bytes]; scatter: [total, row_bytes]
  int64_t batch_stride = 0;     // bytes, gather only
  int64_t row_stride = 0;       // bytes
  int64_t row_bytes = 0;
  char* output = nullptr;  // gather: [total, row_bytes]; scatter: [batch, seqlen, row_bytes]; contiguous
};

constexpr int64_t kMaxRowMoves = 8;

// Gather: packed row i is padded row indices[i]. Scatter: the reverse, zeros where no index points.
// An index of -1 belongs to no padded row: gather writes zeros there, scatter skips it.
struct MoveRowsParams {
  const int64_t* indices = nullptr;  // [num_indices], strictly increasing apart from -1; all -1 from total on
  int64_t num_indices = 0;
  int64_t total = 0;  // packed rows
  int64_t batch = 0;
  int64_t seqlen = 0;
  RowMove moves[kMaxRowMoves];
  int64_t num_moves = 0;
  int32_t* inverse = nullptr;  // [batch * seqlen] scratch of a scatter, CUDA only
};

void launch_unpad_layout_cpu(const UnpadLayoutParams& p);
void launch_real_columns_cpu(const RealColumnsParams& p);
void launch_gather_rows_cpu(const MoveRowsParams& p);
void launch_scatter_rows_cpu(const MoveRowsParams& p);

// Bytes of UnpadLayoutParams::scratch, RealColumnsParams::scratch and MoveRowsParams::inverse.
int64_t unpad_layout_scratch_cuda(int64_t batch, int64_t seqlen);
int64_t real_columns_scratch_cuda();
int64_t scatter_rows_scratch_cuda(int64_t batch, int64_t seqlen);
void launch_unpad_layout_cuda(const UnpadLayoutParams& p, const CudaLaunch& launch);
void launch_real_columns_cuda(const RealColumnsParams& p, const CudaLaunch& launch);
void launch_gather_rows_cuda(const MoveRowsParams& p, const CudaLaunch& launch);
void launch_scatter_rows_cuda(const MoveRowsParams& p, const CudaLaunch& launch);

}  // namespace packing_ops
