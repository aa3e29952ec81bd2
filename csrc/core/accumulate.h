#pragma once

#include <type_traits>

namespace packing_ops {

// What sums and products of an element type are computed in.
template <class T>
using accumulate_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

}  // namespace packing_ops
