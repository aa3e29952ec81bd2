// Boundaries: conversions between the ways to say where documents start, and label work at those places.
#pragma once

#include <cstdint>

#include "core/documents.h"
#include "core/fault.h"
#include "core/launch.h"
#include "core/view.h"

namespace packing_ops {

struct CuSeqlensFromLengthsParams {
  IndexView lengths;  // [num_documents]
  int64_t num_documents = 0;
  int32_t* cu_seqlens = nullptr;  // [num_documents + 1]
};

// position_ids and seq_idx: what each slot of the packed row is.
struct SlotParams {
  Documents documents;
  int64_t* position_ids = nullptr;  // [total]
  int32_t* seq_idx = nullptr;       // [total]
};

// Runs of a sequence: documents of position_ids (a run ends where the position does not grow), prompts of uids (a run
// ends where the uid changes).
struct RunsParams {
  IndexView values;  // [size]
  int64_t size = 0;
  int32_t* cu_seqlens = nullptr;  // documents: [size + 1], entries after the last document repeat size
  int64_t* ends = nullptr;        // prompts: [size], exclusive ends, entries after the last prompt repeat size
  int64_t* count = nullptr;       // [1]
  void* scratch = nullptr;        // CUDA only
  int64_t scratch_bytes = 0;
};

struct LabelsParams {
  Documents documents;
  IndexView labels;      // [total]
  MutableIndexView out;  // [total], may be labels
  int64_t ignore_index = -100;
  int64_t* count = nullptr;  // [1], count_target_tokens
};

struct SegmentSumParams {
  Documents documents;
  DType dtype = DType::kFloat32;
  int64_t features = 1;          // numbers of a slot, each summed separately
  const void* values = nullptr;  // [total, features]
  const void* mask = nullptr;    // [total] bool, or null
  void* sums = nullptr;          // [num_documents, features], float64 for float64 values, else float32
  const void* grad = nullptr;    // [num_documents, features], like sums
  void* grad_values = nullptr;   // [total, features], like values
  bool average = false;
};

// Generalized advantage estimation, backwards over the unmasked slots of each document, from next = bootstrap:
//   returns[t] = rewards[t] + gamma * next, advantages[t] = returns[t] - values[t],
//   next = lam * returns[t] + (1 - lam) * values[t].
// This equals advantages[t] = delta[t] + gamma * lam * advantages[t + 1] with
// delta[t] = rewards[t] + gamma * values[t + 1] - values[t], but has one number of state instead of two.
struct GaeParams {
  Documents documents;
  DType dtype = DType::kFloat32;
  double gamma = 1;
  double lam = 1;
  const void* rewards = nullptr;    // [total]
  const void* values = nullptr;     // [total]
  const void* mask = nullptr;       // [total] bool, or null
  const void* bootstrap = nullptr;  // [num_documents], dtype of advantages; or null: 0
  void* advantages = nullptr;       // [total], float64 for float64 values, else float32
  void* returns = nullptr;          // [total], likewise
};

struct BlockCausalMaskParams {
  Documents documents;
  DType dtype = DType::kBool;
  void* mask = nullptr;  // [total, total], true or 0 where visible, false or -inf elsewhere
  int64_t window = 0;    // visible keys including self; 0 = all
};

// What cu_seqlens of a batch [batch, seqlen], its padding mask and its position_ids must agree in.
struct CheckDocumentsParams {
  IndexView cu_seqlens_q;           // [num_documents + 1], over the batch's rows one after the other
  IndexView cu_seqlens_k;           // [num_documents + 1]
  bool same = false;                // cu_seqlens_k is cu_seqlens_q
  const bool* mask = nullptr;       // [batch, seqlen], false is padding; or null
  const void* positions = nullptr;  // position_ids' data, or null
  IndexView position_ids;           // [batch or 1, seqlen]
  int64_t num_positions = 0;
  int64_t num_documents = 0;
  int64_t batch = 0;
  int64_t seqlen = 0;

  PACKING_OPS_HOST_DEVICE int64_t total() const { return batch * seqlen; }
  PACKING_OPS_HOST_DEVICE int64_t position(int64_t t) const {
    return position_ids[num_positions == total() ? t : t % seqlen];
  }
  // The last i with cu_seqlens_q[i] <= t.
  PACKING_OPS_HOST_DEVICE int64_t document_of(int64_t t) const {
    int64_t low = 0;
    int64_t high = num_documents + 1;
    while (high - low > 1) {
      const int64_t mid = (low + high) / 2;
      (cu_seqlens_q[mid] <= t ? low : high) = mid;
    }
    return low;
  }
  // Whether positions restart behind slot t, in one document: they fall, and grow again. 0 and 1 also fill a row, left
  // and right. The second one may be in the next document, whose boundary is then one slot late.
  PACKING_OPS_HOST_DEVICE bool restarts_in_document(int64_t t) const {
    const int64_t next = position(t + 1);
    if (next >= position(t) || position(t + 2) != next + 1 || document_of(t) != document_of(t + 1)) return false;
    if ((t + 2) % seqlen == 0 && document_of(t + 1) != document_of(t + 2)) return false;
    const bool has_grown = t > 0 && position(t - 1) == 0 && document_of(t - 1) == document_of(t);
    return position(t) > 1 || (position(t) == 1 && has_grown);
  }
  // Whether document i, which starts within a row, goes on with the positions in front of it. Next to padding it may.
  PACKING_OPS_HOST_DEVICE bool goes_on(int64_t i) const {
    const int64_t first = cu_seqlens_q[i];
    const int64_t end = cu_seqlens_q[i + 1];
    if (first <= 0 || first >= end || end > total() || first % seqlen == 0) return false;
    if (position(first) != position(first - 1) + 1) return false;
    return !is_padding(cu_seqlens_q[document_of(first - 1)], first) && !is_padding(first, end);
  }
  // A document of only ones at an end of a row.
  PACKING_OPS_HOST_DEVICE bool is_padding(int64_t first, int64_t end) const {
    if (first < 0 || first >= end || (first % seqlen != 0 && end % seqlen != 0)) return false;
    return position(first) == 1 && position(end - 1) == 1 && (end - first < 3 || position(first + 1) == 1);
  }
};

// Whether memory still holds what it held.
struct CheckUnchangedParams {
  const void* values = nullptr;
  const void* expected = nullptr;
  int64_t bytes = 0;
  int64_t element_size = 1;
  Fault fault = Fault::kValuesChanged;
};

void launch_check_documents_cpu(const CheckDocumentsParams& p);
void launch_check_unchanged_cpu(const CheckUnchangedParams& p);
void launch_cu_seqlens_from_lengths_cpu(const CuSeqlensFromLengthsParams& p);
void launch_position_ids_cpu(const SlotParams& p);
void launch_seq_idx_cpu(const SlotParams& p);
void launch_cu_seqlens_from_position_ids_cpu(const RunsParams& p);
void launch_prompt_end_indices_cpu(const RunsParams& p);
void launch_mask_boundary_labels_cpu(const LabelsParams& p);
void launch_mask_boundary_labels_shifted_cpu(const LabelsParams& p);
void launch_shift_labels_cpu(const LabelsParams& p);
void launch_count_target_tokens_cpu(const LabelsParams& p);
void launch_segment_sum_cpu(const SegmentSumParams& p);
void launch_segment_sum_backward_cpu(const SegmentSumParams& p);
void launch_gae_cpu(const GaeParams& p);
void launch_block_causal_mask_cpu(const BlockCausalMaskParams& p);

void launch_check_documents_cuda(const CheckDocumentsParams& p, const CudaLaunch& launch);
void launch_check_unchanged_cuda(const CheckUnchangedParams& p, const CudaLaunch& launch);
// Bytes of RunsParams::scratch.
int64_t runs_scratch_cuda(int64_t size);
void launch_cu_seqlens_from_lengths_cuda(const CuSeqlensFromLengthsParams& p, const CudaLaunch& launch);
void launch_position_ids_cuda(const SlotParams& p, const CudaLaunch& launch);
void launch_seq_idx_cuda(const SlotParams& p, const CudaLaunch& launch);
void launch_cu_seqlens_from_position_ids_cuda(const RunsParams& p, const CudaLaunch& launch);
void launch_prompt_end_indices_cuda(const RunsParams& p, const CudaLaunch& launch);
void launch_mask_boundary_labels_cuda(const LabelsParams& p, const CudaLaunch& launch);
void launch_mask_boundary_labels_shifted_cuda(const LabelsParams& p, const CudaLaunch& launch);
void launch_shift_labels_cuda(const LabelsParams& p, const CudaLaunch& launch);
void launch_count_target_tokens_cuda(const LabelsParams& p, const CudaLaunch& launch);
void launch_segment_sum_cuda(const SegmentSumParams& p, const CudaLaunch& launch);
void launch_segment_sum_backward_cuda(const SegmentSumParams& p, const CudaLaunch& launch);
void launch_gae_cuda(const GaeParams& p, const CudaLaunch& launch);
void launch_block_causal_mask_cuda(const BlockCausalMaskParams& p, const CudaLaunch& launch);

}  // namespace packing_ops
