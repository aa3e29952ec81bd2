// Forward of documents whose keys fit in shared memory as a whole. A unit is (document, kv head): its keys are read
// once, into a ring of tiles, by a warp that does nothing else and runs as far ahead as the ring has room. The other
// warps take 16 packed rows at a time, whichever is free, and never wait for each other: `full` says that a unit's keys
// have arrived, `empty` that every warp is past it. A row's sum has the order that it has in forward.cuh.
//
// Warps that go their own ways share the instruction cache only as long as the code fits there, hence one place for
// each step, kFewInstructions, and no half tiles of keys.
#pragma once

#include "core/launch.cuh"
#include "ops/attention/cuda/persistent.cuh"
#include "ops/attention/cuda/sm80/forward_unit.cuh"

namespace packing_ops::attention::sm80 {

template <int kDim_>
struct WholeShape {
  static constexpr int kDim = kDim_;
  static constexpr int kRows = kWholeRows;
  static constexpr int kWarpRows = kRows;
  static constexpr int kRowBlocks = kRows / 16;
  static constexpr int kKeys = kShortKeys;
  static constexpr int kWarps = kWholeWarps;
  static constexpr int kThreads = 32 * (kWarps + 1);
  static constexpr int kTiles = whole_tiles(kDim);
  static constexpr int kLoadsAhead = 1;
  static constexpr bool kFewInstructions = true;
  static constexpr int kUnits = 16;  // whose keys lie in the ring at once
  static constexpr int kShared = whole_shared(kDim);
  using TileQ = Tile<kRows, kDim>;
  using TileK = Tile<kKeys, kDim>;
  struct Tiles {
    uint32_t base;
    __device__ TileK operator()(int32_t i) const { return {base + 2 * i * TileK::kBytes}; }
  };
};

struct WholeUnit {
  DocumentView d;
  int32_t kv_head;  // -1: there are no more units
  int32_t first_tile;
  int32_t first_block;  // blocks of rows, counted through all units of this block of threads
  int32_t end_block;
};

// What says which tiles hold what. Unit number i of this block of threads is at place i % kUnits.
template <class Shape>
struct WholeRing {
  WholeUnit units[Shape::kUnits];
  uint64_t full[Shape::kUnits];
  uint64_t empty[Shape::kUnits];
  int32_t next_block;  // of rows that nobody has taken

  __device__ void wait_until_full(int32_t unit) {
    ptx::barrier_wait(&full[unit % Shape::kUnits], unit / Shape::kUnits & 1);
  }
  __device__ void wait_until_empty(int32_t unit) {
    ptx::barrier_wait(&empty[unit % Shape::kUnits], unit / Shape::kUnits & 1);
  }
};

// Of the warp that loads: every unit's keys, as soon as the ring has room for them.
template <class Shape>
__device__ __forceinline__ void load_units(const Args& args, WholeRing<Shape>& ring, typename Shape::Tiles tile_k,
                                           typename Shape::Tiles tile_v) {
  constexpr int kUnits = Shape::kUnits;
  const int lane = threadIdx.x & 31;
  const uint32_t units = static_cast<uint32_t>(args.plan.data[PlanView::kForwardWhole]) * args.num_kv_heads;
  int32_t unit = 0;
  int32_t oldest = 0;
  int32_t first_tile = 0;
  int32_t first_block = 0;
  int32_t used = 0;        // tiles from oldest on
  int32_t lane_tiles = 0;  // of the unit at place `lane`
  const auto make_room = [&](int32_t tiles) {
    for (; used + tiles > Shape::kTiles || unit - oldest == kUnits; ++oldest) {
      ring.wait_until_empty(oldest);
      used -= __shfl_sync(0xffffffffu, lane_tiles, oldest % kUnits);
    }
  };
  const auto announce = [&](const WholeUnit& described) {
    if (lane == 0) {
      ring.units[unit % kUnits] = described;
      ptx::barrier_arrive(&ring.full[unit % kUnits]);
    }
    ptx::barrier_arrive_after_copies(&ring.full[unit % kUnits]);
  };
  PlanEntry entry{};  // of the unit that is `lane` after a multiple of 32
  int32_t head = 0;
  for (; serpentine(unit) < units; ++unit) {
    if (unit % 32 == 0 && serpentine(unit + lane) < units) {
      const uint32_t place = args.kv_heads.quotient(serpentine(unit + lane));
      head = static_cast<int32_t>(serpentine(unit + lane) - place * args.kv_heads.value);
      entry = args.plan.entries[PlanView::kForwardWhole][place];
    }
    const auto from_lane = [&](int32_t x) { return __shfl_sync(0xffffffffu, x, unit % 32); };
    const int32_t kv_head = from_lane(head);
    const DocumentView d = {from_lane(entry.start_q), from_lane(entry.start_k), from_lane(entry.tokens),
                            from_lane(entry.keys), args.plan.window};
    const int32_t tiles = (d.keys + Shape::kKeys - 1) / Shape::kKeys;
    make_room(tiles);
    const int32_t end_block = first_block + (d.tokens * args.group + Shape::kRows - 1) / Shape::kRows;
    const WholeUnit described = {d, kv_head, first_tile, first_block, end_block};
#pragma unroll 1
    for (int32_t i = 0; i < tiles; ++i) {
      const int32_t first_key = i * Shape::kKeys;
      const int32_t keys = d.keys - first_key;
      // What comes after the last key is masked in s, but p = 0 needs a number to multiply.
      load_keys<32>(tile_k(first_tile), args.k, d, kv_head, first_key, args.head_dim, lane, keys);
      load_keys<32>(tile_v(first_tile), args.v, d, kv_head, first_key, args.head_dim, lane, (keys + 15) & ~15);
      first_tile = first_tile + 1 < Shape::kTiles ? first_tile + 1 : 0;
    }
    announce(described);
    if (lane == unit % kUnits) lane_tiles = tiles;
    used += tiles;
    first_block = end_block;
  }
  make_room(0);
  WholeUnit none{};
  none.kv_head = -1;
  none.end_block = INT32_MAX;
  announce(none);
  ptx::copy_commit();
  ptx::copy_wait<0>();
}

// Of the other warps: out and lse of the rows that they take.
template <class T, class Shape, bool kTransform>
__device__ __forceinline__ void attend(const Args& args, WholeRing<Shape>& ring, typename Shape::TileQ tile_q,
                                       typename Shape::Tiles tile_k, typename Shape::Tiles tile_v) {
  using Unit = ForwardUnit<T, Shape, kTransform>;
  const int lane = threadIdx.x & 31;
  const float scale = Unit::scale(args);
  const double natural_scale = Unit::natural_scale(args);
  const auto take_block = [&] { return lane == 0 ? atomicAdd(&ring.next_block, 1) : 0; };
  int32_t unit = 0;
  int32_t taken = take_block();
  ring.wait_until_full(0);
  RowState<1> state;
  typename Unit::Sums o;
  GroupRows done;  // whose sums are in o
  done.valid = 0;
#pragma unroll 1
  while (true) {
    // To the unit of the next rows, whose q comes while those before are stored.
    const int32_t block = __shfl_sync(0xffffffffu, taken, 0);
    while (block >= ring.units[unit % Shape::kUnits].end_block) {
      if (lane == 0) ptx::barrier_arrive(&ring.empty[unit % Shape::kUnits]);
      ++unit;
      ring.wait_until_full(unit);
    }
    const WholeUnit& now = ring.units[unit % Shape::kUnits];
    const DocumentView& d = now.d;
    const bool last = now.kv_head < 0;
    GroupRows rows;
    if (!last) {
      const int32_t first = (block - now.first_block) * Shape::kRows;
      const auto token = static_cast<int32_t>(args.group_size.quotient(first));
      rows = GroupRows(args, d, now.kv_head, token, first - token * args.group, first, Shape::kRows);
      load_warp_rows<Shape>(args, rows, tile_q, 0);
      ptx::copy_commit();
      taken = take_block();
    }
    if (done.valid > 0) finish<T, Shape>(args, done, lane >> 2, state, o, scale, natural_scale);
    if (last) break;
    done = rows;
    Unit::clear(o, state);
    const Range some = d.keys_seen(rows.token, rows.last_token());
    const Range all = d.keys_seen_by_all(rows.token, rows.last_token());
    int32_t tile = some.first / Shape::kKeys;
    ptx::copy_wait<0>();
    __syncwarp();
#pragma unroll 1
    for (int32_t first_key = tile * Shape::kKeys; first_key < some.end; first_key += Shape::kKeys, ++tile) {
      const int32_t i = now.first_tile + tile;
      const int32_t place = i < Shape::kTiles ? i : i - Shape::kTiles;
      const bool masked = first_key < all.first || first_key + Shape::kKeys > all.end;
      Unit::template step<Unit::kKeyBlocks>(o, state, args, tile_q, tile_k(place), tile_v(place), d, rows, 0, first_key,
                                            some.end - first_key, masked, scale);
    }
    __syncwarp();
  }
}

template <class T, int kDim, bool kTransform>
__global__ void __launch_bounds__(WholeShape<kDim>::kThreads, 1)
    attention_forward_whole_kernel(__grid_constant__ const Args args) {
  using Shape = WholeShape<kDim>;
  extern __shared__ uint8_t shared[];
  __shared__ WholeRing<Shape> ring;
  const uint32_t base = (ptx::shared_address(shared) + 127) & ~127u;
  const typename Shape::Tiles tile_k{base};
  const typename Shape::Tiles tile_v{base + Shape::TileK::kBytes};
  const uint32_t first_q = base + 2 * Shape::kTiles * Shape::TileK::kBytes;
  const int warp = threadIdx.x / 32;

  ptx::let_next_kernel_start();
  if (threadIdx.x < Shape::kUnits) {
    ptx::barrier_init(&ring.full[threadIdx.x], 32 + 1);  // a warp's copies and what one of its lanes writes
    ptx::barrier_init(&ring.empty[threadIdx.x], Shape::kWarps);
  }
  if (threadIdx.x == 0) ring.next_block = 0;
  __syncthreads();
  if (warp == Shape::kWarps) {
    load_units(args, ring, tile_k, tile_v);
  } else {
    const typename Shape::TileQ tile_q{first_q + warp * Shape::TileQ::kBytes};
    attend<T, Shape, kTransform>(args, ring, tile_q, tile_k, tile_v);
  }
  ptx::wait_for_kernel_before();
}

template <class T, int kDim, bool kTransform>
void run_forward_whole(const Args& args, cudaStream_t stream) {
  using Shape = WholeShape<kDim>;
  static_assert(sizeof(WholeRing<Shape>) <= kWholeRing);
  static PersistentKernel kernel{reinterpret_cast<const void*>(attention_forward_whole_kernel<T, kDim, kTransform>),
                                 Shape::kThreads, Shape::kShared, "attention_forward_whole_kernel", true};
  launch_persistent(kernel, &args, args.plan.num_documents * args.num_kv_heads, stream);
}

}  // namespace packing_ops::attention::sm80
