// Near-equal cost: bins built that way, evened by swaps, and finished bins dealt to ranks that way.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>
#include <set>

#include "core/error.h"
#include "ops/packing/packing_bin_levels.h"
#include "ops/packing/packing_plan.h"

namespace packing_ops {

namespace {

double cost_of(const PackParams& p, int64_t units) {
  return p.cost(static_cast<double>(units) * static_cast<double>(p.alignment));
}

double cost_of_piece(const PackParams& p, const Pieces& pieces, int64_t i) {
  if (p.sides == 1) return cost_of(p, pieces.units[i]);
  double sum = 0.0;
  for (int64_t side = 0; side < p.sides; ++side) sum += cost_of(p, pieces.side_units[i * p.sides + side]);
  return sum;
}

// Costs are compared to one part in kSteps of the costliest bin's cost; level 0 is an empty bin, so that every
// bin gets a piece before one gets a second.
constexpr int64_t kSteps = 65536;

// An upper bound of a bin's cost while the cheapest one is not full: the mean and one piece, added when it was
// cheapest. However large the capacity is, it says no more.
double costliest_bin(const PackParams& p, const Pieces& pieces, const Runs& sorted, int64_t bins) {
  double total = 0.0;
  double costliest = 0.0;
  for (const Run& run : sorted.runs) {
    if (run.units > pieces.capacity) {
      bins -= run.pieces.size();
      continue;
    }
    const double cost = cost_of(p, run.units);
    costliest = std::max(costliest, cost);
    for (int64_t i = run.pieces.begin; i < run.pieces.end; ++i) total += cost;
  }
  return std::min(cost_of(p, pieces.capacity), total / static_cast<double>(std::max<int64_t>(bins, 1)) + costliest);
}

struct OpenBin {
  double cost = 0.0;
  int64_t free_capacity = 0;
};

// Longest piece first, each to the cheapest bin that it fits (of equal ones the one that reached that cost last),
// starting with `bins` empty bins; a new one opens only if no bin fits.
void fit_cheapest(const PackParams& p, const Pieces& pieces, const Runs& sorted, int64_t bins, Assignment& out) {
  const double max_cost = costliest_bin(p, pieces, sorted, bins);
  const auto level_of = [&](double cost) {
    return 1 + (cost < max_cost ? static_cast<int64_t>(cost / max_cost * kSteps) : max_cost > 0 ? kSteps : 0);
  };
  out.sizes.clear();
  std::vector<OpenBin> state;
  BinStacks open(kSteps + 2);
  // Bins that the present length does not fit, most free capacity on top: they return when lengths fit again.
  std::priority_queue<std::pair<int64_t, int32_t>> waiting;
  const auto open_bins = [&](int64_t until) {
    const int64_t first = static_cast<int64_t>(out.sizes.size());
    out.sizes.resize(until, 0);
    state.resize(until, {0.0, pieces.capacity});
    for (int64_t bin = until - 1; bin >= first; --bin) open.put({0, static_cast<int32_t>(bin)});
  };
  for (const Run& run : sorted.runs) {
    int64_t position = run.pieces.begin;
    for (; run.units > pieces.capacity && position < run.pieces.end; ++position) {
      out.bin_of[position] = out.open();
      out.sizes.back() = 1;
      state.push_back({});
    }
    if (position == run.pieces.end) continue;
    if (static_cast<int64_t>(out.sizes.size()) < bins) open_bins(bins);
    for (; !waiting.empty() && waiting.top().first >= run.units; waiting.pop()) {
      const int32_t bin = waiting.top().second;
      open.put({level_of(state[bin].cost), bin});
    }
    const double cost = cost_of(p, run.units);
    while (position < run.pieces.end) {
      const int32_t bin = open.take_lowest().bin;
      if (bin < 0) {
        open_bins(static_cast<int64_t>(out.sizes.size()) + 1);
        continue;
      }
      OpenBin& chosen = state[bin];
      if (chosen.free_capacity < run.units) {
        waiting.emplace(chosen.free_capacity, bin);
        continue;
      }
      out.bin_of[position++] = bin;
      chosen.free_capacity -= run.units;
      chosen.cost += cost;
      ++out.sizes[bin];
      if (!out.full(bin)) open.put({level_of(chosen.cost), bin});
    }
  }
}

// Swaps would cost more than the fit itself from there on, and single pieces matter little.
constexpr int64_t kMaxSwapped = 65536;

// Swaps between rows: the costliest row and a cheap one trade the two pieces that bring both closest to their mean. The
// cheap row must have room. The sum of squares falls with every swap.
class BinSwaps {
 public:
  BinSwaps(const PackParams& p, PackPlan& plan) : p_(p), plan_(plan) {
    for (const Interval<int64_t>& row : plan.bins) {
      costs_.push_back(0.0);
      free_capacity_.push_back(plan.pieces.capacity);
      for (int64_t k = row.begin; k < row.end; ++k) {
        costs_.back() += cost_of(p, units_at(k));
        free_capacity_.back() -= units_at(k);
      }
    }
  }

  void run() {
    while (pass() && work_ < kMaxWork) continue;
  }

 private:
  // Pieces looked at, about 2 ms: what is left then is far below one piece per row.
  static constexpr int64_t kMaxWork = 1 << 18;
  static constexpr int64_t kPerSearch = 16;  // and what keeping the rows in order costs
  static constexpr int kPartners = 16;

  struct Swap {
    double gain;   // cost that moves; 0: no swap helps
    int64_t from;  // in `placed`, of the costly row
    int64_t to;    // of the cheap row
  };

  // From the costliest row down, each until no swap helps it; true where one did.
  bool pass() {
    std::set<std::pair<double, int32_t>> by_cost;
    for (size_t row = 0; row < costs_.size(); ++row) {
      // A piece over the capacity keeps its row for itself.
      if (free_capacity_[row] >= 0) by_cost.insert({costs_[row], static_cast<int32_t>(row)});
    }
    bool swapped = false;
    while (by_cost.size() > 1 && work_ < kMaxWork) {
      const int32_t costly = by_cost.rbegin()->second;
      by_cost.erase(std::prev(by_cost.end()));
      auto cheap = by_cost.begin();
      for (int tries = 0; tries < kPartners && cheap != by_cost.end(); ++tries, ++cheap) {
        const int32_t partner = cheap->second;
        const Swap swap = best_swap(costly, partner);
        if (swap.gain == 0.0) continue;
        by_cost.erase(cheap);
        apply(swap, costly, partner);
        by_cost.insert({costs_[costly], costly});
        by_cost.insert({costs_[partner], partner});
        swapped = true;
        break;
      }
    }
    return swapped;
  }

  int64_t units_at(int64_t k) const { return plan_.pieces.units[plan_.placed[k]]; }

  // Rows hold longer pieces first, so that for a shorter piece of the costly row the best partner is no earlier.
  Swap best_swap(int32_t costly, int32_t cheap) {
    const Interval<int64_t>& from = plan_.bins[costly];
    const Interval<int64_t>& to = plan_.bins[cheap];
    const double gap = costs_[costly] - costs_[cheap];
    const double half = gap / 2;
    work_ += kPerSearch + from.size() + to.size();
    Swap best{0.0, from.begin, to.begin};
    double distance = half;
    int64_t j = to.begin;
    for (int64_t i = from.begin; i < from.end; ++i) {
      const double cost = cost_of(p_, units_at(i));
      const auto consider = [&](int64_t k) {
        const double gain = cost - cost_of(p_, units_at(k));
        if (units_at(i) - units_at(k) > free_capacity_[cheap] || std::abs(gain - half) >= distance) return;
        distance = std::abs(gain - half);
        best = {gain, i, k};
      };
      while (j < to.end && cost - cost_of(p_, units_at(j)) < half && units_at(i) - units_at(j) <= free_capacity_[cheap])
        ++j;
      if (j > to.begin) consider(j - 1);
      if (j < to.end) consider(j);
    }
    // Of pieces as long as each other the first.
    while (best.to > to.begin && units_at(best.to - 1) == units_at(best.to)) --best.to;
    return best;
  }

  void apply(const Swap& swap, int32_t costly, int32_t cheap) {
    const int64_t units = units_at(swap.from) - units_at(swap.to);
    std::swap(plan_.placed[swap.from], plan_.placed[swap.to]);
    keep_longest_first(plan_.bins[costly], swap.from);
    keep_longest_first(plan_.bins[cheap], swap.to);
    costs_[costly] -= swap.gain;
    costs_[cheap] += swap.gain;
    free_capacity_[costly] += units;
    free_capacity_[cheap] -= units;
  }

  // Sorts the piece at `k`, new in its bin, behind those of its length.
  void keep_longest_first(const Interval<int64_t>& row, int64_t k) {
    for (; k + 1 < row.end && units_at(k + 1) >= units_at(k); ++k) std::swap(plan_.placed[k], plan_.placed[k + 1]);
    for (; k > row.begin && units_at(k - 1) < units_at(k); --k) std::swap(plan_.placed[k], plan_.placed[k - 1]);
  }

  const PackParams& p_;
  PackPlan& plan_;
  std::vector<double> costs_;
  std::vector<int64_t> free_capacity_;
  int64_t work_ = 0;
};

}  // namespace

void check_costs(const PackParams& p, const Pieces& pieces) {
  double sum = 0.0;
  for (int64_t i = 0; i < pieces.count; ++i) sum += cost_of_piece(p, pieces, i);
  check(std::isfinite(sum),
        "balance: expected costs a * L + b * L**2 that fit a double in sum, got more with a=", p.cost.tokens,
        ", b=", p.cost.squares, " for ", pieces.count, " sequences of at most ", pieces.longest * p.alignment,
        " tokens");
}

void even_bins(const PackParams& p, PackPlan& plan) {
  if (plan.pieces.count <= kMaxSwapped) BinSwaps(p, plan).run();
}

// With too few bins the last pieces open new ones, which stay emptier than the rest: then again with more.
void fit_balanced(const PackParams& p, const Pieces& pieces, const Runs& sorted, int64_t lower_bound, Assignment& out) {
  constexpr int kAttempts = 3;
  if (pieces.count == 0) return;
  int64_t bins = lower_bound;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    bins = bins_wanted(p, bins, pieces.count);
    fit_cheapest(p, pieces, sorted, bins, out);
    const int64_t used = static_cast<int64_t>(out.sizes.size());
    if (used <= bins) return;
    bins = used;
  }
}

// Costliest first, `bins_multiple_of` rows at a time, one to each rank, the costliest row to the rank with the least
// so far: rows rank, rank + ranks, rank + 2 * ranks, ... then cost about the same on every rank, the difference never
// over that between the costliest and the cheapest row.
void deal_bins(const PackParams& p, PackPlan& plan) {
  const int64_t count = static_cast<int64_t>(plan.bins.size());
  const int64_t ranks = p.bins_multiple_of;
  std::vector<double> costs(count, 0.0);
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t k = plan.bins[r].begin; k < plan.bins[r].end; ++k) {
      costs[r] += cost_of_piece(p, plan.pieces, plan.placed[k]);
    }
  }
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return costs[a] > costs[b]; });

  std::vector<double> totals(std::min(ranks, count), 0.0);
  std::vector<int64_t> by_total(totals.size());
  std::vector<Interval<int64_t>> dealt(count);
  for (int64_t first = 0; first < count; first += ranks) {
    std::iota(by_total.begin(), by_total.end(), 0);
    std::stable_sort(by_total.begin(), by_total.end(), [&](int64_t a, int64_t b) { return totals[a] < totals[b]; });
    for (int64_t i = 0; i < ranks; ++i) {
      dealt[first + by_total[i]] = plan.bins[order[first + i]];
      totals[by_total[i]] += costs[order[first + i]];
    }
  }
  plan.bins = std::move(dealt);
}

}  // namespace packing_ops
