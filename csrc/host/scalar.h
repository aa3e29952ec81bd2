// Arithmetic types of CPU kernels: torch's half types, and what each one is accumulated in.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "core/accumulate.h"
#include "core/dtype.h"
#include "core/error.h"

namespace packing_ops {

using BFloat16 = torch::headeronly::BFloat16;
using Half = torch::headeronly::Half;

// f(T{}) with the C++ type of a floating dtype.
template <class F>
void dispatch_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kFloat64:
      return f(double{});
    case DType::kBFloat16:
      return f(BFloat16{});
    case DType::kFloat16:
      return f(Half{});
    default:
      fail("expected a floating dtype, got ", dtype_name(dtype));
  }
}

}  // namespace packing_ops
