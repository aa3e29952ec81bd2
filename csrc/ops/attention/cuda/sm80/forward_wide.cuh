// Forward of rows so wide that one warp's registers cannot hold 16 of them. kParts warps share 16 packed rows: each
// computes s over its share of the columns of q and k, adds the others' by way of shared memory, in one order, so that
// all of them have the same bits and the same online softmax, and keeps its share of the columns of o. K and V have one
// tile in shared memory each: V loads while s is computed, the next K while o is. Units and their order are those of
// forward.cuh.
#pragma once

#include "ops/attention/cuda/sm80/forward.cuh"

namespace packing_ops::attention::sm80 {

template <SmemTier kTier>
struct WideShape {
  static constexpr int kHeadDim = 512;
  static constexpr bool kIsShort = false;
  static constexpr int kRows = wide_forward_rows(kTier);
  static constexpr int kKeys = wide_forward_keys(kTier);
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeyThreads = kThreads < 8 * kKeys ? kThreads : 8 * kKeys;  // that load K and V
  static constexpr int kParts = kWarps / (kRows / 16);
  // A warp's rows and columns, as ForwardUnit sees them.
  static constexpr int kDim = kHeadDim / kParts;
  static constexpr int kDimV = kDim;
  static constexpr int kRowBlocks = 1;
  static constexpr int kWarpRows = 16;
  static constexpr int kLoadsAhead = 0;
  static constexpr bool kSmallCode = false;
  using TileQ = Tile<kRows, kDim>;
  using TileK = Tile<kKeys, kDim>;
  using TileV = TileK;
  using AllQ = Tile<kRows, kHeadDim>;
  using AllK = Tile<kKeys, kHeadDim>;
  static constexpr int kScores = 16 * kKeys / 32;  // of a thread
  static constexpr int kTiles = AllQ::kBytes + 2 * AllK::kBytes;
  static constexpr int kShared = kTiles + kThreads * kScores * 4 + 128;
  static_assert(kDim % 64 == 0);  // a share is whole panels

  template <class Part, class All>
  static __device__ Part part_of(All tile, int part) {
    return {tile.base + part * Part::kBytes};
  }
};

// s of this warp's rows over all columns, from those of each share; `scores`: this thread's, [kWarps, kScores, 32].
template <class Shape, class Scores>
__device__ __forceinline__ void add_shares(Scores& s, const float* scores, int row_group) {
  constexpr int kStride = Shape::kRows / 16 * Shape::kScores * 32;  // from a share to the next one
#pragma unroll
  for (int i = 0; i < Shape::kScores; ++i) {
    const float* from = scores + (row_group * Shape::kScores + i) * 32;
    float sum = from[0];
#pragma unroll
    for (int part = 1; part < Shape::kParts; ++part) sum += from[part * kStride];
    s[0][i / 4][i % 4] = sum;
  }
}

template <class T, SmemTier kTier>
__global__ void __launch_bounds__(WideShape<kTier>::kThreads, 1)
    attention_forward_wide_kernel(__grid_constant__ const Args args) {
  using Shape = WideShape<kTier>;
  using Unit = ForwardUnit<T, Shape, true>;
  extern __shared__ uint8_t shared[];
  const uint32_t start = ptx::shared_address(shared);
  const uint32_t base = (start + 127) & ~127u;
  const typename Shape::AllQ tile_q{base};
  const typename Shape::AllK tile_k{base + Shape::AllQ::kBytes};
  const typename Shape::AllK tile_v{tile_k.base + Shape::AllK::kBytes};
  auto* scores = reinterpret_cast<float*>(shared + (base - start) + Shape::kTiles) + (threadIdx.x & 31);

  const int row_group = threadIdx.x / 32 % (Shape::kRows / 16);
  const int part = threadIdx.x / 32 / (Shape::kRows / 16);
  const int warp_row = 16 * row_group;
  const float scale = Unit::scale(args);
  const double natural_scale = Unit::natural_scale(args);
  const auto part_of_q = Shape::template part_of<typename Shape::TileQ>(tile_q, part);
  const auto part_of_k = Shape::template part_of<typename Shape::TileK>(tile_k, part);
  const auto part_of_v = Shape::template part_of<typename Shape::TileV>(tile_v, part);
  const auto load = [&](typename Shape::AllK tile, const AttentionTensor& from, int head_dim, const ForwardWork& work,
                        int32_t key_tile) {
    if (threadIdx.x < Shape::kKeyThreads) {
      const KeySpan keys = key_span(args, work.d, key_tile * Shape::kKeys);
      load_keys<Shape::kKeyThreads>(tile, from, keys, work.kv_head, head_dim, threadIdx.x);
    }
  };

  check_plan(args.plan, args.documents_q, args.documents_k, args.fault);
  check_visible_end(args.plan, args.visible_end, args.fault);
  zero_padding(args);
  const uint32_t units = static_cast<uint32_t>(args.plan.data[PlanView::kForward]) * args.num_kv_heads;
  for (uint32_t round = 0; serpentine(round) < units; ++round) {
    const uint32_t unit = serpentine(round);
    const uint32_t index = args.kv_heads.quotient(unit);
    const ForwardWork work = ForwardWork::make<Shape>(args, args.plan.entries[PlanView::kForward][index],
                                                      static_cast<int32_t>(unit - index * args.kv_heads.value));
    // Prologue: q and the first key tile
    load_packed_rows<Shape::kThreads>(tile_q, threadIdx.x, args.q, work.rows, args.head_dim);
    load(tile_k, args.k, args.head_dim, work, work.first_tile);
    ptx::cp_async_commit();
    const bool has_rows = warp_row < work.rows.valid;
    const int last_row = warp_row + 16 < work.rows.valid ? warp_row + 15 : work.rows.valid - 1;
    const int32_t first_token = work.rows.token_of(warp_row);
    const int32_t last_token = work.rows.token_of(last_row);
    const Interval<int32_t> visible_any =
        has_rows ? work.d.visible_keys(first_token, last_token) : Interval<int32_t>{0, 0};
    const Interval<int32_t> visible_all = work.d.keys_visible_to_all(first_token, last_token);
    RowState<1> state;
    typename Unit::Sums o;
    Unit::clear(o, state);

    for (int32_t tile = work.first_tile; tile < work.end_tile; ++tile) {
      const int32_t first_key = tile * Shape::kKeys;
      const int32_t end_key = first_key + Shape::kKeys;
      const bool attends = first_key < visible_any.end && end_key > visible_any.begin;
      const bool masked = first_key < visible_all.begin || end_key > visible_all.end;
      const WarpTile<Shape> warp_tile{part_of_q, part_of_k, part_of_v, warp_row, first_key, visible_any.end - first_key,
                                      masked};
      typename Unit::Scores s;
      ptx::cp_async_wait<0>();
      __syncthreads();  // k is there, v has been read
      load(tile_v, args.v, args.head_dim_v, work, tile);
      ptx::cp_async_commit();
      if (attends) {
        Unit::template scores<Unit::kKeyBlocks>(s, part_of_q, part_of_k, warp_row);
        float* to = scores + threadIdx.x / 32 * Shape::kScores * 32;
#pragma unroll
        for (int i = 0; i < Shape::kScores; ++i) to[i * 32] = s[0][i / 4][i % 4];
      }
      __syncthreads();  // every share of s is there, k has been read
      if (tile + 1 < work.end_tile) load(tile_k, args.k, args.head_dim, work, tile + 1);
      ptx::cp_async_commit();
      if (attends) {
        add_shares<Shape>(s, scores, row_group);
        Unit::template weights<Unit::kKeyBlocks>(s, o, state, args, warp_tile, work.d, work.rows, scale);
      }
      ptx::cp_async_wait<1>();
      __syncthreads();  // v is there
      if (attends) Unit::template values<Unit::kKeyBlocks>(o, s, part_of_v, warp_tile.end_visible);
    }
    // Epilogue: out and lse
    if (has_rows) {
      finish<T, Shape>(args, work.rows, warp_row + ((threadIdx.x & 31) >> 2), state, o, scale, natural_scale,
                       part * Shape::kDimV);
    }
  }
}

template <class T, SmemTier kTier>
void run_forward_wide(const Args& args, cudaStream_t stream) {
  using Shape = WideShape<kTier>;
  static PersistentKernel kernel{reinterpret_cast<const void*>(attention_forward_wide_kernel<T, kTier>),
                                 Shape::kThreads, Shape::kShared, "attention_forward_wide_kernel"};
  launch_persistent(kernel, &args, args.plan.forward_capacity() * args.num_kv_heads, stream);
}

}  // namespace packing_ops::attention::sm80
