// What only the GPU can see (values of cu_seqlens, positions, uids) is reported without a synchronisation: a kernel
// stores one 64-bit word in host memory that the GPU can write, and the next call raises it.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace packing_ops {

enum class Fault : uint8_t {
  kNone,
  kCuSeqlensStart,         // cu_seqlens[0] != 0
  kCuSeqlensOrder,         // cu_seqlens[index] < cu_seqlens[index - 1]
  kCuSeqlensTotal,         // cu_seqlens[index] > total
  kNegativeLength,         // lengths[index] < 0
  kLengthsOverflow,        // the sum of lengths does not fit int32
  kPositionOutside,        // position_ids[index] outside the cos/sin cache
  kReturningUid,           // uids[index] was seen before, with other uids between
  kIndexOutside,           // indices[index] outside the rows
  kLengthOverCapacity,     // lengths[index] is over the capacity
  kPlanOfOtherDocuments,   // the plan was made for another cu_seqlens[index]
  kPlanOfOtherHeads,       // the plan was made for other totals, heads, head_dim or window
  kValuesChanged,          // values[index] is not what it was
  kNoDepth,                // position_ids[index] is not the distance from its root in a prefix tree
  kPathsOfOtherTree,       // the paths were found for other segments than cu_seqlens_q[index]
  kEndOfQueries,           // cu_seq_lens_q[-1] is not the batch's size
  kEndOfKeys,              // cu_seq_lens_k[-1] is not the batch's size
  kPaddingInDocuments,     // attention_mask[index] is 0 with cu_seq_lens_q
  kOtherPositions,         // position_ids[index] restarts in a document of cu_seq_lens_q, or goes on at its start
  kKeysOfOtherDocuments,   // cu_seq_lens_k[index] differs from cu_seq_lens_q
  kLabelOutside,           // labels[index] is neither in the vocabulary nor ignore_index
  kVisibleEndBeforeOwn,    // visible_end[index] is not beyond its query's position
  kVisibleEndPastKeys,     // visible_end[index] is past the document's keys
  kVisibleEndOrder,        // visible_end[index] < visible_end[index - 1] in a document
  kPlanOfOtherVisibleEnd,  // the plan was made for another visible_end[index]
  kKeysPastPages,          // seqused_k[index] is not between 0 and what the document's pages hold
  kPageOutside,            // block_table[index] has a page that there is not
  kRowOnPath,              // row_of_key[index] is no row of k, or does not follow the one before
  kTargetOverBound,        // targets[index] is one more than max_targets
  kTemperatureOutside,     // the temperature of targets[index] is not above 0
  kAllowedOutside,         // allowed_ids[index] is not in the vocabulary
  kAllowedOffsets,         // allowed_offsets[index] is not where a set may begin or end
  kLabelNotAllowed         // labels[index] is not among the ids allowed for it
};

// One word: fault in the top byte, index below it. A single store, so a reader never sees half of it.
struct FaultFlag {
  volatile unsigned long long* word = nullptr;

  PACKING_OPS_HOST_DEVICE void raise(Fault fault, int64_t index) const {
    *word =
        (static_cast<unsigned long long>(fault) << 56) | (static_cast<unsigned long long>(index) & 0xffffffffffffffULL);
  }
};

// "argument: expected wanted", of an error of values (host/launch.cpp).
struct FaultText {
  const char* argument;
  const char* wanted;
};
FaultText fault_text(Fault fault);

// One flag for the process, in pinned host memory that every GPU can write.
FaultFlag device_fault_flag();

// Not for one that is being captured: a wait would end the capture, and no kernel of it runs.
void wait_for_stream(void* stream);

// Until a kernel of the stream has changed a value in pinned memory from `unset`: sooner than the end of the stream.
int64_t wait_for_value(const volatile int64_t* value, int64_t unset, void* stream);

}  // namespace packing_ops
