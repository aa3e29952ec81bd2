// What the forward and the backward share of copying.
#pragma once

#include "ops/attention/cuda/sm90/forward.h"

namespace packing_ops::attention::sm90 {

// Stage index and mbarrier parity of a pipeline.
template <int kStages>
struct PipelineState {
  int stage = 0;
  int parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Tokens of a document as coordinates of a map: `before_end` and on reaches the end of its dimension where the document
// ends, so a tile holds zeros from there on, and nothing of another document. See make_map.
struct DocumentTokens {
  int32_t before_end;  // of the document's first token
  int32_t to_end;

  __device__ __forceinline__ DocumentTokens(int64_t start, int32_t tokens)
      : before_end(kMapTokens - tokens), to_end(static_cast<int32_t>(start) + tokens) {}
};

}  // namespace packing_ops::attention::sm90
