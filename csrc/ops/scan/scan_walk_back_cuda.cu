// The walk back. With dS the gradient of the state after a chunk:
//   dnew = scores^T dout + scales.to_end K dS, dcorrected = inverse^T dnew, dv = beta dcorrected,
//   dS = through dS + Q^T (scales.q dout) - K^T (scales.k dv).
#include "ops/scan/scan_walk.cuh"

namespace packing_ops::scan {

namespace {

template <class T, int kDim>
struct StepBack {
  const GatedDeltaBackwardParams& p;
  const Chunks& chunks;
  const Slice& slice;
  State<kDim>& dstate;
  float* scratch;

  __device__ __forceinline__ void operator()(int chunk, const Stage<T, kDim>& stage) const {
    const RowScales& scales = *stage.scales;
    const int valid = slice.valid(chunk);
    const int64_t row = p.num_v_heads * p.head_dim_v;
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
    Columns dcorrected = {};
    multiply_rows<T, Order::kPlain, Terms::kFrom>(dcorrected, dnew, stage.inverse, scratch);
    const int64_t offset = slice.offset(p, chunk, 0);
    store_columns(dcorrected, stage.values, static_cast<T*>(chunks.dcorrected) + offset, row, valid);
    map_columns(dcorrected, [&](float x, int i) { return scales.beta[i] * x; });
    store_columns(dcorrected, stage.values, static_cast<T*>(p.dv) + offset, row, valid);
    map_columns(dcorrected, [&](float x, int i) { return -scales.k[i] * x; });
    multiply_rows<T, Order::kPlain, Terms::kAll>(dstate.at, dcorrected, stage.keys, scratch);
  }
};

template <class T, int kDim, int kStages>
__global__ void __launch_bounds__(walk_warps<T, kDim>() * 32, 1)
    walk_back_kernel(GatedDeltaBackwardParams p, Chunks chunks) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kColumns = Stage<T, kDim>::kColumns;
  const Slice slice(p, kColumns);
  if (slice.is_padding(p)) return zero_padding<T, kColumns>(p, slice, p.dv);
  const WalkShared<T, kDim> own{shared};
  State<kDim> dstate;
  dstate.load(p.dfinal_state, slice.state_offset(p) + warp_column(), p.head_dim_v);
  const StepBack<T, kDim> step{p, chunks, slice, dstate, own.scratch()};
  const auto load = [&](const auto& stage, int chunk) { stage.template load<true>(p, chunks, p.dout, slice, chunk); };
  for_each_chunk<kStages, -1>(own, slice.chunks - 1, slice.chunks, load, step);
  if (p.dinitial_state) dstate.store(p.dinitial_state, slice.state_offset(p) + warp_column(), p.head_dim_v);
}

}  // namespace

template <class T>
void launch_walk_back(const GatedDeltaBackwardParams& p, const Chunks& chunks, const CudaLaunch& launch) {
  dispatch_walk<T>(p, [&](auto dim, auto stages) {
    using Sizes = Stage<T, dim>;
    constexpr int kBytes = WalkShared<T, dim>::bytes(stages);
    const auto kernel = walk_back_kernel<T, dim, stages>;
    allow_shared(reinterpret_cast<const void*>(kernel), kBytes);
    kernel<<<walk_grid(p, Sizes::kColumns), Sizes::kThreads, kBytes, stream_of(launch)>>>(p, chunks);
    check_launch("walk_back_kernel");
  });
}

template void launch_walk_back<float>(const GatedDeltaBackwardParams&, const Chunks&, const CudaLaunch&);
template void launch_walk_back<__half>(const GatedDeltaBackwardParams&, const Chunks&, const CudaLaunch&);
template void launch_walk_back<__nv_bfloat16>(const GatedDeltaBackwardParams&, const Chunks&, const CudaLaunch&);

}  // namespace packing_ops::scan
