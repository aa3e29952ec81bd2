// The walk over a document's chunks. With S the state before a chunk (scales of RowScales, times rows):
//   corrected = inverse (beta (v - scales.k K S)), out = scales.q Q S + scores corrected,
//   S = through S + K^T (scales.to_end corrected).
// Without a correction corrected = beta v, and out has skip v more.
#include "ops/scan/scan_walk.cuh"

namespace packing_ops::scan {

namespace {

// One chunk; with kKeep what the backward needs, else out.
template <class T, int kDim, bool kKeep, bool kCorrects>
struct Step {
  const ScanParams& p;
  const Chunks& chunks;
  const Slice& slice;
  State<kDim, kCorrects>& state;
  float* scratch;

  __device__ __forceinline__ void operator()(int chunk, const Stage<T, kDim, kCorrects>& stage) const {
    const RowScales& scales = *stage.scales;
    if constexpr (kKeep) {
      const int64_t at = slice.index(p, chunk) * p.head_dim_v + slice.column + warp_column();
      state.keep(static_cast<T*>(chunks.states) + at * kDim);
    }
    Columns corrected = {};
    correct(stage, corrected);
    if constexpr (!kKeep) {
      Columns out = {};
      multiply_rows<T, Order::kTransposed, Terms::kAll>(out, state.at, stage.queries, scratch);
      map_columns(out, [&](float x, int i) { return scales.q[i] * x; });
      multiply_rows<T, Order::kTransposed, Terms::kUpTo>(out, corrected, stage.scores, scratch);
      if (!kCorrects && p.skip) {
        add_columns(out, stage.values, [&](int) { return static_cast<const float*>(p.skip)[slice.head]; });
      }
      store(out, stage, chunk, p.out);
    } else if constexpr (kCorrects) {
      store(corrected, stage, chunk, chunks.corrected);
    }
    map_columns(corrected, [&](float x, int i) { return scales.to_end[i] * x; });
    state.scale(scales.through[0]);
    multiply_rows<T, Order::kPlain, Terms::kAll>(state.at, corrected, stage.keys, scratch);
  }

  // `to` is 0.
  __device__ __forceinline__ void correct(const Stage<T, kDim, kCorrects>& stage, Columns& to) const {
    const RowScales& scales = *stage.scales;
    if constexpr (kCorrects) {
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
      multiply_rows<T, Order::kTransposed, Terms::kUpTo>(to, values, stage.inverse, scratch);
    } else {
      add_columns(to, stage.values, [&](int i) { return scales.beta[i]; });
    }
  }

  __device__ __forceinline__ void store(const Columns& columns, const Stage<T, kDim, kCorrects>& stage, int chunk,
                                        void* to) const {
    T* rows = static_cast<T*>(to) + slice.offset(p, chunk, 0);
    store_columns(columns, stage.values, rows, p.num_v_heads * p.head_dim_v, slice.valid(chunk));
  }
};

template <class T, int kDim, int kStages, bool kKeep, bool kCorrects>
__global__ void __launch_bounds__(walk_threads<T, kDim>(), 1) walk_kernel(ScanParams p, Chunks chunks) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kColumns = Stage<T, kDim, kCorrects>::kColumns;
  const Slice slice(p, kColumns);
  if (slice.is_padding(p)) {
    if constexpr (!kKeep) zero_padding<T, kColumns>(p, slice, p.out);
    return;
  }
  const WalkShared<T, kDim, kCorrects> own{shared};
  State<kDim, kCorrects> state;
  if (has_columns()) state.load(p, p.initial_state, slice.state_offset(p));
  const Step<T, kDim, kKeep, kCorrects> step{p, chunks, slice, state, own.scratch()};
  const auto load = [&](const auto& stage, int chunk) { stage.template load<!kKeep>(p, chunks, p.v, slice, chunk); };
  for_each_chunk<kStages, 1>(own, 0, slice.chunks, load, step);
  if (!kKeep && p.final_state && has_columns()) state.store(p, p.final_state, slice.state_offset(p));
}

}  // namespace

template <class T>
void launch_walk(const ScanParams& p, const Chunks& chunks, bool keep, const CudaLaunch& launch) {
  dispatch_walk<T>(p, [&](auto dim, auto stages, auto corrects) {
    using Sizes = Stage<T, dim, corrects>;
    constexpr int kBytes = WalkShared<T, dim, corrects>::bytes(stages);
    const auto kernel =
        keep ? walk_kernel<T, dim, stages, true, corrects> : walk_kernel<T, dim, stages, false, corrects>;
    allow_shared(reinterpret_cast<const void*>(kernel), kBytes);
    kernel<<<walk_grid(p, Sizes::kColumns), walk_threads<T, dim>(), kBytes, stream_of(launch)>>>(p, chunks);
    check_launch("walk_kernel");
  });
}

template void launch_walk<float>(const ScanParams&, const Chunks&, bool, const CudaLaunch&);
template void launch_walk<__half>(const ScanParams&, const Chunks&, bool, const CudaLaunch&);
template void launch_walk<__nv_bfloat16>(const ScanParams&, const Chunks&, bool, const CudaLaunch&);

}  // namespace packing_ops::scan
