// Packed rows: the (token, head of the group) pairs of a document that attend to one kv head, as in PackGQA of
// FlashAttention-3.
#pragma once

#include "ops/attention/cuda/args.cuh"
#include "ops/attention/cuda/mask.cuh"

namespace packing_ops::attention {

// Packed rows of a document and kv head from `first` on: row r is token r / group, head r % group of the group.
struct PackedRows {
  int64_t first_token;  // of row 0, in the packed batch
  int32_t token;        // the same, in the document
  int32_t head_offset;  // of row 0 in its group: first % group
  int32_t group;
  uint32_t inverse;  // Args::group_inverse
  int32_t valid;     // rows up to the document's end, of kRows
  int32_t first_head;
  int64_t rows_left;  // from row 0 to the document's end

  PackedRows() = default;
  // Row 0 is head `head_offset` of the group, at `token`; rows end with the document's token `end_token`.
  __device__ PackedRows(const Args& args, const DocumentView& d, int32_t kv_head, int32_t token, int32_t head_offset,
                        int32_t end_token, int rows)
      : first_token(d.start_q + token),
        token(token),
        head_offset(head_offset),
        group(args.group),
        inverse(args.group_inverse),
        first_head(kv_head * args.group),
        rows_left(static_cast<int64_t>(end_token - token) * args.group - head_offset) {
    valid = static_cast<int32_t>(rows_left < rows ? rows_left : rows);
  }
  // The backward's row tile `tile` (row_tiles). Rows before the document's first query do not exist.
  __device__ PackedRows(const Args& args, const DocumentView& d, int32_t kv_head, int32_t tile, int rows)
      : PackedRows(args, d, kv_head,
                   static_cast<int32_t>(static_cast<int64_t>(tile) * rows / args.group) - d.queries_before(),
                   static_cast<int32_t>(static_cast<int64_t>(tile) * rows % args.group), d.tokens, rows) {}
  // A number of rows to move by; negative is back.
  struct Stride {
    int32_t rows;
    int32_t tokens;  // the most that it moves back
  };
  __device__ Stride stride(int by) const { return {by, by < 0 ? quotient(group - 1 - by) : 0}; }
  // The `rows` rows that start one stride on.
  __device__ PackedRows moved(const Stride& by, int rows) const {
    const int32_t row = head_offset + by.rows + by.tokens * group;
    const int32_t tokens = quotient(row);
    const int32_t step = tokens - by.tokens;
    PackedRows result = *this;
    result.first_token += step;
    result.token += step;
    result.head_offset = row - tokens * group;
    result.rows_left -= by.rows;
    result.valid = static_cast<int32_t>(result.rows_left < rows ? result.rows_left : rows);
    return result;
  }
  __device__ PackedRows moved(int by, int rows) const { return moved(stride(by), rows); }
  __device__ int32_t quotient(int x) const { return static_cast<int32_t>((static_cast<uint32_t>(x) * inverse) >> 22); }
  __device__ int32_t token_step(int row) const { return quotient(row + head_offset); }
  __device__ int32_t token_of(int row) const { return token + token_step(row); }
  __device__ bool exists(int row) const { return row < valid && token_of(row) >= 0; }
  // Of the first row that exists.
  __device__ int32_t begin_token() const { return token < 0 ? 0 : token; }
  __device__ int32_t last_token() const { return token_of(valid - 1); }
  // Element offset of a row in `rows`, or in a contiguous [total, num_heads] array with unit head stride.
  __device__ int64_t offset(int row, int64_t token_stride, int64_t head_stride) const {
    const int32_t step = token_step(row);
    return (first_token + step) * token_stride + (first_head + row + head_offset - step * group) * head_stride;
  }
};

}  // namespace packing_ops::attention
