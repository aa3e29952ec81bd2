// Checks of values: the specification.
#include <cstring>

#include "core/error.h"
#include "ops/boundaries/boundaries.h"

namespace packing_ops {

namespace {

void check_end(const CheckDocumentsParams& p, const IndexView& cu_seqlens, const char* name) {
  const int64_t end = cu_seqlens[p.num_documents];
  check(end == p.total(), name, ": expected to end at the batch's ", p.total(), " tokens, got ", end);
}

void check_positions(const CheckDocumentsParams& p) {
  for (int64_t t = 0; t + 2 < p.total(); ++t) {
    check(!p.restarts_in_document(t),
          "position_ids: expected to restart where cu_seq_lens_q starts a document and only there, got a restart "
          "inside of one at index ",
          t + 1);
  }
  for (int64_t i = 0; i < p.num_documents; ++i) {
    check(!p.goes_on(i),
          "position_ids: expected to restart where cu_seq_lens_q starts a document and only there, got one that goes "
          "on with the positions before it at index ",
          p.cu_seqlens_q[i]);
  }
  for (int64_t i = 0; i <= p.num_documents; ++i) {
    check(p.cu_seqlens_k[i] == p.cu_seqlens_q[i],
          "cu_seq_lens_k: expected the documents of cu_seq_lens_q, whose tokens the keys are, got others");
  }
}

}  // namespace

void launch_check_documents_cpu(const CheckDocumentsParams& p) {
  check_end(p, p.cu_seqlens_q, "cu_seq_lens_q");
  check_end(p, p.cu_seqlens_k, "cu_seq_lens_k");
  for (int64_t t = 0; p.mask && t < p.total(); ++t) {
    check(p.mask[t],
          "attention_mask: expected no padding beside cu_seq_lens_q, which gives every slot to a document, and no "
          "numbers "
          "of other documents, got one or the other at index ",
          t);
  }
  if (p.positions) check_positions(p);
}

void launch_check_unchanged_cpu(const CheckUnchangedParams& p) {
  if (p.bytes == 0 || std::memcmp(p.values, p.expected, static_cast<size_t>(p.bytes)) == 0) return;
  const FaultText text = fault_text(p.fault);
  fail(text.argument, ": expected ", text.wanted, ", got other values");
}

}  // namespace packing_ops
