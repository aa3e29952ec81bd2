// Builds the plan: one thread block for each kernel's list of tiles, which it sorts by cost (counting sort). A warp
// takes 32 documents at a time.
#include <algorithm>
#include <bit>

#include "core/documents.cuh"
#include "core/error.h"
#include "core/launch.cuh"
#include "ops/attention/cuda/mask.cuh"
#include "ops/attention/cuda/plan.h"

namespace packing_ops::attention {

namespace {

constexpr int kPlanThreads = 1024;
constexpr int kEndThreads = 256;
constexpr int kBuckets = 192;

// The bucket of a cost: eight buckets to each power of two, the costliest first.
__device__ int cost_bucket(int64_t cost) {
  if (cost < 8) return kBuckets - 1 - static_cast<int>(cost < 0 ? 0 : cost);
  const int octave = 63 - __clzll(cost);
  const int rank = 8 * (octave - 2) + static_cast<int>((cost >> (octave - 3)) & 7);
  return rank < kBuckets ? kBuckets - 1 - rank : 0;
}

// Which tiles a document has in one of the plan's lists, what they cost, and their entries.
struct TileLister {
  PlanView plan;
  int list;

  __device__ bool is_forward() const { return list <= PlanView::kForwardResident; }
  __device__ int32_t rows() const {
    return list == PlanView::kForwardResident ? plan.resident_tokens() * plan.tiles.group
           : list == PlanView::kForwardShort  ? plan.tiles.short_rows
                                              : plan.tiles.forward_rows;
  }

  // Forward: the tokens whose rows are in the list, by how far they see. It never decreases in a document.
  __device__ Interval<int32_t> tokens(const DocumentWithEnds& d) const {
    const int32_t resident = d.first_token_beyond(plan.tiles.resident_max_keys);
    if (list == PlanView::kForwardResident) return {0, resident};
    const int32_t beyond_short = d.first_token_beyond(plan.tiles.short_max_keys);
    const int32_t short_end = beyond_short > resident ? beyond_short : resident;
    return list == PlanView::kForwardShort ? Interval<int32_t>{resident, short_end}
                                           : Interval<int32_t>{short_end, d.tokens};
  }
  // Forward: first row of a tile, counted from the document's first.
  __device__ int64_t first_row(const DocumentWithEnds& d, int32_t tile) const {
    return static_cast<int64_t>(tokens(d).begin) * plan.tiles.group + static_cast<int64_t>(tile) * rows();
  }

  __device__ int32_t tiles(const DocumentWithEnds& d) const {
    if (is_forward()) {
      return static_cast<int32_t>(ceil_div(static_cast<int64_t>(tokens(d).size()) * plan.tiles.group, rows()));
    }
    // Keys that no query attends to are listed too: a unit has to write the zeros of their gradients.
    const bool small = d.keys <= plan.tiles.small_keys;
    const bool single = !small && d.keys <= plan.tiles.single_keys;
    if ((list == PlanView::kBackwardSmall) != small || (list == PlanView::kBackwardSingle) != single) return 0;
    return static_cast<int32_t>(ceil_div(d.keys, plan.tiles.backward_keys));
  }

  // Number of steps of a tile, about. In the backward, and for short documents in the forward, all tiles of a document
  // have the same cost: they stay next to each other in the list, run at the same time and read the same rows from L2.
  __device__ int64_t cost(const DocumentWithEnds& d, int32_t tile) const {
    const int64_t group = plan.tiles.group;
    if (!is_forward()) {
      const int64_t keys = list == PlanView::kBackwardSmall ? plan.tiles.small_keys : plan.tiles.backward_keys;
      const int64_t max_tokens = d.window.left < kOpenWindow ? keys + d.window.left : d.tokens;
      return ceil_div((max_tokens < d.tokens ? max_tokens : d.tokens) * group, plan.tiles.backward_rows);
    }
    const int64_t end_row = static_cast<int64_t>(tokens(d).end) * group;
    const int64_t first = first_row(d, tile);
    const int64_t end = first + rows() < end_row ? first + rows() : end_row;
    const Interval<int32_t> visible =
        d.visible_keys(static_cast<int32_t>(first / group), static_cast<int32_t>((end - 1) / group));
    if (list == PlanView::kForwardShort) {
      return ceil_div(d.keys < plan.tiles.short_max_keys ? d.keys : plan.tiles.short_max_keys, kShortKeys);
    }
    if (list == PlanView::kForwardResident) {
      constexpr int64_t kFixed = 8;  // cost of a block of rows before its first key, in blocks of 16 keys
      return ceil_div(end - first, kResidentRowTile) * (kFixed + ceil_div(visible.end, kResidentRowTile));
    }
    return ceil_div(visible.end, plan.tiles.forward_keys) - visible.begin / plan.tiles.forward_keys;
  }

  // Whether all tiles of a document are next to each other in the list. The ring of partial dq needs it; and the
  // forward's units that run at the same time then read the same keys from L2.
  __device__ bool contiguous() const {
    return list == PlanView::kBackward || (list == PlanView::kForward && plan.tiles.forward_by_document);
  }
  __device__ uint32_t partial_dq_tiles(const DocumentWithEnds& d) const {
    return static_cast<uint32_t>(
        row_tiles_with_partial_dq(d, plan.tiles.group, plan.tiles.backward_rows, plan.tiles.backward_keys).size());
  }

  // The index-th tile of a document in the list; partial dq is summed over key tiles in this order.
  // sums: number of row tiles with partial dq in the documents before.
  __device__ PlanEntry entry(int64_t document, const DocumentWithEnds& d, int32_t index, uint32_t sums) const {
    const bool ascend = is_forward() ? !contiguous() : plan.tiles.start_at_last_row(d.keys);
    const int32_t tile = ascend ? index : tiles(d) - 1 - index;
    PlanEntry entry{};
    entry.document = static_cast<int32_t>(document);
    entry.tile = tile;
    entry.start_q = static_cast<int32_t>(d.start_q);
    entry.tokens = d.tokens;
    entry.start_k = static_cast<int32_t>(d.start_k);
    entry.keys = d.keys;
    if (list == PlanView::kBackward) {
      entry.first_ring_index = sums * static_cast<uint32_t>(plan.num_kv_heads);
    } else if (list == PlanView::kForwardResident) {
      const int32_t end = tokens(d).end, size = plan.resident_tokens();
      entry.first_token = tile * size;
      entry.end_token = end - entry.first_token < size ? end : entry.first_token + size;
      entry.end_key = d.visible_keys(entry.first_token, entry.end_token - 1).end;
    } else if (is_forward()) {
      const int64_t row = first_row(d, tile);
      entry.first_token = static_cast<int32_t>(row / plan.tiles.group);
      entry.head_offset = static_cast<int32_t>(row % plan.tiles.group);
      if (contiguous()) entry.document_tiles = tiles(d);
    }
    return entry;
  }
};

// Two prefix sums, of entries and of their row tiles with partial dq, in one 64-bit word: one atomicAdd advances both.
struct ListPosition {
  int32_t entry;
  uint32_t sums;
};
using Counter = unsigned long long;
__device__ Counter counter_of(ListPosition p) {
  return static_cast<Counter>(p.sums) << 32 | static_cast<uint32_t>(p.entry);
}
__device__ ListPosition position_of(Counter c) {
  return {static_cast<int32_t>(c), static_cast<uint32_t>(c >> 32)};
}

// Position of this lane's entry in the list: one atomicAdd for all lanes in `taking` with the same bucket.
__device__ int32_t take_position(Counter* counters, int bucket, unsigned taking) {
  const unsigned lane = threadIdx.x & 31;
  const unsigned peers = __match_any_sync(taking, bucket);
  const int leader = __ffs(static_cast<int>(peers)) - 1;
  int32_t base = 0;
  if (lane == static_cast<unsigned>(leader)) {
    base = atomicAdd(reinterpret_cast<int32_t*>(&counters[bucket]), __popc(peers));  // the entries: the low word
  }
  base = __shfl_sync(peers, base, leader);
  return base + __popc(peers & ((1u << lane) - 1));
}

// f(document, its view, tile, position) for every tile; positions are from counters[bucket]. A warp takes 32
// documents, one per lane, numbers their tiles by a prefix sum, and then handles one tile per lane.
template <class F>
__device__ void for_each_tile(const TileLister& lister, const Documents& documents_q, const Documents& documents_k,
                              Counter* counters, F&& f) {
  const int lane = threadIdx.x & 31;
  for (int64_t base = threadIdx.x & ~31; base < documents_q.num_documents; base += blockDim.x) {
    int32_t tiles = 0;
    ListPosition first_entry{};  // of this lane's document, where its tiles are contiguous
    if (base + lane < documents_q.num_documents) {
      const DocumentWithEnds d = document_with_ends(documents_q, documents_k, base + lane, lister.plan);
      tiles = lister.tiles(d);
      if (lister.contiguous() && tiles > 0) {
        const int bucket = cost_bucket(lister.cost(d, lister.is_forward() ? tiles - 1 : 0));  // the costliest
        first_entry = position_of(atomicAdd(&counters[bucket], counter_of({tiles, lister.partial_dq_tiles(d)})));
      }
    }
    int32_t end = tiles;  // inclusive prefix sum
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t lower = __shfl_up_sync(0xffffffffu, end, step);
      if (lane >= step) end += lower;
    }
    const int32_t count = __shfl_sync(0xffffffffu, end, 31);
    for (int32_t i = lane; i - lane < count; i += 32) {
      int owner = 0;  // the lane whose document has tile i: how many end at or before it
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        if (__shfl_sync(0xffffffffu, end, owner + step - 1) <= i) owner += step;
      }
      const int32_t first = __shfl_sync(0xffffffffu, end - tiles, owner);
      ListPosition position{__shfl_sync(0xffffffffu, first_entry.entry, owner),
                            __shfl_sync(0xffffffffu, first_entry.sums, owner)};
      const unsigned taking = __ballot_sync(0xffffffffu, i < count);
      if (i < count) {
        const DocumentWithEnds d = document_with_ends(documents_q, documents_k, base + owner, lister.plan);
        if (lister.contiguous()) {
          position.entry += i - first;
        } else {
          position.entry = take_position(counters, cost_bucket(lister.cost(d, i - first)), taking);
        }
        f(base + owner, d, i - first, position);
      }
    }
  }
}

// Flags the wrong ones.
__device__ bool wrong_lengths(const KeyPages& pages, int64_t documents, const FaultFlag& fault) {
  bool wrong = false;
  for (int64_t i = threadIdx.x; pages.used && i < documents; i += blockDim.x) {
    if (pages.seqused_k[i] == pages.keys(i)) continue;
    fault.raise(Fault::kKeysPastPages, i);
    wrong = true;
  }
  return wrong;
}

__device__ bool wrong_entries(const Documents& documents) {
  bool wrong = false;
  for (int64_t i = threadIdx.x; i <= documents.num_documents; i += blockDim.x) {
    const int32_t value = documents.cu_seqlens[i];
    wrong |= (i == 0 && value != 0) || (i > 0 && value < documents.cu_seqlens[i - 1]) || value > documents.total;
  }
  return wrong;
}

// Of the token `t` of the batch.
__device__ void check_end(const int32_t* visible_end, int64_t t, const Documents& documents_q,
                          const Documents& documents_k, const PlanView& plan, const FaultFlag& fault) {
  const int64_t i = documents_q.document_of(t);
  const int64_t start = documents_q[i].begin;
  const int64_t keys = documents_k[i].size();
  const int64_t own = t - start + keys - documents_q[i].size();
  const int32_t end = visible_end[t];
  const Fault found = end <= own                              ? Fault::kVisibleEndBeforeOwn
                      : end > keys                            ? Fault::kVisibleEndPastKeys
                      : t > start && end < visible_end[t - 1] ? Fault::kVisibleEndOrder
                                                              : Fault::kNone;
  if (found == Fault::kNone) return;
  fault.raise(found, t);
  plan.data[PlanView::kWrongEnds] = 1;
}

// Copies visible_end into the plan, checks it, and finds the first token that sees each key.
__global__ void __launch_bounds__(kEndThreads)
    visible_end_kernel(PlanView plan, Documents documents_q, Documents documents_k, const int32_t* visible_end,
                       FaultFlag fault) {
  for (int64_t t = thread_id(); t < documents_q.total; t += thread_count()) {
    plan.planned_ends()[t] = visible_end[t];
    if (t < documents_q.end()) check_end(visible_end, t, documents_q, documents_k, plan, fault);
  }
  for (int64_t t = thread_id(); t < documents_k.end(); t += thread_count()) {
    const int64_t i = documents_k.document_of(t);
    const Interval<int64_t> tokens = documents_q[i];
    const int64_t key = t - documents_k[i].begin;
    int64_t low = tokens.begin;
    int64_t high = tokens.end;
    while (low < high) {
      const int64_t mid = (low + high) / 2;
      if (visible_end[mid] <= key) {
        low = mid + 1;
      } else {
        high = mid;
      }
    }
    plan.planned_first_tokens()[t] = static_cast<int32_t>(low - tokens.begin);
  }
}

__global__ void __launch_bounds__(kPlanThreads)
    attention_plan_kernel(PlanView plan, Documents documents_q, Documents documents_k, FaultFlag fault) {
  __shared__ Counter counters[kBuckets];
  const int list = blockIdx.x;
  const TileLister lister{plan, list};
  // If one entry of cu_seqlens or visible_end is wrong, the whole batch counts as padding: results are zeros, and no
  // address is computed from a wrong value.
  const bool wrong_ends = plan.ends.end != nullptr && plan.data[PlanView::kWrongEnds] != 0;
  const bool pages = plan.pages.used;
  const bool wrong_keys = pages ? wrong_lengths(plan.pages, plan.num_documents, fault) : wrong_entries(documents_k);
  const bool wrong = __syncthreads_or(wrong_ends || wrong_entries(documents_q) || wrong_keys);
  if (list == 0) {
    if (threadIdx.x == 0) {
      plan.data[PlanView::kEndQ] = wrong ? 0 : static_cast<int32_t>(documents_q.end());
      plan.data[PlanView::kEndK] = wrong || pages ? 0 : static_cast<int32_t>(documents_k.end());
      plan.data[PlanView::kGeometry] = plan.geometry();
    }
    for (int64_t i = threadIdx.x; i <= plan.num_documents; i += blockDim.x) {
      plan.planned_cu_seqlens_q()[i] = documents_q.cu_seqlens[i];
      if (!pages) plan.planned_cu_seqlens_k()[i] = documents_k.cu_seqlens[i];
      if (pages && i < plan.num_documents) plan.planned_cu_seqlens_k()[i] = plan.pages.seqused_k[i];
    }
  }
  if (wrong) {
    if (threadIdx.x == 0) plan.data[list] = 0;
    flag_cu_seqlens(documents_q, fault);
    if (!pages) flag_cu_seqlens(documents_k, fault);
    return;
  }
  if (pages && list > PlanView::kForwardResident) {  // there is no backward
    if (threadIdx.x == 0) plan.data[list] = 0;
    return;
  }
  for (int i = threadIdx.x; i < kBuckets; i += blockDim.x) counters[i] = 0;
  __syncthreads();
  // First pass: counts per bucket. Then their prefix sum, and in a second pass the entries.
  for_each_tile(lister, documents_q, documents_k, counters,
                [](int64_t, const DocumentWithEnds&, int32_t, ListPosition) {});
  __syncthreads();
  if (threadIdx.x == 0) {
    Counter sum = 0;
    for (int i = 0; i < kBuckets; ++i) {
      const Counter count = counters[i];
      counters[i] = sum;
      sum += count;
    }
    plan.data[list] = position_of(sum).entry;
  }
  __syncthreads();
  PlanEntry* entries = plan.entries[list];
  for_each_tile(lister, documents_q, documents_k, counters,
                [&](int64_t document, const DocumentWithEnds& d, int32_t tile, ListPosition position) {
                  entries[position.entry] = lister.entry(document, d, tile, position.sums);
                });
}

// Room for the longest document, and to keep the GPU busy. own_keys: tiles may begin before a document's first row.
void set_dq_ring(PlanView& plan, bool own_keys, int32_t device) {
  const AttentionTiles& tiles = plan.tiles;
  const int64_t key_tiles = plan.total_k / tiles.backward_keys;
  if (key_tiles == 0) return;  // documents of one key tile have no partial dq
  int multiprocessors = 0;
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  const int64_t longest = ceil_div(plan.total_q * tiles.group, tiles.backward_rows) + own_keys;
  const int64_t in_flight = 2 * multiprocessors * ceil_div(tiles.backward_keys * tiles.group, tiles.backward_rows);
  const uint64_t min_size = static_cast<uint64_t>(std::max({longest, in_flight, key_tiles + 1}));
  constexpr uint64_t kMaxSize = uint64_t{1} << 31;  // row tiles: more than fit in any GPU's memory
  plan.dq_ring = static_cast<uint32_t>(std::min(std::bit_ceil(min_size), kMaxSize));
  const int64_t row_tiles = (longest + (1 + own_keys) * std::min(key_tiles, plan.num_documents)) * plan.num_kv_heads;
  plan.dq_ring_tiles = std::min<int64_t>(row_tiles, plan.dq_ring);
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
  plan.tiles = attention_tiles(group, p.head_dim, p.head_dim_v, plan.total_q * p.num_kv_heads, p.device);
  const auto side = [](int64_t window) {
    return window < 0 || window > kOpenWindow ? kOpenWindow : static_cast<int32_t>(window);
  };
  plan.window = {side(p.window_left), side(p.window_right)};
  plan.num_kv_heads = static_cast<int32_t>(p.num_kv_heads);
  plan.pages = p.pages;
  set_dq_ring(plan, p.documents_q.cu_seqlens != p.documents_k.cu_seqlens, p.device);
  const int64_t capacity[PlanView::kLists] = {plan.forward_capacity(),
                                              plan.forward_short_capacity(),
                                              plan.forward_resident_capacity(),
                                              plan.backward_capacity(),
                                              plan.num_documents,
                                              plan.num_documents};
  const int64_t words = PlanView::kHeaderWords + 2 * (plan.num_documents + 1);
  auto* entries = reinterpret_cast<PlanEntry*>(plan.data) + ceil_div(words, PlanView::kEntryWords);
  for (int list = 0; list < PlanView::kLists; ++list) {
    plan.entries[list] = entries;
    entries += capacity[list];
  }
  if (p.visible_end != nullptr) {
    const auto* ends = reinterpret_cast<const int32_t*>(entries);
    plan.ends = {ends, ends + plan.total_q};
  }
  return plan;
}

}  // namespace packing_ops::attention

namespace packing_ops {

void launch_attention_plan_cuda(const AttentionPlanParams& p, const CudaLaunch& launch) {
  using namespace attention;
  const PlanView plan = plan_view(p);
  const cudaStream_t stream = stream_of(launch);
  if (p.visible_end != nullptr) {
    check_cuda(cudaMemsetAsync(plan.data + PlanView::kWrongEnds, 0, sizeof(int32_t), stream), "cudaMemsetAsync");
    const unsigned grid = grid_for(std::max(plan.total_q, plan.total_k), kEndThreads);
    visible_end_kernel<<<grid, kEndThreads, 0, stream>>>(plan, p.documents_q, p.documents_k, p.visible_end,
                                                         launch.fault);
    check_launch("visible_end_kernel");
  }
  attention_plan_kernel<<<PlanView::kLists, kPlanThreads, 0, stream>>>(plan, p.documents_q, p.documents_k,
                                                                       launch.fault);
  check_launch("attention_plan_kernel");
}

}  // namespace packing_ops
