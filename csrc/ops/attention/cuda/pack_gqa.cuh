// Packed rows: the (token, head of the group) pairs of a document that attend to one kv head, as in PackGQA of
// FlashAttention-3.
#pragma once

#include "ops/attention/cuda/args.cuh"
#include "ops/attention/cuda/mask.cuh"

namespace packing_ops::attention {

// Packed rows of a document and kv head from `first` on: row r is token r / group, head r % group of the group.
struct GroupRows {
  int64_t first_token;  // of row 0, in the packed batch
  int32_t token;        // the same, in the document
  int32_t skipped;      // first % group
  int32_t group;
  uint32_t inverse;  // Args::group_inverse
  int32_t valid;     // rows that exist, of kRows
  int32_t first_head;
  int64_t left;  // rows from `first` to the document's end

  GroupRows() = default;
  // Row 0 is head `skipped` of the group at `token`, which is packed row `first` of the document.
  __device__ GroupRows(const Args& args, const DocumentView& d, int32_t kv_head, int32_t token, int32_t skipped,
                       int64_t first, int rows)
      : first_token(d.start_q + token),
        token(token),
        skipped(skipped),
        group(args.group),
        inverse(args.group_inverse),
        first_head(kv_head * args.group),
        left(static_cast<int64_t>(d.tokens) * args.group - first) {
    valid = static_cast<int32_t>(left < rows ? left : rows);
  }
  __device__ GroupRows(const Args& args, const DocumentView& d, int32_t kv_head, int64_t first, int rows)
      : GroupRows(args, d, kv_head, static_cast<int32_t>(first / args.group), static_cast<int32_t>(first % args.group),
                  first, rows) {}
  // A number of rows to go by, back where it is less than 0.
  struct Stride {
    int32_t rows;
    int32_t tokens;  // further back than this many no stride goes
  };
  __device__ Stride stride(int by) const { return {by, by < 0 ? quotient(group - 1 - by) : 0}; }
  // The `rows` rows that start a stride further.
  __device__ GroupRows moved(const Stride& by, int rows) const {
    const int32_t row = skipped + by.rows + by.tokens * group;
    const int32_t tokens = quotient(row);
    const int32_t step = tokens - by.tokens;
    GroupRows there = *this;
    there.first_token += step;
    there.token += step;
    there.skipped = row - tokens * group;
    there.left -= by.rows;
    there.valid = static_cast<int32_t>(there.left < rows ? there.left : rows);
    return there;
  }
  __device__ GroupRows moved(int by, int rows) const { return moved(stride(by), rows); }
  __device__ int32_t quotient(int x) const { return static_cast<int32_t>((static_cast<uint32_t>(x) * inverse) >> 22); }
  __device__ int32_t token_step(int row) const { return quotient(row + skipped); }
  __device__ int32_t token_of(int row) const { return token + token_step(row); }
  __device__ int32_t last_token() const { return token_of(valid - 1); }
  // Element offset of a row in `rows`, or in a contiguous [total, num_heads] array with unit head stride.
  __device__ int64_t offset(int row, int64_t token_stride, int64_t head_stride) const {
    const int32_t step = token_step(row);
    return (first_token + step) * token_stride + (first_head + row + skipped - step * group) * head_stride;
  }
};

}  // namespace packing_ops::attention
