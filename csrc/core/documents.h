// Documents inside a packed row, as cu_seqlens tells them.
#pragma once

#include <cstdint>

#include "core/interval.h"
#include "core/macros.h"

namespace packing_ops {

// Documents of a packed row of `total` slots. On a GPU the values cannot be checked before the launch, so every
// read of them is clamped: a wrong entry yields an empty or shorter document, never an address outside the row.
struct Documents {
  const int32_t* cu_seqlens = nullptr;  // [num_documents + 1]
  int64_t num_documents = 0;
  int64_t total = 0;

  PACKING_OPS_HOST_DEVICE int64_t bound(int64_t i) const {
    const int64_t value = cu_seqlens[i];
    return value < 0 ? 0 : (value > total ? total : value);
  }
  PACKING_OPS_HOST_DEVICE Interval<int64_t> operator[](int64_t i) const {
    const int64_t start = bound(i);
    const int64_t end = bound(i + 1);
    return {start, end < start ? start : end};
  }
  // One past the last slot that belongs to a document; the slots after it are padding.
  PACKING_OPS_HOST_DEVICE int64_t end() const { return bound(num_documents); }

  // The document that holds slot t, or num_documents for the padding after the last one.
  // Zero-length documents hold nothing, so the answer is the last i with cu_seqlens[i] <= t.
  PACKING_OPS_HOST_DEVICE int64_t document_of(int64_t t) const {
    int64_t low = 0;
    int64_t high = num_documents + 1;
    while (high - low > 1) {
      const int64_t mid = (low + high) / 2;
      if (cu_seqlens[mid] <= t) {
        low = mid;
      } else {
        high = mid;
      }
    }
    return low;
  }
};

}  // namespace packing_ops
