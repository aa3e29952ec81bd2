#pragma once

#include "core/macros.h"

namespace packing_ops {

// [begin, end)
template <class T>
struct Interval {
  T begin;
  T end;

  PACKING_OPS_HOST_DEVICE bool empty() const { return end <= begin; }
  PACKING_OPS_HOST_DEVICE T size() const { return end - begin; }
};

}  // namespace packing_ops
