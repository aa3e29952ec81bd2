#include "host/launch.h"

#include <torch/csrc/stable/ops.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "core/error.h"
#include "host/parallel.h"
#include "host/stream.h"

namespace packing_ops {

namespace {

FaultText attention_fault_text(Fault fault) {
  switch (fault) {
    case Fault::kPlanOfOtherDocuments:
      return {"plan",
              "one made for these cu_seqlens and seqused_k (kept plans too: they may have been written without torch's "
              "notice, by dist.broadcast, recv, .data, NumPy or DLPack; give each batch a tensor of its own)"};
    case Fault::kPlanOfOtherHeads:
      return {"plan", "one made for these totals, these heads, this head_dim and this window"};
    case Fault::kVisibleEndBeforeOwn:
      return {"visible_end", "at least one more than the position of its query"};
    case Fault::kVisibleEndPastKeys:
      return {"visible_end", "at most the document's keys"};
    case Fault::kVisibleEndOrder:
      return {"visible_end", "never to decrease inside a document"};
    case Fault::kPlanOfOtherVisibleEnd:
      return {"plan", "one made for this visible_end (kept plans too: give each batch a tensor of its own)"};
    case Fault::kKeysPastPages:
      return {"seqused_k", "0 up to the keys that a row of block_table holds"};
    case Fault::kPageOutside:
      return {"block_table", "pages of k in the row of each document, as many as seqused_k has keys for"};
    case Fault::kRowOnPath:
      return {"row_of_key", "rows of k that follow each other in every 128 keys of a path"};
    default:
      return {"argument", "valid values"};
  }
}

}  // namespace

FaultText fault_text(Fault fault) {
  switch (fault) {
    case Fault::kCuSeqlensStart:
      return {"cu_seqlens", "to start at 0"};
    case Fault::kCuSeqlensOrder:
      return {"cu_seqlens", "never to decrease"};
    case Fault::kCuSeqlensTotal:
      return {"cu_seqlens", "to end at most at total"};
    case Fault::kNegativeLength:
      return {"lengths", "no negative length"};
    case Fault::kLengthsOverflow:
      return {"lengths", "a sum that fits int32"};
    case Fault::kPositionOutside:
      return {"position_ids", "every position inside the cos/sin cache"};
    case Fault::kReturningUid:
      return {"uids", "equal uids next to each other"};
    case Fault::kIndexOutside:
      return {"indices", "strictly increasing indices inside the rows"};
    case Fault::kLengthOverCapacity:
      return {"lengths", "every length within the capacity"};
    case Fault::kValuesChanged:
      return {"values",
              "a tensor as it was when its documents were found (it was written without torch's notice, by "
              "dist.broadcast, recv, .data, NumPy or DLPack; give each batch a tensor of its own)"};
    case Fault::kNoDepth:
      return {"position_ids", "each row's distance from its root beside segment_parents (PrefixTree.position_ids)"};
    case Fault::kPathsOfOtherTree:
      return {"parents", "the paths of the tree that cu_seqlens_q are the segments of"};
    case Fault::kEndOfQueries:
      return {"cu_seq_lens_q", "to end at the batch's tokens"};
    case Fault::kEndOfKeys:
      return {"cu_seq_lens_k", "to end at the batch's tokens"};
    case Fault::kPaddingInDocuments:
      return {
          "attention_mask",
          "no padding beside cu_seq_lens_q, which gives every slot to a document, and no numbers of other documents"};
    case Fault::kOtherPositions:
      return {"position_ids", "to restart where cu_seq_lens_q starts a document and only there"};
    case Fault::kKeysOfOtherDocuments:
      return {"cu_seq_lens_k", "the documents of cu_seq_lens_q, whose tokens the keys are"};
    case Fault::kLabelOutside:
      return {"labels", "entries of the vocabulary or ignore_index"};
    case Fault::kTargetOverBound:
      return {"max_targets",
              "at least as many as there are slots with a target (num_targets of a PackedMetadata and "
              "of a collator's batch counts those of its own labels)"};
    case Fault::kTemperatureOutside:
      return {"temperature", "numbers above 0 (the index counts rows with a target where others are left out)"};
    case Fault::kAllowedOutside:
      return {"allowed_ids", "entries of the vocabulary"};
    case Fault::kAllowedOffsets:
      return {"allowed_offsets", "to start at 0, never to decrease and to end at the size of allowed_ids"};
    case Fault::kLabelNotAllowed:
      return {"allowed_ids", "each label among the ids that it was drawn from"};
    default:
      return attention_fault_text(fault);
  }
}

#ifdef PACKING_OPS_WITH_CUDA

namespace {

void raise_pending_fault(const FaultFlag& flag) {
  const unsigned long long word = *flag.word;
  if (word == 0) return;
  *flag.word = 0;
  const FaultText text = fault_text(static_cast<Fault>(word >> 56));
  fail(text.argument, ": expected ", text.wanted, ", got a wrong value at index ", word & 0xffffffffffffffULL,
       " (seen on the GPU in an earlier call; PACKING_OPS_CHECK=1 raises in the call itself)");
}

bool check_each_call() {
  const char* value = std::getenv("PACKING_OPS_CHECK");
  return value && std::strcmp(value, "0") != 0 && *value;
}

}  // namespace

CudaScope::CudaScope(const Tensor& anchor)
    : guard_(anchor.get_device_index()), launch_{current_cuda_stream(anchor.get_device_index()), device_fault_flag()} {
  raise_pending_fault(launch_.fault);
}

void CudaScope::finish() const {
  if (!check_each_call()) return;
  wait_for_stream(launch_.stream);
  raise_pending_fault(launch_.fault);
}

int64_t wait_for_value(const Tensor& anchor, const int64_t* value) {
  if (!anchor.is_cuda()) return *value;
  return wait_for_value(value, kUnset, current_cuda_stream(anchor.get_device_index()));
}

#else

int64_t wait_for_value(const Tensor&, const int64_t* value) {
  return *value;
}

CudaScope::CudaScope(const Tensor& anchor) : guard_(anchor.get_device_index()) {
  throw std::runtime_error("packing_ops was built without CUDA");
}

void CudaScope::finish() const {}

#endif

int64_t get_num_threads() {
  return torch::stable::get_num_threads();
}

void parallel_for(int64_t begin, int64_t end, int64_t grain_size, void (*call)(const void* f, int64_t, int64_t),
                  const void* f) {
  torch::stable::parallel_for(begin, end, grain_size, [=](int64_t from, int64_t to) { call(f, from, to); });
}

}  // namespace packing_ops
