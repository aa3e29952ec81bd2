// Forward of resident rows, whose keys all fit in shared memory. A unit of work is (tokens of a document, kv head).
// Warp specialised: a producer warp loads every unit's keys, once, into a ring buffer of key tiles, as far ahead as
// there is room; the consumer warps take 16 packed rows at a time from a shared counter and never wait for each other.
// Barriers: `full` when a unit's keys have arrived, `empty` when every consumer warp is done with the unit. A row's
// online softmax takes the keys in the same order as in forward.cuh.
//
// Warps are at different places in the code at the same time, which evicts the instruction cache: each step is compiled
// once (no path for half tiles), with kSmallCode.
#pragma once

#include "core/launch.cuh"
#include "ops/attention/cuda/persistent.cuh"
#include "ops/attention/cuda/sm80/forward_unit.cuh"

namespace packing_ops::attention::sm80 {

template <int kDim_>
struct ResidentShape {
  static constexpr int kDim = kDim_;
  static constexpr int kDimV = kDim;
  static constexpr int kRows = kResidentRowTile;
  static constexpr int kWarpRows = kRows;
  static constexpr int kRowBlocks = kRows / 16;
  static constexpr int kKeys = kShortKeys;
  static constexpr int kWarps = kResidentWarps;
  static constexpr int kThreads = 32 * (kWarps + 1);
  static constexpr int kTiles = resident_key_tiles(kDim);
  static constexpr int kLoadsAhead = 1;
  static constexpr bool kSmallCode = true;
  static constexpr int kUnits = 16;  // in the ring at once, at most
  static constexpr int kShared = resident_shared(kDim);
  using TileQ = Tile<kRows, kDim>;
  using TileK = Tile<kKeys, kDim>;
  using TileV = TileK;
  struct Tiles {
    uint32_t base;
    __device__ TileK operator()(int32_t i) const { return {base + 2 * i * TileK::kBytes}; }
  };
};

struct ResidentUnit {
  DocumentWithEnds d;
  int32_t first_token;
  int32_t end_token;
  int32_t kv_head;  // -1: there are no more units
  int32_t first_tile;
  int32_t first_block;  // blocks of 16 rows, counted through all units of this thread block
  int32_t end_block;
};

// The units whose keys are in the ring. The i-th unit of this thread block is in slot i % kUnits.
template <class Shape>
struct ResidentRing {
  ResidentUnit units[Shape::kUnits];
  uint64_t full[Shape::kUnits];
  uint64_t empty[Shape::kUnits];
  int32_t next_block;  // the first block of 16 rows that no consumer warp has taken

  __device__ void wait_until_full(int32_t unit) {
    ptx::mbarrier_wait(&full[unit % Shape::kUnits], unit / Shape::kUnits & 1);
  }
  __device__ void wait_until_empty(int32_t unit) {
    ptx::mbarrier_wait(&empty[unit % Shape::kUnits], unit / Shape::kUnits & 1);
  }
};

// Producer warp: loads every unit's keys as soon as the ring has room for them.
template <class Shape>
__device__ __forceinline__ void load_units(const Args& args, ResidentRing<Shape>& ring, typename Shape::Tiles tile_k,
                                           typename Shape::Tiles tile_v) {
  constexpr int kUnits = Shape::kUnits;
  const int lane = threadIdx.x & 31;
  const uint32_t units = static_cast<uint32_t>(args.plan.data[PlanView::kForwardResident]) * args.num_kv_heads;
  int32_t unit = 0;
  int32_t oldest = 0;  // unit whose tiles are still in the ring
  int32_t first_tile = 0, first_block = 0;
  int32_t used = 0;        // tiles of the units from oldest on
  int32_t lane_tiles = 0;  // key tiles of the unit in slot `lane`
  const auto make_room = [&](int32_t tiles) {
    for (; used + tiles > Shape::kTiles || unit - oldest == kUnits; ++oldest) {
      ring.wait_until_empty(oldest);
      used -= __shfl_sync(0xffffffffu, lane_tiles, oldest % kUnits);
    }
  };
  const auto announce = [&](const ResidentUnit& described) {
    if (lane == 0) {
      ring.units[unit % kUnits] = described;
      ptx::mbarrier_arrive(&ring.full[unit % kUnits]);
    }
    ptx::cp_async_mbarrier_arrive(&ring.full[unit % kUnits]);
  };
  PlanEntry entry{};  // each lane reads ahead one of the next 32 units
  int32_t head = 0;
  for (; serpentine(unit) < units; ++unit) {
    if (unit % 32 == 0 && serpentine(unit + lane) < units) {
      const uint32_t index = args.kv_heads.quotient(serpentine(unit + lane));
      head = static_cast<int32_t>(serpentine(unit + lane) - index * args.kv_heads.value);
      entry = args.plan.entries[PlanView::kForwardResident][index];
    }
    const auto from_lane = [&](int32_t x) { return __shfl_sync(0xffffffffu, x, unit % 32); };
    const int32_t kv_head = from_lane(head);
    DocumentWithEnds d = {{from_lane(entry.start_q), from_lane(entry.start_k), from_lane(entry.tokens),
                           from_lane(entry.keys), args.plan.window},
                          args.plan.ends};
    static_assert(kResidentMaxKeys <= kForkAlignment);
    d.start_k = row_of_key(args, d, 0);  // the keys that resident rows see are in one page
    const int32_t first_token = from_lane(entry.first_token);
    const int32_t end_token = from_lane(entry.end_token);
    const int32_t end_key = from_lane(entry.end_key);
    const int32_t tiles = (end_key + Shape::kKeys - 1) / Shape::kKeys;
    make_room(tiles);
    const int32_t rows = (end_token - first_token) * args.group;
    const int32_t end_block = first_block + (rows + Shape::kRows - 1) / Shape::kRows;
    const ResidentUnit described = {d, first_token, end_token, kv_head, first_tile, first_block, end_block};
#pragma unroll 1
    for (int32_t i = 0; i < tiles; ++i) {
      const int32_t first_key = i * Shape::kKeys;
      const KeySpan span = {d.start_k + first_key, d.keys - first_key};
      const int32_t keys = end_key - first_key;
      // Keys after the last one have p = 0, but v must be finite there: 0 * NaN is NaN.
      load_keys<32>(tile_k(first_tile), args.k, span, kv_head, args.head_dim, lane, keys);
      load_keys<32>(tile_v(first_tile), args.v, span, kv_head, args.head_dim_v, lane, (keys + 15) & ~15);
      first_tile = first_tile + 1 < Shape::kTiles ? first_tile + 1 : 0;
    }
    announce(described);
    if (lane == unit % kUnits) lane_tiles = tiles;
    used += tiles;
    first_block = end_block;
  }
  make_room(0);
  announce({{}, 0, 0, -1, 0, 0, INT32_MAX});
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
}

// Consumer warps: compute out and lse of the rows that they take.
template <class T, class Shape, bool kTransform>
__device__ __forceinline__ void attend(const Args& args, ResidentRing<Shape>& ring, typename Shape::TileQ tile_q,
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
  PackedRows finished;  // the rows before, whose sums are in o
  finished.valid = 0;
#pragma unroll 1
  while (true) {
    // Find the unit of the next rows. Their q is loaded while the rows before are stored.
    const int32_t block = __shfl_sync(0xffffffffu, taken, 0);
    while (block >= ring.units[unit % Shape::kUnits].end_block) {
      __syncwarp();  // all lanes have read it
      if (lane == 0) ptx::mbarrier_arrive(&ring.empty[unit % Shape::kUnits]);
      ++unit;
      ring.wait_until_full(unit);
    }
    const ResidentUnit& current = ring.units[unit % Shape::kUnits];
    const DocumentWithEnds& d = current.d;
    const bool last = current.kv_head < 0;
    PackedRows rows;
    if (!last) {
      const int32_t first = (block - current.first_block) * Shape::kRows;
      const auto step = static_cast<int32_t>(args.group_size.quotient(first));
      rows = PackedRows(args, d, current.kv_head, current.first_token + step, first - step * args.group,
                        current.end_token, Shape::kRows);
      load_warp_rows<Shape>(args, rows, tile_q, 0);
      ptx::cp_async_commit();
      taken = take_block();
    }
    if (finished.valid > 0) finish<T, Shape>(args, finished, lane >> 2, state, o, scale, natural_scale);
    if (last) break;
    finished = rows;
    Unit::clear(o, state);
    const Interval<int32_t> visible_any = d.visible_keys(rows.token, rows.last_token());
    const Interval<int32_t> visible_all = d.keys_visible_to_all(rows.token, rows.last_token());
    int32_t tile = visible_any.begin / Shape::kKeys;
    ptx::cp_async_wait<0>();
    __syncwarp();
#pragma unroll 1
    for (int32_t first_key = tile * Shape::kKeys; first_key < visible_any.end; first_key += Shape::kKeys, ++tile) {
      const int32_t i = current.first_tile + tile;
      const int32_t slot = i < Shape::kTiles ? i : i - Shape::kTiles;
      const bool masked = first_key < visible_all.begin || first_key + Shape::kKeys > visible_all.end;
      const WarpTile<Shape> warp_tile{tile_q, tile_k(slot), tile_v(slot), 0, first_key, visible_any.end - first_key,
                                      masked};
      Unit::template step<Unit::kKeyBlocks>(o, state, args, warp_tile, d, rows, scale);
    }
    __syncwarp();
  }
}

template <class T, int kDim, bool kTransform>
__global__ void __launch_bounds__(ResidentShape<kDim>::kThreads, 1)
    attention_forward_resident_kernel(__grid_constant__ const Args args) {
  using Shape = ResidentShape<kDim>;
  extern __shared__ uint8_t shared[];
  __shared__ ResidentRing<Shape> ring;
  const uint32_t base = (ptx::shared_address(shared) + 127) & ~127u;
  const typename Shape::Tiles tile_k{base};
  const typename Shape::Tiles tile_v{base + Shape::TileK::kBytes};
  const uint32_t first_q = base + 2 * Shape::kTiles * Shape::TileK::kBytes;
  const int warp = threadIdx.x / 32;

  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x < Shape::kUnits) {
    ptx::mbarrier_init(&ring.full[threadIdx.x], 32 + 1);  // 32 lanes' copies, and lane 0's ResidentUnit
    ptx::mbarrier_init(&ring.empty[threadIdx.x], Shape::kWarps);
  }
  if (threadIdx.x == 0) ring.next_block = 0;
  if (args.counters != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *args.counters = 0;  // for the next forward
  __syncthreads();
  if (warp == Shape::kWarps) {
    load_units(args, ring, tile_k, tile_v);
  } else {
    const typename Shape::TileQ tile_q{first_q + warp * Shape::TileQ::kBytes};
    attend<T, Shape, kTransform>(args, ring, tile_q, tile_k, tile_v);
  }
}

template <class T, int kDim, bool kTransform>
void run_forward_resident(const Args& args, cudaStream_t stream) {
  using Shape = ResidentShape<kDim>;
  static_assert(sizeof(ResidentRing<Shape>) <= kResidentRingBytes);
  static PersistentKernel kernel{reinterpret_cast<const void*>(attention_forward_resident_kernel<T, kDim, kTransform>),
                                 Shape::kThreads, Shape::kShared, "attention_forward_resident_kernel"};
  launch_persistent(kernel, &args, args.plan.forward_resident_units(), stream);
}

}  // namespace packing_ops::attention::sm80
