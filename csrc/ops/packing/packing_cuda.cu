// First-fit decreasing of lengths that live on the GPU, with the CPU kernel's bins and no synchronisation.
// First fit itself is sequential, so one warp walks the sorted lengths; a max tree of fanout 32 over the bins' free
// capacity makes each step a few ballots. Everything around it (sorts, grouping by bin) is CUB's and runs on the whole
// GPU.
#include <cub/device/device_radix_sort.cuh>
#include <limits>

#include "core/launch.cuh"
#include "ops/packing/packing.h"

namespace packing_ops {

namespace {

constexpr int kThreads = 256;
constexpr int kFanout = 32;
constexpr int kMaxLevels = 6;
constexpr unsigned kAll = 0xffffffffu;

// Aligned lengths, complemented, as sort keys: the longest first in an ascending sort, so that one kind of sort, which
// takes seconds to compile, serves both. A length that fits no bin is reported and takes a separate bin: nothing is
// lost.
__global__ void sort_keys_kernel(PackFfdParams p, int32_t* keys, int32_t* items, FaultFlag fault) {
  for (int64_t i = thread_id(); i < p.num_sequences; i += thread_count()) {
    const int64_t item = p.ties_last ? p.num_sequences - 1 - i : i;
    const int64_t length = p.lengths[item];
    int64_t aligned = (length + p.alignment - 1) / p.alignment * p.alignment;
    if (length < 0) {
      fault.raise(Fault::kNegativeLength, item);
      aligned = 0;
    } else if (aligned > p.capacity) {
      fault.raise(Fault::kLengthOverCapacity, item);
      aligned = p.capacity;
    }
    keys[i] = ~static_cast<int32_t>(aligned);
    items[i] = static_cast<int32_t>(item);
  }
}

// Level 0 holds the free capacity of every bin, level l + 1 the maxima of 32 neighbours of level l.
struct FreeCapacityTree {
  int32_t* levels[kMaxLevels];
  int64_t sizes[kMaxLevels];
  int num_levels = 0;
  int64_t num_slots = 0;
};

FreeCapacityTree free_capacity_tree(int64_t num_bins, int32_t* memory) {
  FreeCapacityTree tree;
  int64_t size = num_bins;
  do {
    size = ceil_div(size, kFanout) * kFanout;
    tree.levels[tree.num_levels] = memory + tree.num_slots;
    tree.sizes[tree.num_levels++] = size;
    tree.num_slots += size;
    size /= kFanout;
  } while (size > 1);
  return tree;
}

__global__ void fill_kernel(int32_t* out, int64_t size, int32_t value) {
  for (int64_t i = thread_id(); i < size; i += thread_count()) out[i] = value;
}

// One warp. Unopened bins have the whole capacity, so "first fit, else a new bin" is one search.
template <int kLevels>
__global__ void __launch_bounds__(kFanout) first_fit_kernel(FreeCapacityTree tree, const int32_t* keys, int32_t* bins,
                                                            int64_t num_sequences, int64_t* num_bins) {
  const int lane = static_cast<int>(threadIdx.x);
  int32_t free_capacity[kLevels];  // this lane's entry of the current node of each level
  int32_t node[kLevels];
  int32_t position[kLevels];
  int32_t opened = 0;
  int32_t last = -1;
  for (int64_t base = 0; base < num_sequences; base += kFanout) {
    const int64_t lane_item = base + lane;
    const int32_t lane_length = lane_item < num_sequences ? ~keys[lane_item] : 0;
    int32_t lane_bin = 0;
    const int count = static_cast<int>(num_sequences - base < kFanout ? num_sequences - base : kFanout);
    for (int i = 0; i < count; ++i) {
      const int32_t length = __shfl_sync(kAll, lane_length, i);
      // A length equal to the one before goes to the same bin if it fits; otherwise search down from the root.
      const bool again = length == last && __shfl_sync(kAll, free_capacity[0], position[0]) >= length;
      if (!again) {
        int32_t index = 0;
#pragma unroll
        for (int level = kLevels - 1; level >= 0; --level) {
          node[level] = index;
          free_capacity[level] = tree.levels[level][index * kFanout + lane];
          position[level] = __ffs(static_cast<int>(__ballot_sync(kAll, free_capacity[level] >= length))) - 1;
          index = index * kFanout + position[level];
        }
      }
      last = length;
      const int32_t bin = node[0] * kFanout + position[0];
      if (lane == i) lane_bin = bin;
      opened = bin + 1 > opened ? bin + 1 : opened;
      if (length == 0) continue;
      int32_t changed = __shfl_sync(kAll, free_capacity[0], position[0]) - length;
#pragma unroll
      for (int level = 0; level < kLevels; ++level) {
        if (lane == position[level]) {
          free_capacity[level] = changed;
          tree.levels[level][node[level] * kFanout + lane] = changed;
        }
        changed = __reduce_max_sync(kAll, free_capacity[level]);
      }
      __syncwarp();
    }
    if (lane_item < num_sequences) bins[lane_item] = lane_bin;
  }
  if (lane == 0) *num_bins = opened;
}

// bins are sorted: where a new one starts is its offset; unused offsets repeat the end.
__global__ void bin_offsets_kernel(PackFfdParams p, const int32_t* bins, const int32_t* items) {
  for (int64_t i = thread_id(); i <= p.num_sequences; i += thread_count()) {
    if (i < p.num_sequences) {
      if (i == 0 || bins[i] != bins[i - 1]) p.bin_offsets[bins[i]] = i;
      p.item_indices[i] = items[i];
    }
    if (i >= *p.num_bins) p.bin_offsets[i] = p.num_sequences;
  }
}

// Two buffers for each of the two sorts' keys and values, the tree, and CUB's memory.
struct FfdScratch {
  int32_t *keys, *sorted_keys, *items, *sorted_items;
  FreeCapacityTree tree;
  void* cub;
  size_t cub_bytes;
  int64_t bytes;
};

FfdScratch scratch_of(int64_t num_sequences, void* memory) {
  FfdScratch s{};
  auto* base = static_cast<int32_t*>(memory);
  const int64_t padded = ceil_div(num_sequences < 1 ? 1 : num_sequences, 64) * 64;
  s.keys = base;
  s.sorted_keys = base + padded;
  s.items = base + 2 * padded;
  s.sorted_items = base + 3 * padded;
  s.tree = free_capacity_tree(padded, base + 4 * padded);
  const int64_t used = (4 * padded + ceil_div(s.tree.num_slots, 64) * 64) * static_cast<int64_t>(sizeof(int32_t));
  s.cub_bytes = 0;
  check_cuda(cub::DeviceRadixSort::SortPairs(nullptr, s.cub_bytes, s.keys, s.sorted_keys, s.items, s.sorted_items,
                                             num_sequences),
             "cub::DeviceRadixSort::SortPairs");
  s.cub = static_cast<char*>(memory) + used;
  s.bytes = used + static_cast<int64_t>(s.cub_bytes);
  return s;
}

void launch_first_fit(const FfdScratch& s, int32_t* bins, const PackFfdParams& p, cudaStream_t stream) {
  const auto run = [&](auto kernel) {
    kernel<<<1, kFanout, 0, stream>>>(s.tree, s.sorted_keys, bins, p.num_sequences, p.num_bins);
    check_launch("first_fit_kernel");
  };
  switch (s.tree.num_levels) {
    case 1:
    case 2:
      return run(first_fit_kernel<2>);
    case 3:
      return run(first_fit_kernel<3>);
    case 4:
      return run(first_fit_kernel<4>);
    case 5:
      return run(first_fit_kernel<5>);
    default:
      return run(first_fit_kernel<6>);
  }
}

}  // namespace

int64_t pack_ffd_scratch_cuda(int64_t num_sequences) {
  return scratch_of(num_sequences, nullptr).bytes;
}

void launch_pack_ffd_cuda(const PackFfdParams& p, const CudaLaunch& launch) {
  const cudaStream_t stream = stream_of(launch);
  FfdScratch s = scratch_of(p.num_sequences, p.scratch);
  const unsigned grid = grid_for(p.num_sequences + 1, kThreads);
  sort_keys_kernel<<<grid, kThreads, 0, stream>>>(p, s.keys, s.items, launch.fault);
  check_launch("sort_keys_kernel");
  check_cuda(cub::DeviceRadixSort::SortPairs(s.cub, s.cub_bytes, s.keys, s.sorted_keys, s.items, s.sorted_items,
                                             p.num_sequences, 0, 32, stream),
             "cub::DeviceRadixSort::SortPairs");
  fill_kernel<<<grid_for(s.tree.num_slots, kThreads), kThreads, 0, stream>>>(s.tree.levels[0], s.tree.num_slots,
                                                                             static_cast<int32_t>(p.capacity));
  check_launch("fill_kernel");
  int32_t* bins = s.keys;
  launch_first_fit(s, bins, p, stream);
  // Stable, so the items of a bin keep the order of arrival.
  check_cuda(cub::DeviceRadixSort::SortPairs(s.cub, s.cub_bytes, bins, s.sorted_keys, s.sorted_items, s.items,
                                             p.num_sequences, 0, 32, stream),
             "cub::DeviceRadixSort::SortPairs");
  bin_offsets_kernel<<<grid, kThreads, 0, stream>>>(p, s.sorted_keys, s.items);
  check_launch("bin_offsets_kernel");
}

}  // namespace packing_ops
