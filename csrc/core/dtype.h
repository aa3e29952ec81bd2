// Element types, without torch: what a params struct carries so that a launcher can pick its instance.
#pragma once

#include <cstddef>
#include <cstdint>

namespace packing_ops {

enum class DType : uint8_t {
  kBool,
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kBFloat16,
  kFloat16,
  kFloat32,
  kFloat64,
  kOther,  // moved as bytes, never computed with
};

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return "bool";
    case DType::kUInt8:
      return "uint8";
    case DType::kInt8:
      return "int8";
    case DType::kInt16:
      return "int16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    default:
      return "an unsupported dtype";
  }
}

}  // namespace packing_ops
