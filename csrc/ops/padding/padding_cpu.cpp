// The specification: rows are moved in runs of neighbours, one memcpy a run.
#include <algorithm>
#include <cstring>
#include <limits>

#include "core/error.h"
#include "core/macros.h"
#include "host/parallel.h"
#include "host/scalar.h"
#include "ops/padding/padding.h"

namespace packing_ops {

namespace {

constexpr int64_t kGrainSlots = 32768;  // mask slots a thread should have before a second one helps
constexpr int64_t kGrainBytes = 65536;  // the same for moved bytes

int64_t grain_rows(int64_t grain, int64_t row) {
  return std::max<int64_t>(1, grain / row);
}

// f(element type) for the dtype of a mask.
template <class F>
void dispatch_mask(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
      return f(uint8_t{});
    case DType::kInt16:
      return f(int16_t{});
    case DType::kInt32:
      return f(int32_t{});
    case DType::kInt64:
      return f(int64_t{});
    default:
      return dispatch_float(dtype, f);
  }
}

template <class T>
PACKING_OPS_MULTIVERSION void mark_slots(const T* mask, int64_t count, uint8_t* real) {
  for (int64_t t = 0; t < count; ++t) real[t] |= mask[t] != T(0);
}

// Row `b` of a mask or'ed into real[0 : seqlen].
void mark_real(const void* mask, DType dtype, int64_t b, int64_t seqlen, uint8_t* real) {
  dispatch_mask(
      dtype, [&](auto element) { mark_slots(static_cast<const decltype(element)*>(mask) + b * seqlen, seqlen, real); });
}

PACKING_OPS_MULTIVERSION
int32_t count_real(const uint8_t* real, int64_t seqlen) {
  int32_t count = 0;
  for (int64_t t = 0; t < seqlen; ++t) count += real[t];
  return count;
}

// Strictly increasing and inside the rows, no -1 among them. Fast path: one pass without branches.
PACKING_OPS_MULTIVERSION
bool plainly_right(const int64_t* indices, int64_t total, int64_t rows) {
  int64_t wrong = 0;
  for (int64_t i = 1; i < total; ++i) wrong += indices[i] <= indices[i - 1];
  return wrong == 0 && (total == 0 || (indices[0] >= 0 && indices[total - 1] < rows));
}

void check_indices(const MoveRowsParams& p) {
  const int64_t rows = p.batch * p.seqlen;
  // Entries after total are all -1 in a layout, so the first of them tells whether rows would be lost.
  if (p.num_indices > p.total && p.indices[p.total] != -1) {
    fail("indices: expected no more rows than total=", p.total, ", got row ", p.indices[p.total], " after them");
  }
  if (plainly_right(p.indices, p.total, rows)) return;
  int64_t previous = -1;
  for (int64_t i = 0; i < p.total; ++i) {
    const int64_t row = p.indices[i];
    if (row == -1) continue;
    check(row >= 0 && row < rows, "indices: expected -1 or a row below batch * seqlen = ", rows, ", got ", row,
          " at index ", i);
    check(row > previous, "indices: expected strictly increasing rows, got ", row, " after ", previous, " at index ",
          i);
    previous = row;
  }
}

// How many entries from i on, before `end`, name neighbouring rows (or are all -1).
int64_t run_length(const int64_t* indices, int64_t i, int64_t end) {
  const int64_t first = indices[i];
  const int64_t step = first < 0 ? 0 : 1;
  int64_t count = 1;
  while (i + count < end && indices[i + count] == first + step * count) ++count;
  return count;
}

void copy_rows(char* out, const char* in, int64_t in_stride, int64_t row_bytes, int64_t count) {
  if (in_stride == row_bytes) {
    std::memcpy(out, in, count * row_bytes);
    return;
  }
  for (int64_t i = 0; i < count; ++i) std::memcpy(out + i * row_bytes, in + i * in_stride, row_bytes);
}

using SmallRows = void (*)(const int64_t* indices, const char* in, int64_t in_stride, char* out, int64_t count);

// The one of four instances for rows of 1, 2, 4 or 8 bytes, else null.
SmallRows small_rows(int64_t row_bytes, SmallRows one, SmallRows two, SmallRows four, SmallRows eight) {
  return row_bytes == 1 ? one : row_bytes == 2 ? two : row_bytes == 4 ? four : row_bytes == 8 ? eight : nullptr;
}

// Rows as small as a token id: a copy of known size is one instruction, where a run would cost a call of memcpy.
template <int64_t kRowBytes>
void gather_small_rows(const int64_t* indices, const char* in, int64_t in_stride, char* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (indices[i] < 0) {
      std::memset(out + i * kRowBytes, 0, kRowBytes);
    } else {
      std::memcpy(out + i * kRowBytes, in + indices[i] * in_stride, kRowBytes);
    }
  }
}

// Packed rows [begin, end).
void gather_range(const MoveRowsParams& p, const RowMove& m, int64_t begin, int64_t end) {
  const bool one_row_stride = p.batch == 1 || m.batch_stride == p.seqlen * m.row_stride;
  if (one_row_stride) {
    const auto small =
        small_rows(m.row_bytes, gather_small_rows<1>, gather_small_rows<2>, gather_small_rows<4>, gather_small_rows<8>);
    if (small) return small(p.indices + begin, m.input, m.row_stride, m.output + begin * m.row_bytes, end - begin);
  }
  for (int64_t i = begin; i < end;) {
    int64_t count = run_length(p.indices, i, end);
    char* out = m.output + i * m.row_bytes;
    const int64_t row = p.indices[i];
    if (row < 0) {
      std::memset(out, 0, count * m.row_bytes);
    } else if (one_row_stride) {
      copy_rows(out, m.input + row * m.row_stride, m.row_stride, m.row_bytes, count);
    } else {
      const int64_t b = row / p.seqlen;
      const int64_t t = row % p.seqlen;
      count = std::min(count, p.seqlen - t);
      copy_rows(out, m.input + b * m.batch_stride + t * m.row_stride, m.row_stride, m.row_bytes, count);
    }
    i += count;
  }
}

// First entry that may name a row >= `row`: binary search that steps over -1.
int64_t first_entry_from(const int64_t* indices, int64_t total, int64_t row) {
  int64_t low = 0;
  int64_t high = total;
  while (low < high) {
    const int64_t mid = (low + high) / 2;
    int64_t probe = mid;
    while (probe < high && indices[probe] < 0) ++probe;
    if (probe < high && indices[probe] < row) {
      low = probe + 1;
    } else {
      high = mid;
    }
  }
  return low;
}

template <int64_t kRowBytes>
void scatter_small_rows(const int64_t* indices, const char* in, int64_t in_stride, char* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (indices[i] >= 0) std::memcpy(out + indices[i] * kRowBytes, in + i * in_stride, kRowBytes);
  }
}

// Padded rows [begin, end): each is written once, copied or zeroed.
void scatter_range(const MoveRowsParams& p, const RowMove& m, int64_t begin, int64_t end) {
  int64_t i = first_entry_from(p.indices, p.total, begin);
  const auto small = small_rows(m.row_bytes, scatter_small_rows<1>, scatter_small_rows<2>, scatter_small_rows<4>,
                                scatter_small_rows<8>);
  if (small) {
    std::memset(m.output + begin * m.row_bytes, 0, (end - begin) * m.row_bytes);
    const int64_t stop = first_entry_from(p.indices, p.total, end);
    return small(p.indices + i, m.input + i * m.row_stride, m.row_stride, m.output, stop - i);
  }
  for (int64_t row = begin; row < end;) {
    while (i < p.total && p.indices[i] < 0) ++i;
    const int64_t next = i < p.total ? std::min(p.indices[i], end) : end;
    if (row < next) {
      std::memset(m.output + row * m.row_bytes, 0, (next - row) * m.row_bytes);
      row = next;
    } else {
      const int64_t count = std::min(run_length(p.indices, i, p.total), end - row);
      copy_rows(m.output + row * m.row_bytes, m.input + i * m.row_stride, m.row_stride, m.row_bytes, count);
      row += count;
      i += count;
    }
  }
}

}  // namespace

void launch_unpad_layout_cpu(const UnpadLayoutParams& p) {
  const int64_t grain = grain_rows(kGrainSlots, std::max<int64_t>(p.seqlen, 1));
  parallel_for(0, p.batch, grain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      uint8_t* real = p.real + b * p.seqlen;
      std::fill_n(real, p.seqlen, uint8_t{0});
      mark_real(p.mask, p.mask_dtype, b, p.seqlen, real);
      p.seqused[b] = count_real(real, p.seqlen);
      if (p.unused) mark_real(p.unused, p.unused_dtype, b, p.seqlen, real);
      p.cu_seqlens[b + 1] = p.unused ? count_real(real, p.seqlen) : p.seqused[b];
    }
  });

  int32_t longest = 0;
  p.cu_seqlens[0] = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    longest = std::max(longest, p.cu_seqlens[b + 1]);
    p.cu_seqlens[b + 1] += p.cu_seqlens[b];
  }
  const int64_t total = p.cu_seqlens[p.batch];
  p.totals[0] = total;
  p.totals[1] = longest;

  parallel_for(0, p.batch, grain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      int64_t* out = p.indices + p.cu_seqlens[b];
      const int64_t count = p.cu_seqlens[b + 1] - p.cu_seqlens[b];
      // No branch on the mask: a slot that is not real is overwritten by the next one.
      for (int64_t row = b * p.seqlen, n = 0; n < count; ++row) {
        out[n] = row;
        n += p.real[row];
      }
    }
  });
  std::fill(p.indices + total, p.indices + p.batch * p.seqlen, int64_t{-1});
}

// A row is read from each end to its first real slot, and no further than the rows before it have shown.
void launch_real_columns_cpu(const RealColumnsParams& p) {
  int64_t first = p.seqlen;
  int64_t end = 0;
  dispatch_mask(p.mask_dtype, [&](auto element) {
    for (int64_t b = 0; b < p.batch; ++b) {
      const auto* row = static_cast<const decltype(element)*>(p.mask) + b * p.seqlen;
      for (int64_t t = 0; t < first; ++t) {
        if (row[t] != decltype(element)(0)) first = t;
      }
      for (int64_t t = p.seqlen; t > end; --t) {
        if (row[t - 1] != decltype(element)(0)) end = t;
      }
    }
  });
  p.columns[0] = end == 0 ? 0 : first;
  p.columns[1] = end;
}

void launch_gather_rows_cpu(const MoveRowsParams& p) {
  check_indices(p);
  for (int64_t n = 0; n < p.num_moves; ++n) {
    const RowMove& m = p.moves[n];
    if (m.row_bytes == 0) continue;
    parallel_for(0, p.total, grain_rows(kGrainBytes, m.row_bytes),
                 [&](int64_t begin, int64_t end) { gather_range(p, m, begin, end); });
  }
}

void launch_scatter_rows_cpu(const MoveRowsParams& p) {
  check_indices(p);
  for (int64_t n = 0; n < p.num_moves; ++n) {
    const RowMove& m = p.moves[n];
    if (m.row_bytes == 0) continue;
    parallel_for(0, p.batch * p.seqlen, grain_rows(kGrainBytes, m.row_bytes),
                 [&](int64_t begin, int64_t end) { scatter_range(p, m, begin, end); });
  }
}

}  // namespace packing_ops
