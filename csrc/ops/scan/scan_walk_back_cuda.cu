// The walk back. With dS the gradient of the state after a chunk:
//   dnew = scores^T dout + scales.to_end K dS, dcorrected = inverse^T dnew, dv = beta dcorrected,
//   dS = through dS + Q^T (scales.q dout) - K^T (scales.k dv).
// Without a correction dv = beta dnew + skip dout, and dS lacks its last term.
#include "ops/scan/scan_walk.cuh"

namespace packing_ops::scan {

namespace {

template <class T, int kDim, bool kCorrects>
struct StepBack {
  const ScanBackwardParams& p;
  const Chunks& chunks;
  const Slice& slice;
  State<kDim, kCorrects>& dstate;
  float* scratch;

  __device__ __forceinline__ void operator()(int chunk, const Stage<T, kDim, kCorrects>& stage) const {
    const RowScales& scales = *stage.scales;
    const int64_t at = slice.index(p, chunk) * p.head_dim_v + slice.column + warp_column();
    dstate.keep(static_cast<T*>(chunks.dstates) + at * kDim);
    Columns dnew = {};
    multiply_rows<T, Order::kTransposed, Terms::kAll>(dnew, dstate.at, stage.keys, scratch);
    map_columns(dnew, [&](float x, int i) { return scales.to_end[i] * x; });
    Columns dout;
    load_columns(stage.values, dout);
    multiply_rows<T, Order::kPlain, Terms::kFrom>(dnew, dout, stage.scores, scratch);
    map_columns(dout, [&](float x, int i) { return scales.q[i] * x; });
    dstate.scale(scales.through[0]);
    multiply_rows<T, Order::kPlain, Terms::kAll>(dstate.at, dout, stage.queries, scratch);
    if constexpr (kCorrects) {
      correct(chunk, stage, dnew);
    } else {
      map_columns(dnew, [&](float x, int i) { return scales.beta[i] * x; });
      if (p.skip) add_columns(dnew, stage.values, [&](int) { return static_cast<const float*>(p.skip)[slice.head]; });
      store(dnew, stage, chunk, p.dv);
    }
  }

  __device__ __forceinline__ void correct(int chunk, const Stage<T, kDim, kCorrects>& stage,
                                          const Columns& dnew) const {
    const RowScales& scales = *stage.scales;
    Columns dcorrected = {};
    multiply_rows<T, Order::kPlain, Terms::kFrom>(dcorrected, dnew, stage.inverse, scratch);
    store(dcorrected, stage, chunk, chunks.dcorrected);
    map_columns(dcorrected, [&](float x, int i) { return scales.beta[i] * x; });
    store(dcorrected, stage, chunk, p.dv);
    map_columns(dcorrected, [&](float x, int i) { return -scales.k[i] * x; });
    multiply_rows<T, Order::kPlain, Terms::kAll>(dstate.at, dcorrected, stage.keys, scratch);
  }

  __device__ __forceinline__ void store(const Columns& columns, const Stage<T, kDim, kCorrects>& stage, int chunk,
                                        void* to) const {
    T* rows = static_cast<T*>(to) + slice.offset(p, chunk, 0);
    store_columns(columns, stage.values, rows, p.num_v_heads * p.head_dim_v, slice.valid(chunk));
  }
};

template <class T, int kDim, int kStages, bool kCorrects>
__global__ void __launch_bounds__(walk_threads<T, kDim>(), 1) walk_back_kernel(ScanBackwardParams p, Chunks chunks) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kColumns = Stage<T, kDim, kCorrects>::kColumns;
  const Slice slice(p, kColumns);
  if (slice.is_padding(p)) return zero_padding<T, kColumns>(p, slice, p.dv);
  const WalkShared<T, kDim, kCorrects> own{shared};
  State<kDim, kCorrects> dstate;
  if (has_columns()) dstate.load(p, p.dfinal_state, slice.state_offset(p));
  const StepBack<T, kDim, kCorrects> step{p, chunks, slice, dstate, own.scratch()};
  const auto load = [&](const auto& stage, int chunk) { stage.template load<true>(p, chunks, p.dout, slice, chunk); };
  for_each_chunk<kStages, -1>(own, slice.chunks - 1, slice.chunks, load, step);
  if (p.dinitial_state && has_columns()) dstate.store(p, p.dinitial_state, slice.state_offset(p));
}

}  // namespace

template <class T>
void launch_walk_back(const ScanBackwardParams& p, const Chunks& chunks, const CudaLaunch& launch) {
  dispatch_walk<T>(p, [&](auto dim, auto stages, auto corrects) {
    using Sizes = Stage<T, dim, corrects>;
    constexpr int kBytes = WalkShared<T, dim, corrects>::bytes(stages);
    const auto kernel = walk_back_kernel<T, dim, stages, corrects>;
    allow_shared(reinterpret_cast<const void*>(kernel), kBytes);
    kernel<<<walk_grid(p, Sizes::kColumns), walk_threads<T, dim>(), kBytes, stream_of(launch)>>>(p, chunks);
    check_launch("walk_back_kernel");
  });
}

template void launch_walk_back<float>(const ScanBackwardParams&, const Chunks&, const CudaLaunch&);
template void launch_walk_back<__half>(const ScanBackwardParams&, const Chunks&, const CudaLaunch&);
template void launch_walk_back<__nv_bfloat16>(const ScanBackwardParams&, const Chunks&, const CudaLaunch&);

}  // namespace packing_ops::scan
