// Near-equal cost: bins built that way, and finished bins dealt to ranks that way.
#include <algorithm>
#include <numeric>
#include <queue>

#include "ops/packing/packing_bin_levels.h"
#include "ops/packing/packing_plan.h"

namespace packing_ops {

namespace {

double cost_of(const PackParams& p, int64_t units) {
  return p.cost(static_cast<double>(units) * static_cast<double>(p.alignment));
}

// Costs are compared to one part in kSteps of the costliest bin that the capacity allows; level 0 is an empty bin, so
// that every bin gets a piece before one gets a second.
constexpr int64_t kSteps = 65536;

struct OpenBin {
  double cost = 0.0;
  int64_t room = 0;
};

// Longest piece first, each to the cheapest bin that it fits (of equal ones the one that came to that cost last),
// starting with `bins` empty bins; a new one opens only where none fits.
void fit_cheapest(const PackParams& p, const Pieces& pieces, const Runs& sorted, int64_t bins, Assignment& out) {
  const double most = cost_of(p, pieces.capacity);
  const double scale = most > 0 ? kSteps / most : 0.0;
  const auto level_of = [&](double cost) { return 1 + static_cast<int64_t>(cost * scale); };
  out.sizes.clear();
  std::vector<OpenBin> state;
  BinStacks open(kSteps + 2);
  // Bins without room for the present length, roomiest on top: they come back when lengths have shrunk to their room.
  std::priority_queue<std::pair<int64_t, int32_t>> waiting;
  const auto open_bins = [&](int64_t until) {
    const int64_t first = static_cast<int64_t>(out.sizes.size());
    out.sizes.resize(until, 0);
    state.resize(until, {0.0, pieces.capacity});
    for (int64_t bin = until - 1; bin >= first; --bin) open.put({0, static_cast<int32_t>(bin)});
  };
  for (const Run& run : sorted.runs) {
    int64_t position = run.begin;
    for (; run.units > pieces.capacity && position < run.end; ++position) {
      out.bin_of[position] = out.open();
      out.sizes.back() = 1;
      state.push_back({});
    }
    if (position == run.end) continue;
    if (static_cast<int64_t>(out.sizes.size()) < bins) open_bins(bins);
    for (; !waiting.empty() && waiting.top().first >= run.units; waiting.pop()) {
      const int32_t bin = waiting.top().second;
      open.put({level_of(state[bin].cost), bin});
    }
    const double cost = cost_of(p, run.units);
    while (position < run.end) {
      const int32_t bin = open.take_lowest().bin;
      if (bin < 0) {
        open_bins(static_cast<int64_t>(out.sizes.size()) + 1);
        continue;
      }
      OpenBin& chosen = state[bin];
      if (chosen.room < run.units) {
        waiting.emplace(chosen.room, bin);
        continue;
      }
      out.bin_of[position++] = bin;
      chosen.room -= run.units;
      chosen.cost += cost;
      ++out.sizes[bin];
      if (!out.full(bin)) open.put({level_of(chosen.cost), bin});
    }
  }
}

}  // namespace

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
void deal_rows(const PackParams& p, PackPlan& plan) {
  const int64_t count = static_cast<int64_t>(plan.rows.size());
  const int64_t ranks = p.bins_multiple_of;
  std::vector<double> costs(count, 0.0);
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t k = plan.rows[r].begin; k < plan.rows[r].end; ++k) {
      costs[r] += cost_of(p, plan.pieces.units[plan.placed[k]]);
    }
  }
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return costs[a] > costs[b]; });

  std::vector<double> totals(std::min(ranks, count), 0.0);
  std::vector<int64_t> by_total(totals.size());
  std::vector<Row> dealt(count);
  for (int64_t first = 0; first < count; first += ranks) {
    std::iota(by_total.begin(), by_total.end(), 0);
    std::stable_sort(by_total.begin(), by_total.end(), [&](int64_t a, int64_t b) { return totals[a] < totals[b]; });
    for (int64_t i = 0; i < ranks; ++i) {
      dealt[first + by_total[i]] = plan.rows[order[first + i]];
      totals[by_total[i]] += costs[order[first + i]];
    }
  }
  plan.rows = std::move(dealt);
}

}  // namespace packing_ops
