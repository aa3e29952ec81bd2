// Where a prefix tree may fork: a segment with children is a multiple of this long. Every key tile of attention divides
// it, so that a tile is in one segment.
#pragma once

#include <cstdint>

namespace packing_ops {

constexpr int64_t kForkAlignment = 128;

}  // namespace packing_ops
