// The work-list of a packed batch: which tiles there are, the costly ones first. Made on the device, read by every
// layer's forward and backward. Tiles start at each document's start, so they are the same wherever a document lies.
#pragma once

#include <cstdint>

#include "core/segment.h"
#include "ops/attention/attention.h"
#include "ops/attention/cuda/tiles.h"

namespace packing_ops::attention {

// A query at key position p sees keys p - left to p + right; causal is right = 0.
constexpr int32_t kOpenWindow = 1 << 30;
constexpr int64_t kMaxTokens = 1 << 29;  // of a packed batch on CUDA
constexpr int64_t kMaxGroup = 1 << 10;   // q heads to a kv head on CUDA
struct Window {
  int32_t left;
  int32_t right;
};

// One unit, with its document's place so that nothing else has to be looked up.
struct alignas(16) PlanEntry {
  int32_t document;
  int32_t tile;
  int32_t start_q;
  int32_t tokens;
  int32_t start_k;
  int32_t keys;
  union {
    int32_t first_token;  // of a forward unit's rows
    uint32_t first_sum;   // of a backward unit's document: its first place in PlanView::sum_ring
  };
  int32_t skipped;  // of a forward unit: heads of its group that belong to the unit before
};

// int32 words: header, the cu_seqlens that it was made for, then lists of entries: the forward's, its short documents',
// those that are whole units, the backward's of several key tiles, of one, and of small documents; attention_plan_size
// of them are enough.
struct PlanView {
  int32_t* data = nullptr;
  int64_t total_q = 0;
  int64_t total_k = 0;
  int64_t num_documents = 0;
  AttentionTiles tiles;
  Window window = {kOpenWindow, kOpenWindow};
  int32_t num_kv_heads = 1;
  // Partial sums of dq: the row tiles of documents of several key tiles, kv head by kv head, have places in the list's
  // order. Place i lies at i modulo sum_ring, a power of two; memory has sum_tiles, where places do not get further.
  uint32_t sum_ring = 1;
  int64_t sum_tiles = 0;

  enum Header {
    kForward,
    kForwardShort,
    kForwardWhole,
    kBackward,
    kSingle,
    kSmall,
    kLists,
    kEndQ = kLists,
    kEndK,
    kGeometry,  // geometry() of the plan that it was made for
    kHeaderWords = 16,
    kEntryWords = 8
  };
  PlanEntry* entries[kLists] = {};  // each list's first, in `data`

  // Copies of cu_seqlens, [num_documents + 1] each: a plan is good for these values alone.
  PACKING_OPS_HOST_DEVICE int32_t* made_for_q() const { return data + kHeaderWords; }
  PACKING_OPS_HOST_DEVICE int32_t* made_for_k() const { return made_for_q() + num_documents + 1; }

  // A digest of what a plan depends on beside cu_seqlens.
  PACKING_OPS_HOST_DEVICE int32_t geometry() const {
    const int32_t words[] = {tiles.group,      tiles.forward_rows, tiles.forward_keys,  tiles.short_rows,
                             tiles.short_most, tiles.whole_most,   tiles.backward_rows, tiles.backward_keys,
                             tiles.small_keys, window.left,        window.right,        num_kv_heads};
    uint32_t digest = 2166136261u;  // FNV-1a
    for (const int32_t word : words) digest = (digest ^ static_cast<uint32_t>(word)) * 16777619u;
    return static_cast<int32_t>(digest);
  }

  PACKING_OPS_HOST_DEVICE int64_t forward_capacity() const {
    return total_q * tiles.group / tiles.forward_rows + num_documents;
  }
  PACKING_OPS_HOST_DEVICE int64_t forward_short_capacity() const {
    return total_q * tiles.group / tiles.short_rows + num_documents;
  }
  PACKING_OPS_HOST_DEVICE int64_t backward_capacity() const { return total_k / tiles.backward_keys + num_documents; }
};

// The plan of the kernels that serve this geometry.
PlanView plan_view(const AttentionPlanParams& p);

}  // namespace packing_ops::attention
