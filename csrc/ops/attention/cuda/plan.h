// The plan of a packed batch: lists of tiles for persistent kernels, the costliest first. Built on the device once,
// read by the forward and backward of every layer. Tiles start at each document's start, the backward's at its first
// key's (row_tiles of mask.cuh), so a document's tiles are the same wherever it is in the pack.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/documents.h"
#include "ops/attention/attention.h"
#include "ops/attention/cuda/tiles.h"

namespace packing_ops::attention {

// A query at key position p sees keys p - left to p + right; causal is right = 0.
constexpr int32_t kOpenWindow = 1 << 30;
constexpr int64_t kMaxTokens = 1 << 29;  // of a packed batch on CUDA
struct Window {
  int32_t left;
  int32_t right;
};

// visible_end of a call, null without it. Where it is given it is the limit to the right instead of the window's.
struct VisibleEnd {
  const int32_t* end;          // [total_q]
  const int32_t* first_token;  // [total_k]: of the key's document, the first token that sees the key
};

// One unit of work and where its document is, so that a kernel looks nothing else up.
struct alignas(16) PlanEntry {
  int32_t document;
  union {
    int32_t tile;
    int32_t end_key;  // resident: where the keys end that its rows see
  };
  int32_t start_q;
  int32_t tokens;
  int32_t start_k;  // as in DocumentView
  int32_t keys;
  union {
    int32_t first_token;        // forward: of the tile's rows
    uint32_t first_ring_index;  // backward: of the document's row tiles in PlanView::dq_ring
  };
  union {
    int32_t head_offset;     // forward: of the tile's first row in its group
    int32_t document_tiles;  // forward by document, whose tiles start at whole tokens: of the document
    int32_t end_token;       // resident: one past the last of its rows'
  };
};

// The plan in memory, int32 words: a header, the cu_seqlens that it was built from, then a list of entries for each
// kernel. The header's first words are the lengths of the lists.
struct PlanView {
  int32_t* data = nullptr;
  int64_t total_q = 0;
  int64_t total_k = 0;
  int64_t num_documents = 0;
  AttentionTiles tiles;
  Window window = {kOpenWindow, kOpenWindow};
  int32_t num_kv_heads = 1;
  // Ring buffer of partial dq. The row tiles of documents of several key tiles are numbered in the list's order, kv
  // head by kv head; number i uses slot i % dq_ring (a power of two). Memory has dq_ring_tiles slots: fewer numbers,
  // fewer slots.
  uint32_t dq_ring = 1;
  int64_t dq_ring_tiles = 0;
  VisibleEnd ends = {nullptr, nullptr};  // a copy of visible_end and its inverse, in `data` behind the entries
  KeyPages pages;                        // the call's; the plan depends on its seqused_k and max_keys

  enum Header {
    kForward,
    kForwardShort,
    kForwardResident,
    kBackward,        // documents of several key tiles
    kBackwardSingle,  // up to tiles.single_keys keys: one key tile, no partial dq
    kBackwardSmall,   // up to tiles.small_keys keys: one smaller key tile
    kLists,
    kEndQ = kLists,
    kEndK,
    kGeometry,   // geometry() of the plan that it was built as
    kWrongEnds,  // 1: visible_end has a wrong value, the plan has no tiles
    kHeaderWords = 16,
    kEntryWords = 8
  };
  PlanEntry* entries[kLists] = {};  // each list's first, in `data`

  // Copies of cu_seqlens, [num_documents + 1] each: a plan is valid only for these values. In pages seqused_k instead
  // of the second.
  PACKING_OPS_HOST_DEVICE int32_t* planned_cu_seqlens_q() const { return data + kHeaderWords; }
  PACKING_OPS_HOST_DEVICE int32_t* planned_cu_seqlens_k() const { return planned_cu_seqlens_q() + num_documents + 1; }

  // What attention_plan writes.
  PACKING_OPS_HOST_DEVICE int32_t* planned_ends() const { return const_cast<int32_t*>(ends.end); }
  PACKING_OPS_HOST_DEVICE int32_t* planned_first_tokens() const { return const_cast<int32_t*>(ends.first_token); }

  // Hash of what a plan depends on in addition to cu_seqlens.
  PACKING_OPS_HOST_DEVICE int32_t geometry() const {
    const int32_t words[] = {tiles.group,
                             tiles.forward_rows,
                             tiles.forward_keys,
                             tiles.forward_by_document,
                             tiles.short_rows,
                             tiles.short_max_keys,
                             tiles.backward_rows,
                             tiles.resident_max_keys,
                             tiles.backward_keys,
                             tiles.small_keys,
                             tiles.single_keys,
                             window.left,
                             window_right(),
                             num_kv_heads,
                             static_cast<int32_t>(total_q),
                             static_cast<int32_t>(pages.used ? 0 : total_k),  // of pages: memory, which no list goes by
                             static_cast<int32_t>(pages.used ? pages.max_keys : -1)};
    uint32_t digest = 2166136261u;  // FNV-1a
    for (const int32_t word : words) digest = (digest ^ static_cast<uint32_t>(word)) * 16777619u;
    return static_cast<int32_t>(digest);
  }

  // Tokens of a unit of resident rows: 128; 32 where that would make fewer than 64 units, which leave half of the
  // multiprocessors without one. By sizes that the host knows: of causal documents with a query for each key at most
  // kResidentMaxKeys tokens are resident.
  PACKING_OPS_HOST_DEVICE int32_t resident_tokens() const {
    const int64_t of_documents = num_documents * kResidentMaxKeys;
    return (total_q < of_documents ? total_q : of_documents) * num_kv_heads <= 64 * 128 ? 32 : 128;
  }

  // -1 where visible_end is the limit.
  PACKING_OPS_HOST_DEVICE int32_t window_right() const { return ends.end == nullptr ? window.right : -1; }

  PACKING_OPS_HOST_DEVICE int64_t forward_capacity() const {
    return total_q * tiles.group / tiles.forward_rows + num_documents;
  }
  PACKING_OPS_HOST_DEVICE int64_t forward_short_capacity() const {
    return tiles.short_max_keys < 0 ? 0 : total_q * tiles.group / tiles.short_rows + num_documents;
  }
  PACKING_OPS_HOST_DEVICE int64_t forward_resident_capacity() const {
    return tiles.resident_max_keys < 0 ? 0 : total_q / resident_tokens() + num_documents;
  }
  // Units of resident rows, at most, and so the grid: a block without a unit would keep the next kernel from its
  // multiprocessor. As many queries as keys are taken for a query for each key; a block may serve several units.
  int64_t forward_resident_units() const {
    int64_t units = forward_resident_capacity();
    if (total_q == total_k && window_right() == 0) {
      units = std::min(units, num_documents * (kResidentMaxKeys / resident_tokens()));
    }
    return units * num_kv_heads;
  }
  PACKING_OPS_HOST_DEVICE int64_t backward_capacity() const { return total_k / tiles.backward_keys + num_documents; }
};

// The plan's layout in memory, for this geometry.
PlanView plan_view(const AttentionPlanParams& p);

}  // namespace packing_ops::attention
