// The walk over a document's chunks. With S the state before a chunk (scales of RowScales, times rows):
//   corrected = inverse (beta (v - scales.k K S)), out = scales.q Q S + scores corrected,
//   S = through S + K^T (scales.to_end corrected).
#include "ops/scan/scan_walk.cuh"

namespace packing_ops::scan {

namespace {

// One chunk; with kKeep what the backward needs, else out.
template <class T, int kDim, bool kKeep>
struct Step {
  const GatedDeltaParams& p;
  const Chunks& chunks;
  const Slice& slice;
  State<kDim>& state;
  float* scratch;

  __device__ __forceinline__ void operator()(int chunk, const Stage<T, kDim>& stage) const {
    const RowScales& scales = *stage.scales;
    const int valid = slice.valid(chunk);
    const int64_t row = p.num_v_heads * p.head_dim_v;
    if constexpr (kKeep) {
      const int64_t at = slice.index(p, chunk) * p.head_dim_v + slice.column + warp_column();
      state.keep(static_cast<T*>(chunks.states) + at * kDim);
    }
    Columns held = {};
    multiply_rows<T, Order::kTransposed, Terms::kAll>(held, state.at, stage.keys, scratch);
    Columns values;
    load_columns(stage.values, values);
#pragma unroll
    for (int tile = 0; tile < kChunk / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[tile][i] -= scales.k[row_of(tile, i)] * held[tile][i];
    }
    map_columns(values, [&](float x, int i) { return scales.beta[i] * x; });
    Columns corrected = {};
    multiply_rows<T, Order::kTransposed, Terms::kUpTo>(corrected, values, stage.inverse, scratch);
    if constexpr (kKeep) {
      T* to = static_cast<T*>(chunks.corrected) + slice.offset(p, chunk, 0);
      store_columns(corrected, stage.values, to, row, valid);
    } else {
      Columns out = {};
      multiply_rows<T, Order::kTransposed, Terms::kAll>(out, state.at, stage.queries, scratch);
      map_columns(out, [&](float x, int i) { return scales.q[i] * x; });
      multiply_rows<T, Order::kTransposed, Terms::kUpTo>(out, corrected, stage.scores, scratch);
      store_columns(out, stage.values, static_cast<T*>(p.out) + slice.offset(p, chunk, 0), row, valid);
    }
    map_columns(corrected, [&](float x, int i) { return scales.to_end[i] * x; });
    state.scale(scales.through[0]);
    multiply_rows<T, Order::kPlain, Terms::kAll>(state.at, corrected, stage.keys, scratch);
  }
};

template <class T, int kDim, int kStages, bool kKeep>
__global__ void __launch_bounds__(walk_warps<T, kDim>() * 32, 1) walk_kernel(GatedDeltaParams p, Chunks chunks) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kColumns = Stage<T, kDim>::kColumns;
  const Slice slice(p, kColumns);
  if (slice.is_padding(p)) {
    if constexpr (!kKeep) zero_padding<T, kColumns>(p, slice, p.out);
    return;
  }
  const WalkShared<T, kDim> own{shared};
  State<kDim> state;
  state.load(p.initial_state, slice.state_offset(p) + warp_column(), p.head_dim_v);
  const Step<T, kDim, kKeep> step{p, chunks, slice, state, own.scratch()};
  const auto load = [&](const auto& stage, int chunk) { stage.template load<!kKeep>(p, chunks, p.v, slice, chunk); };
  for_each_chunk<kStages, 1>(own, 0, slice.chunks, load, step);
  if (!kKeep && p.final_state) state.store(p.final_state, slice.state_offset(p) + warp_column(), p.head_dim_v);
}

}  // namespace

template <class T>
void launch_walk(const GatedDeltaParams& p, const Chunks& chunks, bool keep, const CudaLaunch& launch) {
  dispatch_walk<T>(p, [&](auto dim, auto stages) {
    using Sizes = Stage<T, dim>;
    constexpr int kBytes = WalkShared<T, dim>::bytes(stages);
    const auto kernel = keep ? walk_kernel<T, dim, stages, true> : walk_kernel<T, dim, stages, false>;
    allow_shared(reinterpret_cast<const void*>(kernel), kBytes);
    kernel<<<walk_grid(p, Sizes::kColumns), Sizes::kThreads, kBytes, stream_of(launch)>>>(p, chunks);
    check_launch("walk_kernel");
  });
}

template void launch_walk<float>(const GatedDeltaParams&, const Chunks&, bool, const CudaLaunch&);
template void launch_walk<__half>(const GatedDeltaParams&, const Chunks&, bool, const CudaLaunch&);
template void launch_walk<__nv_bfloat16>(const GatedDeltaParams&, const Chunks&, bool, const CudaLaunch&);

}  // namespace packing_ops::scan
