// Who sees whom inside one document, in the document's own coordinates.
#pragma once

#include "core/segment.h"
#include "ops/attention/cuda/plan.h"

namespace packing_ops::attention {

struct Range {
  int32_t first;
  int32_t end;  // exclusive
  PACKING_OPS_HOST_DEVICE bool empty() const { return end <= first; }
};

PACKING_OPS_HOST_DEVICE Range clamped_range(int32_t first, int32_t end, int32_t size) {
  first = first < 0 ? 0 : (first > size ? size : first);
  end = end < first ? first : (end > size ? size : end);
  return {first, end};
}

// One document: query token i stands at key position i + shift. In 32 bits, as kMaxTokens and kOpenWindow allow.
struct DocumentView {
  int64_t start_q;
  int64_t start_k;
  int32_t tokens;  // queries
  int32_t keys;
  Window window;

  PACKING_OPS_HOST_DEVICE int32_t shift() const { return keys - tokens; }
  // Keys that at least one of the tokens first .. last sees. Growing with both.
  PACKING_OPS_HOST_DEVICE Range keys_seen(int32_t first, int32_t last) const {
    return clamped_range(first + shift() - window.left, last + shift() + window.right + 1, keys);
  }
  // Keys that every one of them sees.
  PACKING_OPS_HOST_DEVICE Range keys_seen_by_all(int32_t first, int32_t last) const {
    return clamped_range(last + shift() - window.left, first + shift() + window.right + 1, keys);
  }
  // Tokens that see at least one of the keys first .. last.
  PACKING_OPS_HOST_DEVICE Range tokens_seeing(int32_t first, int32_t last) const {
    return clamped_range(first - shift() - window.right, last - shift() + window.left + 1, tokens);
  }
  // Every one of the tokens sees every one of the keys.
  PACKING_OPS_HOST_DEVICE bool all_seen(int32_t first_token, int32_t last_token, int32_t first_key,
                                        int32_t last_key) const {
    return last_key < keys && last_key <= first_token + shift() + window.right &&
           first_key >= last_token + shift() - window.left;
  }
};

// Tiles of `rows` packed rows that hold a row of these tokens.
PACKING_OPS_HOST_DEVICE Range row_tiles(Range tokens, int32_t group, int32_t rows) {
  const int32_t first = static_cast<int32_t>(static_cast<int64_t>(tokens.first) * group / rows);
  if (tokens.empty()) return {first, first};
  return {first, static_cast<int32_t>((static_cast<int64_t>(tokens.end) * group - 1) / rows + 1)};
}

// Those that see more than the first `keys` keys: the backward adds up their dq over several key tiles.
PACKING_OPS_HOST_DEVICE Range tiles_with_sums(const DocumentView& d, int32_t group, int32_t rows, int32_t keys) {
  return row_tiles(d.tokens_seeing(keys, d.keys - 1), group, rows);
}

PACKING_OPS_HOST_DEVICE DocumentView document_view(const Documents& documents_q, const Documents& documents_k,
                                                   int64_t document, Window window) {
  const Segment q = documents_q[document];
  const Segment k = documents_k[document];
  return {q.start, k.start, static_cast<int32_t>(q.end - q.start), static_cast<int32_t>(k.end - k.start), window};
}

PACKING_OPS_HOST_DEVICE DocumentView document_view(const PlanEntry& entry, Window window) {
  return {entry.start_q, entry.start_k, entry.tokens, entry.keys, window};
}

}  // namespace packing_ops::attention
