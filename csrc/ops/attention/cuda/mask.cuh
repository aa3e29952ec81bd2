// The mask inside one document: which keys are visible to which tokens, in the document's coordinates.
#pragma once

#include "core/documents.h"
#include "core/interval.h"
#include "ops/attention/cuda/plan.h"

namespace packing_ops::attention {

PACKING_OPS_HOST_DEVICE Interval<int32_t> clamped(int32_t begin, int32_t end, int32_t size) {
  begin = begin < 0 ? 0 : (begin > size ? size : begin);
  end = end < begin ? begin : (end > size ? size : end);
  return {begin, end};
}

// One document; query token i has key position i + shift (bottom-right aligned). 32 bits hold all of it: kMaxTokens,
// kOpenWindow.
struct DocumentView {
  int64_t start_q;
  int64_t start_k;  // the row of its first key, or in pages the document's number
  int32_t tokens;   // queries
  int32_t keys;
  Window window;

  PACKING_OPS_HOST_DEVICE int32_t shift() const { return keys - tokens; }
  // Keys before the first query's: queries that the document has and the call has not.
  PACKING_OPS_HOST_DEVICE int32_t queries_before() const { return shift() > 0 ? shift() : 0; }
  // Keys from the first that `token` sees to `end`.
  PACKING_OPS_HOST_DEVICE Interval<int32_t> keys_before(int32_t end, int32_t token) const {
    return clamped(token + shift() - window.left, end, keys);
  }
  // Tokens from `begin` to the last that sees `key`.
  PACKING_OPS_HOST_DEVICE Interval<int32_t> tokens_from(int32_t begin, int32_t key) const {
    return clamped(begin, key - shift() + window.left + 1, tokens);
  }
  // No (token, key) of these is masked. `end`: where the first token's keys end.
  PACKING_OPS_HOST_DEVICE bool all_visible(int32_t end, int32_t last_token, int32_t first_key, int32_t last_key) const {
    return last_key < keys && last_key < end && first_key >= last_token + shift() - window.left;
  }
};

// The same with its limit to the right: visible_end, if the call has it, or the window's. It never decreases in a
// document, so a tile of tokens sees an interval of keys, and a tile of keys is seen by an interval of tokens.
struct DocumentWithEnds : DocumentView {
  VisibleEnd ends;

  // Where the keys end that a token sees; it may be past the document's keys, or before them.
  PACKING_OPS_HOST_DEVICE int32_t end_of(int32_t token) const {
    return ends.end == nullptr ? token + shift() + window.right + 1 : ends.end[start_q + token];
  }
  // Keys visible to at least one of the tokens first .. last. Both ends grow with both.
  PACKING_OPS_HOST_DEVICE Interval<int32_t> visible_keys(int32_t first, int32_t last) const {
    return keys_before(end_of(last), first);
  }
  // Keys visible to all of them.
  PACKING_OPS_HOST_DEVICE Interval<int32_t> keys_visible_to_all(int32_t first, int32_t last) const {
    return keys_before(end_of(first), last);
  }
  // Tokens that attend to at least one of the keys first .. last.
  PACKING_OPS_HOST_DEVICE Interval<int32_t> tokens_attending_to(int32_t first, int32_t last) const {
    return tokens_from(ends.end == nullptr ? first - shift() - window.right : ends.first_token[start_k + first], last);
  }
  // The first token that sees further than the document's first `count` keys; all tokens do for a negative count.
  PACKING_OPS_HOST_DEVICE int32_t first_token_beyond(int32_t count) const {
    if (count < 0) return 0;
    return keys <= count ? tokens : tokens_attending_to(count, keys - 1).begin;
  }
};

// The backward's row tiles, of `rows` packed rows each, that hold a row of these tokens. They are counted from the
// document's first key, as if each key had a query: sums over rows are the same whichever of its last queries are here.
PACKING_OPS_HOST_DEVICE Interval<int32_t> row_tiles(const DocumentView& d, Interval<int32_t> tokens, int32_t group,
                                                    int32_t rows) {
  const int64_t before = d.queries_before();
  const int32_t begin = static_cast<int32_t>((before + tokens.begin) * group / rows);
  if (tokens.empty()) return {begin, begin};
  return {begin, static_cast<int32_t>(((before + tokens.end) * group - 1) / rows + 1)};
}

// Row tiles whose dq is a sum over several key tiles: those that attend beyond the first `keys` keys.
template <class View, class Rows>
PACKING_OPS_HOST_DEVICE Interval<int32_t> row_tiles_with_partial_dq(const View& d, int32_t group, const Rows& rows,
                                                                    int32_t keys) {
  if (d.keys <= keys) return {0, 0};
  return row_tiles(d, d.tokens_attending_to(keys, d.keys - 1), group, rows);
}

PACKING_OPS_HOST_DEVICE DocumentView document_view(const Documents& documents_q, const Documents& documents_k,
                                                   int64_t document, Window window) {
  const Interval<int64_t> q = documents_q[document];
  const Interval<int64_t> k = documents_k[document];
  return {q.begin, k.begin, static_cast<int32_t>(q.size()), static_cast<int32_t>(k.size()), window};
}

PACKING_OPS_HOST_DEVICE DocumentView document_view(const PlanEntry& entry, Window window) {
  return {entry.start_q, entry.start_k, entry.tokens, entry.keys, window};
}

PACKING_OPS_HOST_DEVICE DocumentWithEnds document_with_ends(const Documents& documents_q, const Documents& documents_k,
                                                            int64_t document, const PlanView& plan) {
  if (!plan.pages.used) return {document_view(documents_q, documents_k, document, plan.window), plan.ends};
  const Interval<int64_t> q = documents_q[document];
  const auto keys = static_cast<int32_t>(plan.pages.keys(document));
  return {{q.begin, document, static_cast<int32_t>(q.size()), keys, plan.window}, plan.ends};
}

PACKING_OPS_HOST_DEVICE DocumentWithEnds document_with_ends(const PlanEntry& entry, const PlanView& plan) {
  return {document_view(entry, plan.window), plan.ends};
}

}  // namespace packing_ops::attention
