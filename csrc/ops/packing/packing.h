// Packing: which sequences share a row, and which tokens sequences share. Two steps, because only the first one knows
// how large the results are: plan, then write into outputs of the right size.
#pragma once

#include <cstdint>

#include "core/launch.h"
#include "core/view.h"

namespace packing_ops {

enum class PackStrategy : uint8_t { kFirstFitDecreasing, kBestFitDecreasing, kNextFit, kFirstFit, kBalanced };

// What happens to a sequence whose aligned length is over the capacity.
enum class Overlong : uint8_t { kError, kOwn, kSplit, kTruncate, kDrop };

// What computing a sequence of `length` tokens costs: tokens * length + squares * length^2.
struct PackCost {
  double tokens = 1.0;
  double squares = 0.0;

  PACKING_OPS_HOST_DEVICE double operator()(double length) const { return (tokens + squares * length) * length; }
};

struct PackCounts {
  int64_t bins = 0;
  int64_t pieces = 0;       // sequences in bins; a split one counts once per piece
  int64_t overlong = 0;     // sequences that were over the capacity
  int64_t tokens = 0;       // tokens in bins
  int64_t lost_tokens = 0;  // tokens of dropped sequences and of truncated ends
  int64_t own_slots = 0;    // aligned tokens of the bins that hold one overlong sequence
  int64_t lower_bound = 0;  // no packing of these pieces has fewer bins
};

struct PackPlan;

struct PackParams {
  IndexView lengths;  // [num_sequences, sides]
  int64_t num_sequences = 0;
  int64_t sides = 1;  // budgets of `capacity` that a bin has, and that each sequence takes a length of
  int64_t capacity = 1;
  int64_t alignment = 1;
  int64_t max_sequences_per_bin = 1;
  int64_t min_bins = 1;
  int64_t bins_multiple_of = 1;
  PackStrategy strategy = PackStrategy::kFirstFitDecreasing;
  Overlong overlong = Overlong::kError;
  bool higher_index_first = false;  // among equal lengths
  bool shuffle = false;
  uint64_t seed = 0;
  bool balance = false;  // order bins so that ranks get near-equal cost
  PackCost cost;
  PackPlan* plan = nullptr;  // what the first step decides and the second writes

  int64_t* bin_offsets = nullptr;     // [bins + 1]
  int64_t* item_indices = nullptr;    // [pieces], the sequence that each piece belongs to
  int64_t* starts = nullptr;          // [pieces], first token of the piece in its sequence
  int64_t* piece_lengths = nullptr;   // [pieces, sides], tokens of the piece, without alignment
  int64_t* overlong_items = nullptr;  // [overlong], ascending
  int64_t* counts = nullptr;          // [4]: tokens, lost_tokens, own_slots, lower_bound
};

// First-fit decreasing with outputs of fixed size, for lengths that stay on the GPU.
struct PackFfdParams {
  IndexView lengths;  // [num_sequences]
  int64_t num_sequences = 0;
  int64_t capacity = 1;
  int64_t alignment = 1;
  bool ties_last = false;
  int64_t* bin_offsets = nullptr;   // [num_sequences + 1], entries after the last bin repeat num_sequences
  int64_t* item_indices = nullptr;  // [num_sequences]
  int64_t* num_bins = nullptr;      // [1]
  void* scratch = nullptr;          // CUDA only
};

struct PrefixTreePlan;

// Samples that share a prefix, as a tree of segments that holds the prefix once.
struct PrefixTreeParams {
  IndexView tokens;                     // [total]
  const int32_t* cu_seqlens = nullptr;  // [num_samples + 1], from 0 to total
  IndexView groups;                     // [num_samples]; without data all samples are compared
  int64_t num_samples = 0;
  int64_t capacity = 1;    // rows of a bin, at least the longest sample
  int64_t min_shared = 1;  // no fork is before this depth
  PrefixTreePlan* plan = nullptr;

  int64_t* rows = nullptr;          // [num_rows], the token that each row holds
  int32_t* segments = nullptr;      // [num_segments + 1], cumulated lengths
  int32_t* parents = nullptr;       // [num_segments], -1 for a root
  int64_t* position_ids = nullptr;  // [num_rows], depths
  int64_t* row_of_token = nullptr;  // [total]
  int64_t* copies = nullptr;        // [num_rows], samples that each row serves
  int64_t* bin_offsets = nullptr;   // [bins + 1], of segments
  int64_t* sample_bins = nullptr;   // [num_samples]
  int64_t* repeated = nullptr;      // [2]: rows that forks and cuts repeat
};

// plan_bins reads lengths and fills plan; write_bins reads plan and fills the outputs.
void launch_plan_bins_cpu(const PackParams& p);
void launch_write_bins_cpu(const PackParams& p);
void launch_pack_ffd_cpu(const PackFfdParams& p);
void launch_plan_prefix_tree_cpu(const PrefixTreeParams& p);
void launch_write_prefix_tree_cpu(const PrefixTreeParams& p);

int64_t pack_ffd_scratch_cuda(int64_t num_sequences);
void launch_pack_ffd_cuda(const PackFfdParams& p, const CudaLaunch& launch);

}  // namespace packing_ops
