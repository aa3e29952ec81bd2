// The walk over a document's chunks. With S the state before a chunk (scales of RowScales, times rows):
//   corrected = inverse (beta (v - scales.k K S)), out = scales.q Q S + scores corrected,
//   S = through S + K^T (scales.to_end corrected).
#include "ops/scan/scan_walk.cuh"

namespace packing_ops::scan {

namespace {

// One chunk; with kKeep what the backward needs, else out.
template <class T, int kDim, bool kKeep>
struct Step {
  static constexpr int kColumns = slice_of<T, kDim>();
  using Stages = Stage<T, kDim, kColumns>;
  const GatedDeltaParams& p;
  const Chunks& chunks;
  const Slice& slice;
  const WalkShared<T, kDim, kColumns>& shared;
  State<kDim, kColumns>& state;

  __device__ __forceinline__ void operator()(int chunk, const Stages& stage) const {
    const WarpPart<kColumns> part;
    const int valid = slice.valid(chunk);
    float held[part.kTiles][4] = {};
    float out[part.kTiles][4] = {};
    if constexpr (kKeep) {
      const int64_t at = slice.index(p, chunk) * kDim * p.head_dim_v + slice.column;
      state.template store<T>(chunks.states, at, p.head_dim_v);
    }
    multiply(held, stage.keys, part.row, shared.state, part.column, 0, kDim);
    if constexpr (!kKeep) multiply(out, stage.queries, part.row, shared.state, part.column, 0, kDim);
    for_each_pair(held, part.row, part.column, [&](int i, int j, float x, float y) {
      const Vec<T, 2> v = stage.values.pair(i, j);
      const float beta = stage.scales->beta[i];
      const float scale = stage.scales->k[i];
      shared.first.set_pair(i, j, beta * (v.get(0) - scale * x), beta * (v.get(1) - scale * y));
    });
    __syncthreads();
    float corrected[part.kTiles][4] = {};
    multiply(corrected, stage.inverse, part.row, shared.first, part.column, 0, part.row + 16);
    for_each_pair(corrected, part.row, part.column, [&](int i, int j, float x, float y) {
      const float scale = stage.scales->to_end[i];
      shared.third.set_pair(i, j, scale * x, scale * y);
      if constexpr (!kKeep) shared.second.set_pair(i, j, x, y);
      if (kKeep && i < valid) store_pair(static_cast<T*>(chunks.corrected) + slice.offset(p, chunk, i) + j, x, y);
    });
    __syncthreads();
    if constexpr (!kKeep) {
      for_each_pair(out, part.row, part.column, [&](int i, int, float& x, float& y) {
        x *= stage.scales->q[i];
        y *= stage.scales->q[i];
      });
      multiply(out, stage.scores, part.row, shared.second, part.column, 0, part.row + 16);
      for_each_pair(out, part.row, part.column, [&](int i, int j, float x, float y) {
        if (i < valid) store_pair(static_cast<T*>(p.out) + slice.offset(p, chunk, i) + j, x, y);
      });
    }
    state.scale(stage.scales->through[0]);
    state.add_product(stage.keys, shared.third);
    state.store(shared.state);
  }
};

template <class T, int kDim, int kStages, bool kKeep>
__global__ void __launch_bounds__(kWalkThreads, 1) walk_kernel(GatedDeltaParams p, Chunks chunks) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kColumns = slice_of<T, kDim>();
  const Slice slice(p, kColumns);
  if (slice.is_padding(p)) {
    if constexpr (!kKeep) zero_padding<T, kColumns>(p, slice, p.out);
    return;
  }
  const WalkShared<T, kDim, kColumns> own(shared);
  State<kDim, kColumns> state;
  state.load(p.initial_state, slice.state_offset(p), p.head_dim_v);
  state.store(own.state);
  const Step<T, kDim, kKeep> step{p, chunks, slice, own, state};
  const auto load = [&](const auto& stage, int chunk) { stage.template load<!kKeep>(p, chunks, p.v, slice, chunk); };
  for_each_chunk<kStages, 1>(own, 0, slice.chunks, load, step);
  if (!kKeep && p.final_state) {
    state.template store<float>(p.final_state, slice.state_offset(p), p.head_dim_v);
  }
}

}  // namespace

template <class T>
void launch_walk(const GatedDeltaParams& p, const Chunks& chunks, bool keep, const CudaLaunch& launch) {
  dispatch_walk<T>(p, [&](auto dim, auto stages) {
    constexpr int kColumns = slice_of<T, dim>();
    constexpr int kBytes = WalkShared<T, dim, kColumns>::bytes(stages);
    const auto kernel = keep ? walk_kernel<T, dim, stages, true> : walk_kernel<T, dim, stages, false>;
    allow_shared(reinterpret_cast<const void*>(kernel), kBytes);
    kernel<<<walk_grid(p, kColumns), kWalkThreads, kBytes, stream_of(launch)>>>(p, chunks);
    check_launch("walk_kernel");
  });
}

template void launch_walk<float>(const GatedDeltaParams&, const Chunks&, bool, const CudaLaunch&);
template void launch_walk<__half>(const GatedDeltaParams&, const Chunks&, bool, const CudaLaunch&);
template void launch_walk<__nv_bfloat16>(const GatedDeltaParams&, const Chunks&, bool, const CudaLaunch&);

}  // namespace packing_ops::scan
