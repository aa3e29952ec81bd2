// Packing: check -> plan the bins -> allocate -> write them.
#include "ops/packing/packing_bind.h"

#include <cmath>
#include <limits>
#include <string>
#include <tuple>

#include "host/launch.h"
#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/packing/packing_plan.h"

namespace packing_ops {

namespace {

template <class Value>
struct Choice {
  const char* name;
  Value value;
};

template <class Value, size_t kCount>
Value choose(const char* argument, const std::string& name, const Choice<Value> (&choices)[kCount]) {
  std::string wanted;
  for (size_t i = 0; i < kCount; ++i) {
    if (name == choices[i].name) return choices[i].value;
    wanted += (i == 0 ? "'" : (i + 1 == kCount ? " or '" : ", '")) + std::string(choices[i].name) + "'";
  }
  const bool hyphens = name.find('-') != std::string::npos;
  fail(argument, ": expected ", wanted, ", got '", name, "'", hyphens ? " (names have underscores)" : "");
}

constexpr Choice<PackStrategy> kStrategies[] = {{"ffd", PackStrategy::kFirstFitDecreasing},
                                                {"bfd", PackStrategy::kBestFitDecreasing},
                                                {"next_fit", PackStrategy::kNextFit},
                                                {"first_fit", PackStrategy::kFirstFit},
                                                {"balanced", PackStrategy::kBalanced}};
constexpr Choice<Overlong> kOverlong[] = {{"error", Overlong::kError},
                                          {"own", Overlong::kOwn},
                                          {"split", Overlong::kSplit},
                                          {"truncate", Overlong::kTruncate},
                                          {"drop", Overlong::kDrop}};
constexpr Choice<bool> kHigherIndexFirst[] = {{"first", false}, {"last", true}};

int64_t at_least_one(const char* argument, int64_t value) {
  check(value >= 1, argument, ": expected at least 1, got ", value);
  return value;
}

constexpr int64_t kMostSides = 8;  // more are a row of lengths, [1, num_sequences], that was not meant

// What is one number for a sequence has no meaning for several: which bin is the fullest, where to cut.
void check_sides(const PackParams& p, const std::string& strategy, const std::string& overlong) {
  if (p.sides == 1) return;
  const bool fits = p.strategy == PackStrategy::kFirstFitDecreasing || p.strategy == PackStrategy::kNextFit ||
                    p.strategy == PackStrategy::kFirstFit;
  check(fits, "strategy: expected 'ffd', 'next_fit' or 'first_fit' for lengths [num_sequences, ", p.sides, "], got '",
        strategy, "'");
  const bool cuts = p.overlong == Overlong::kSplit || p.overlong == Overlong::kTruncate;
  check(!cuts, "overlong: expected 'error', 'own' or 'drop' for lengths [num_sequences, ", p.sides, "], got '",
        overlong, "'");
}

}  // namespace

// (bin_offsets, item_indices, starts, piece_lengths, overlong_items, counts)
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> pack_sequences(
    const Tensor& lengths, int64_t capacity, std::string strategy, int64_t alignment,
    std::optional<int64_t> max_sequences_per_bin, int64_t min_bins, int64_t bins_multiple_of, std::string overlong,
    bool balance, double token_cost, double square_cost, std::string ties, std::optional<int64_t> seed) {
  check_dtype(lengths, "lengths", {DType::kInt32, DType::kInt64});
  check(lengths.dim() == 1 || (lengths.dim() == 2 && lengths.size(1) > 0 && lengths.size(1) <= kMostSides),
        "lengths: expected [num_sequences] or [num_sequences, 1 to ", kMostSides, " sides], got ", describe(lengths));
  const Tensor values = dense(on_host(lengths));
  PackPlan plan;
  PackParams p;
  p.lengths = index_view(values);
  p.sides = lengths.dim() == 2 ? lengths.size(1) : 1;
  p.num_sequences = lengths.size(0);
  p.capacity = at_least_one("capacity", capacity);
  p.alignment = at_least_one("alignment", alignment);
  p.max_sequences_per_bin =
      at_least_one("max_sequences_per_bin", max_sequences_per_bin.value_or(std::numeric_limits<int32_t>::max()));
  p.min_bins = at_least_one("min_bins", min_bins);
  p.bins_multiple_of = at_least_one("bins_multiple_of", bins_multiple_of);
  p.strategy = choose("strategy", strategy, kStrategies);
  p.overlong = choose("overlong", overlong, kOverlong);
  p.higher_index_first = choose("ties", ties, kHigherIndexFirst);
  p.shuffle = seed.has_value();
  p.seed = static_cast<uint64_t>(seed.value_or(0));
  p.balance = balance;
  check_sides(p, strategy, overlong);
  for (const double cost : {token_cost, square_cost}) {
    check(cost >= 0 && std::isfinite(cost), "balance: expected finite costs of at least 0, got ", cost);
  }
  p.cost = {token_cost, square_cost};
  p.plan = &plan;
  launch_plan_bins_cpu(p);

  Tensor bin_offsets = empty({plan.counts.bins + 1}, DType::kInt64, values);
  Tensor item_indices = empty({plan.counts.pieces}, DType::kInt64, values);
  Tensor starts = empty({plan.counts.pieces}, DType::kInt64, values);
  std::vector<int64_t> of_pieces = sizes_of(lengths);
  of_pieces[0] = plan.counts.pieces;
  Tensor piece_lengths = empty(of_pieces, DType::kInt64, values);
  Tensor overlong_items = empty({plan.counts.overlong}, DType::kInt64, values);
  Tensor counts = empty({4}, DType::kInt64, values);
  p.bin_offsets = outputs(bin_offsets);
  p.item_indices = outputs(item_indices);
  p.starts = outputs(starts);
  p.piece_lengths = outputs(piece_lengths);
  p.overlong_items = outputs(overlong_items);
  p.counts = outputs(counts);
  launch_write_bins_cpu(p);
  return {bin_offsets, item_indices, starts, piece_lengths, overlong_items, counts};
}

// (bin_offsets, item_indices, num_bins), where the lengths are
std::tuple<Tensor, Tensor, Tensor> pack_ffd(const Tensor& lengths, int64_t capacity, int64_t alignment,
                                            bool ties_last) {
  check_dtype(lengths, "lengths", {DType::kInt32, DType::kInt64});
  check_rank(lengths, "lengths", 1);
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  check(capacity <= kMax, "capacity: expected at most ", kMax, ", got ", capacity);
  check(lengths.numel() < kMax, "lengths: expected fewer than ", kMax, " sequences, got ", lengths.numel());
  const Tensor values = dense(lengths);
  Tensor bin_offsets = empty({lengths.numel() + 1}, DType::kInt64, lengths);
  Tensor item_indices = empty({lengths.numel()}, DType::kInt64, lengths);
  Tensor num_bins = empty({1}, DType::kInt64, lengths);
  PackFfdParams p;
  p.lengths = index_view(values);
  p.num_sequences = lengths.numel();
  p.capacity = at_least_one("capacity", capacity);
  p.alignment = at_least_one("alignment", alignment);
  p.ties_last = ties_last;
  p.bin_offsets = outputs(bin_offsets);
  p.item_indices = outputs(item_indices);
  p.num_bins = outputs(num_bins);
  const std::optional<Tensor> memory = cuda_scratch(lengths, PACKING_OPS_CUDA(pack_ffd_scratch_cuda), p.num_sequences);
  p.scratch = data_or_null(memory);
  launch(lengths, p, launch_pack_ffd_cpu, PACKING_OPS_CUDA(launch_pack_ffd_cuda));
  return {bin_offsets, item_indices, num_bins};
}

PACKING_OPS_REGISTER(m) {
  m.impl("pack_sequences", TORCH_BOX(&pack_sequences));
  m.impl("pack_ffd", TORCH_BOX(&pack_ffd));
}

}  // namespace packing_ops
