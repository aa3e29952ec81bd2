// visible_end of varlen_attention: which calls may have it, and what its values may be.
#include "host/tensor_check.h"
#include "ops/attention/attention_bind.h"

namespace packing_ops {

namespace {

// Of document i; its query t is at key t + keys - tokens.
void check_document(const int32_t* visible_end, Interval<int64_t> q, int64_t keys) {
  const int64_t shift = keys - q.size();
  for (int64_t t = q.begin; t < q.end; ++t) {
    const int64_t own = t - q.begin + shift;
    const int64_t end = visible_end[t];
    check(end > own, "visible_end: expected at least ", own + 1, " at index ", t, ", one more than the position ", own,
          " of its query, got ", end);
    check(end <= keys, "visible_end: expected at most ", keys, ", the document's keys, at index ", t, ", got ", end);
    check(t == q.begin || end >= visible_end[t - 1], "visible_end: expected never to decrease inside a document, got ",
          end, " after ", t == q.begin ? 0 : visible_end[t - 1], " at index ", t);
  }
}

}  // namespace

std::optional<Tensor> taken_visible_end(const std::optional<Tensor>& visible_end, const Documents& documents_q,
                                        const Documents& documents_k, bool causal, int64_t window_left,
                                        int64_t window_right, const Tensor& anchor, const char* anchor_name) {
  if (!visible_end) return std::nullopt;
  check_dtype(*visible_end, "visible_end", {DType::kInt32});
  check_same_device(*visible_end, "visible_end", anchor, anchor_name);
  check_shape(*visible_end, "visible_end", {documents_q.total}, "[total_q]");
  check(causal, "visible_end: expected causal=True, whose limit it takes the place of, got causal=False");
  check(window_right == -1, "window_size: expected -1 to the right beside visible_end, which is the limit there, got (",
        window_left, ", ", window_right, ")");
  Tensor ends = dense(*visible_end);
  if (!ends.is_cpu()) return ends;
  const auto* values = static_cast<const int32_t*>(ends.data_ptr());
  for (int64_t i = 0; i < documents_q.num_documents; ++i) check_document(values, documents_q[i], documents_k[i].size());
  return ends;
}

}  // namespace packing_ops
