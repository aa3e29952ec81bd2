// Views that kernels read through, on either device.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/macros.h"

namespace packing_ops {

// A contiguous array of int32 or int64: lengths, position_ids, labels, uids. The dtype is the caller's choice.
struct IndexView {
  const void* data = nullptr;
  bool is_int64 = false;

  PACKING_OPS_HOST_DEVICE int64_t operator[](int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct MutableIndexView {
  void* data = nullptr;
  bool is_int64 = false;

  PACKING_OPS_HOST_DEVICE void set(int64_t i, int64_t value) const {
    if (is_int64) {
      static_cast<int64_t*>(data)[i] = value;
    } else {
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(value);
    }
  }
};

}  // namespace packing_ops
