// The work-list: one block for each list. A warp takes 32 documents at a time.
#include <algorithm>
#include <bit>

#include "core/error.h"
#include "core/launch.cuh"
#include "core/segment.cuh"
#include "ops/attention/cuda/mask.cuh"
#include "ops/attention/cuda/plan.h"

namespace packing_ops::attention {

namespace {

constexpr int kPlanThreads = 1024;
constexpr int kClasses = 192;

// Eight classes to the octave, costly ones first.
__device__ int cost_class(int64_t cost) {
  if (cost < 8) return kClasses - 1 - static_cast<int>(cost < 0 ? 0 : cost);
  const int octave = 63 - __clzll(cost);
  const int rank = 8 * (octave - 2) + static_cast<int>((cost >> (octave - 3)) & 7);
  return rank < kClasses ? kClasses - 1 - rank : 0;
}

struct TileLister {
  PlanView plan;
  int list;

  __device__ bool is_forward() const { return list <= PlanView::kForwardWhole; }
  __device__ int32_t rows() const {
    return list == PlanView::kForwardShort ? plan.tiles.short_rows : plan.tiles.forward_rows;
  }

  __device__ int32_t tiles(const DocumentView& d) const {
    // Keys that nobody sees are listed too: their gradients are zeros that somebody has to write.
    if (is_forward()) {
      const bool whole = d.keys <= plan.tiles.whole_most && d.tokens <= plan.tiles.whole_most;
      const bool is_short = !whole && d.keys <= plan.tiles.short_most;
      if ((list == PlanView::kForwardWhole) != whole || (list == PlanView::kForwardShort) != is_short) return 0;
      if (whole) return d.tokens > 0;
      return static_cast<int32_t>(ceil_div(static_cast<int64_t>(d.tokens) * plan.tiles.group, rows()));
    }
    const bool small = d.keys <= plan.tiles.small_keys;
    const bool single = !small && d.keys <= plan.tiles.backward_keys;
    if ((list == PlanView::kSmall) != small || (list == PlanView::kSingle) != single) return 0;
    return static_cast<int32_t>(ceil_div(d.keys, plan.tiles.backward_keys));
  }

  // One cost for all tiles of a document where those at work at one time are to read the same rows: the backward's and
  // those of short documents.
  __device__ int64_t cost(const DocumentView& d, int32_t tile) const {
    const int64_t group = plan.tiles.group;
    if (list == PlanView::kForwardShort) return ceil_div(d.keys, kShortKeys);
    if (list == PlanView::kForwardWhole) {
      constexpr int64_t kFixed = 8;  // what a block of rows costs beside its keys, in blocks of as many keys
      return ceil_div(d.tokens * group, kWholeRows) * (kFixed + ceil_div(d.keys, kWholeRows));
    }
    if (!is_forward()) {
      const int64_t keys = list == PlanView::kSmall ? plan.tiles.small_keys : plan.tiles.backward_keys;
      const int64_t most = d.window.left < kOpenWindow ? keys + d.window.left : d.tokens;
      return ceil_div((most < d.tokens ? most : d.tokens) * group, plan.tiles.backward_rows);
    }
    const int64_t row = static_cast<int64_t>(tile) * rows();
    const int64_t last = row + rows() - 1;
    const int64_t last_token = last / group < d.tokens ? last / group : d.tokens - 1;
    const Range seen = d.keys_seen(static_cast<int32_t>(row / group), static_cast<int32_t>(last_token));
    const int32_t keys = plan.tiles.forward_keys;
    return ceil_div(seen.end, keys) - seen.first / keys;
  }

  // Documents of several key tiles stay in one piece, as the ring of their partial sums needs it.
  __device__ bool together() const { return list == PlanView::kBackward; }
  __device__ uint32_t sum_tiles(const DocumentView& d) const {
    const Range range = tiles_with_sums(d, plan.tiles.group, plan.tiles.backward_rows, plan.tiles.backward_keys);
    return static_cast<uint32_t>(range.end - range.first);
  }

  // The backward's chain of partial sums goes through a document's key tiles in this order. sums: row tiles of the
  // documents before.
  __device__ PlanEntry entry(int64_t document, const DocumentView& d, int32_t index, uint32_t sums) const {
    const bool ascend = is_forward() || plan.tiles.start_at_last_row(d.tokens);
    const int32_t tile = ascend ? index : tiles(d) - 1 - index;
    PlanEntry entry{static_cast<int32_t>(document),
                    tile,
                    static_cast<int32_t>(d.start_q),
                    d.tokens,
                    static_cast<int32_t>(d.start_k),
                    d.keys,
                    {},
                    {}};
    if (together()) {
      entry.first_sum = sums * static_cast<uint32_t>(plan.num_kv_heads);
    } else {
      const int64_t row = static_cast<int64_t>(tile) * rows();
      entry.first_token = static_cast<int32_t>(row / plan.tiles.group);
      entry.skipped = static_cast<int32_t>(row % plan.tiles.group);
    }
    return entry;
  }
};

// Entries of a class and row tiles of their partial sums, so that one atomic takes both in the same order.
struct Position {
  int32_t entry;
  uint32_t sums;
};
using Counter = unsigned long long;
__device__ Counter counter_of(Position p) {
  return static_cast<Counter>(p.sums) << 32 | static_cast<uint32_t>(p.entry);
}
__device__ Position position_of(Counter c) {
  return {static_cast<int32_t>(c), static_cast<uint32_t>(c >> 32)};
}

// Position of this lane among the `taking` lanes of its class, after one atomic by the first of them.
__device__ int32_t take_position(Counter* counters, int cls, unsigned taking) {
  const unsigned lane = threadIdx.x & 31;
  const unsigned peers = __match_any_sync(taking, cls);
  const int leader = __ffs(static_cast<int>(peers)) - 1;
  int32_t base = 0;
  if (lane == static_cast<unsigned>(leader)) {
    base = atomicAdd(reinterpret_cast<int32_t*>(&counters[cls]), __popc(peers));  // the entries: the low word
  }
  base = __shfl_sync(peers, base, leader);
  return base + __popc(peers & ((1u << lane) - 1));
}

// f(document, its view, tile, position) for every tile; positions come from counters[class]. The tiles of a warp's 32
// documents in one row, a lane each.
template <class F>
__device__ void for_each_tile(const TileLister& lister, const Documents& documents_q, const Documents& documents_k,
                              Counter* counters, F&& f) {
  const int lane = threadIdx.x & 31;
  for (int64_t base = threadIdx.x & ~31; base < documents_q.num_documents; base += blockDim.x) {
    int32_t tiles = 0;
    Position place{};  // of this lane's document, where tiles stay together
    if (base + lane < documents_q.num_documents) {
      const DocumentView d = document_view(documents_q, documents_k, base + lane, lister.plan.window);
      tiles = lister.tiles(d);
      if (lister.together() && tiles > 0) {
        place =
            position_of(atomicAdd(&counters[cost_class(lister.cost(d, 0))], counter_of({tiles, lister.sum_tiles(d)})));
      }
    }
    int32_t end = tiles;  // of this lane's document in the row
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t before = __shfl_up_sync(0xffffffffu, end, step);
      if (lane >= step) end += before;
    }
    const int32_t count = __shfl_sync(0xffffffffu, end, 31);
    for (int32_t at = lane; at - lane < count; at += 32) {
      int owner = 0;  // documents that end at or before `at`
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        if (__shfl_sync(0xffffffffu, end, owner + step - 1) <= at) owner += step;
      }
      const int32_t first = __shfl_sync(0xffffffffu, end - tiles, owner);
      Position position{__shfl_sync(0xffffffffu, place.entry, owner), __shfl_sync(0xffffffffu, place.sums, owner)};
      const bool mine = at < count;
      const unsigned taking = __ballot_sync(0xffffffffu, mine);
      if (mine) {
        const DocumentView d = document_view(documents_q, documents_k, base + owner, lister.plan.window);
        if (lister.together()) {
          position.entry += at - first;
        } else {
          position.entry = take_position(counters, cost_class(lister.cost(d, at - first)), taking);
        }
        f(base + owner, d, at - first, position);
      }
    }
  }
}

__device__ bool wrong_entries(const Documents& documents) {
  bool wrong = false;
  for (int64_t i = threadIdx.x; i <= documents.num_documents; i += blockDim.x) {
    const int32_t value = documents.cu_seqlens[i];
    wrong |= (i == 0 && value != 0) || (i > 0 && value < documents.cu_seqlens[i - 1]) || value > documents.total;
  }
  return wrong;
}

__global__ void __launch_bounds__(kPlanThreads)
    attention_plan_kernel(PlanView plan, Documents documents_q, Documents documents_k, FaultFlag fault) {
  __shared__ Counter counters[kClasses];
  const int list = blockIdx.x;
  const TileLister lister{plan, list};
  // One wrong entry and the whole batch counts as padding: zeros everywhere, no address from a wrong value.
  const bool wrong = __syncthreads_or(wrong_entries(documents_q) || wrong_entries(documents_k));
  if (list == 0) {
    if (threadIdx.x == 0) {
      plan.data[PlanView::kEndQ] = wrong ? 0 : static_cast<int32_t>(documents_q.end());
      plan.data[PlanView::kEndK] = wrong ? 0 : static_cast<int32_t>(documents_k.end());
      plan.data[PlanView::kGeometry] = plan.geometry();
    }
    for (int64_t i = threadIdx.x; i <= plan.num_documents; i += blockDim.x) {
      plan.made_for_q()[i] = documents_q.cu_seqlens[i];
      plan.made_for_k()[i] = documents_k.cu_seqlens[i];
    }
  }
  if (wrong) {
    if (threadIdx.x == 0) plan.data[list] = 0;
    flag_cu_seqlens(documents_q, fault);
    flag_cu_seqlens(documents_k, fault);
    return;
  }
  for (int i = threadIdx.x; i < kClasses; i += blockDim.x) counters[i] = 0;
  __syncthreads();
  for_each_tile(lister, documents_q, documents_k, counters, [](int64_t, const DocumentView&, int32_t, Position) {});
  __syncthreads();
  if (threadIdx.x == 0) {
    Counter sum = 0;
    for (int i = 0; i < kClasses; ++i) {
      const Counter count = counters[i];
      counters[i] = sum;
      sum += count;
    }
    plan.data[list] = position_of(sum).entry;
  }
  __syncthreads();
  PlanEntry* entries = plan.entries[list];
  for_each_tile(lister, documents_q, documents_k, counters,
                [&](int64_t document, const DocumentView& d, int32_t tile, Position position) {
                  entries[position.entry] = lister.entry(document, d, tile, position.sums);
                });
}

// The ring has room for the longest document that there can be, and for enough units of any length that the GPU is not
// kept waiting.
void set_sum_ring(PlanView& plan, int32_t device) {
  const AttentionTiles& tiles = plan.tiles;
  const int64_t key_tiles = plan.total_k / tiles.backward_keys;
  if (key_tiles == 0) return;  // documents of one key tile have no partial sums
  int multiprocessors = 0;
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  const int64_t longest = ceil_div(plan.total_q * tiles.group, tiles.backward_rows);
  const int64_t at_work = 2 * multiprocessors * ceil_div(tiles.backward_keys * tiles.group, tiles.backward_rows);
  const uint64_t least = static_cast<uint64_t>(std::max({longest, at_work, key_tiles + 1}));
  constexpr uint64_t kMost = uint64_t{1} << 31;  // more than any GPU has memory for
  plan.sum_ring = static_cast<uint32_t>(std::min(std::bit_ceil(least), kMost));
  const int64_t all = (longest + std::min(key_tiles, plan.num_documents)) * plan.num_kv_heads;
  plan.sum_tiles = std::min<int64_t>(all, plan.sum_ring);
}

}  // namespace

PlanView plan_view(const AttentionPlanParams& p) {
  for (const Documents* documents : {&p.documents_q, &p.documents_k}) {
    if (documents->total > kMaxTokens) {
      fail(documents == &p.documents_q ? "q" : "k", ": expected at most ", kMaxTokens, " rows on CUDA, got ",
           documents->total);
    }
  }
  const int64_t group = p.num_q_heads / p.num_kv_heads;
  if (group > kMaxGroup) fail("num_heads: expected at most ", kMaxGroup, " to a kv head on CUDA, got ", group);
  PlanView plan;
  plan.data = p.plan;
  plan.total_q = p.documents_q.total;
  plan.total_k = p.documents_k.total;
  plan.num_documents = p.documents_q.num_documents;
  plan.tiles = attention_tiles(group, p.head_dim, p.device);
  const auto side = [](int64_t window) {
    return window < 0 || window > kOpenWindow ? kOpenWindow : static_cast<int32_t>(window);
  };
  plan.window = {side(p.window_left), side(p.window_right)};
  plan.num_kv_heads = static_cast<int32_t>(p.num_kv_heads);
  set_sum_ring(plan, p.device);
  const int64_t most[PlanView::kLists] = {plan.forward_capacity(), plan.forward_short_capacity(),
                                          plan.num_documents,      plan.backward_capacity(),
                                          plan.num_documents,      plan.num_documents};
  const int64_t before = PlanView::kHeaderWords + 2 * (plan.num_documents + 1);
  auto* entries = reinterpret_cast<PlanEntry*>(plan.data) + ceil_div(before, PlanView::kEntryWords);
  for (int list = 0; list < PlanView::kLists; ++list) {
    plan.entries[list] = entries;
    entries += most[list];
  }
  return plan;
}

}  // namespace packing_ops::attention

namespace packing_ops {

void launch_attention_plan_cuda(const AttentionPlanParams& p, const CudaLaunch& launch) {
  using namespace attention;
  attention_plan_kernel<<<PlanView::kLists, kPlanThreads, 0, stream_of(launch)>>>(plan_view(p), p.documents_q,
                                                                                  p.documents_k, launch.fault);
  check_launch("attention_plan_kernel");
}

}  // namespace packing_ops
