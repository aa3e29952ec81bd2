// Shared by the padding family's bind files.
#pragma once

#include <limits>

#include "host/tensor_view.h"
#include "ops/padding/padding.h"

namespace packing_ops {

constexpr int64_t kMaxTotal = std::numeric_limits<int32_t>::max();  // of slots: cu_seqlens are int32

// What UnpadLayoutParams says of each.
struct UnpadLayout {
  Tensor indices;
  Tensor cu_seqlens;
  Tensor seqused;
  Tensor totals;
};

// With host_totals the totals are in host memory, and wait_for_value tells when.
UnpadLayout start_layout(const Tensor& attention_mask, std::optional<Tensor> unused_mask, bool host_totals);

}  // namespace packing_ops
