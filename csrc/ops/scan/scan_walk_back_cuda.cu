// The walk back. With dS the gradient of the state after a chunk:
//   dnew = scores^T dout + scales.to_end K dS, dcorrected = inverse^T dnew, dv = beta dcorrected,
//   dS = through dS + Q^T (scales.q dout) - K^T (scales.k dv).
#include "ops/scan/scan_walk.cuh"

namespace packing_ops::scan {

namespace {

template <class T, int kDim>
struct StepBack {
  static constexpr int kColumns = slice_of<T, kDim>();
  using Stages = Stage<T, kDim, kColumns>;
  const GatedDeltaBackwardParams& p;
  const Chunks& chunks;
  const Slice& slice;
  const WalkShared<T, kDim, kColumns>& shared;
  State<kDim, kColumns>& dstate;

  __device__ __forceinline__ void operator()(int chunk, const Stages& stage) const {
    const WarpPart<kColumns> part;
    const int valid = slice.valid(chunk);
    const int64_t at = slice.index(p, chunk) * kDim * p.head_dim_v + slice.column;
    dstate.template store<T>(chunks.dstates, at, p.head_dim_v);
    float d[part.kTiles][4] = {};
    multiply(d, stage.keys, part.row, shared.state, part.column, 0, kDim);
    for_each_pair(d, part.row, part.column, [&](int i, int j, float& x, float& y) {
      const Vec<T, 2> dout = stage.values.pair(i, j);
      const float scale = stage.scales->q[i];
      shared.second.set_pair(i, j, scale * dout.get(0), scale * dout.get(1));
      x *= stage.scales->to_end[i];
      y *= stage.scales->to_end[i];
    });
    multiply<Order::kTransposed, Order::kPlain>(d, stage.scores, part.row, stage.values, part.column, part.row, kChunk);
    for_each_pair(d, part.row, part.column, [&](int i, int j, float x, float y) { shared.first.set_pair(i, j, x, y); });
    __syncthreads();
    float dcorrected[part.kTiles][4] = {};
    multiply<Order::kTransposed, Order::kPlain>(dcorrected, stage.inverse, part.row, shared.first, part.column,
                                                part.row, kChunk);
    for_each_pair(dcorrected, part.row, part.column, [&](int i, int j, float x, float y) {
      const float beta = stage.scales->beta[i];
      const float scale = -beta * stage.scales->k[i];
      shared.third.set_pair(i, j, scale * x, scale * y);
      if (i >= valid) return;
      const int64_t row = slice.offset(p, chunk, i) + j;
      store_pair(static_cast<T*>(chunks.dcorrected) + row, x, y);
      store_pair(static_cast<T*>(p.dv) + row, beta * x, beta * y);
    });
    __syncthreads();
    dstate.scale(stage.scales->through[0]);
    dstate.add_product(stage.queries, shared.second);
    dstate.add_product(stage.keys, shared.third);
    dstate.store(shared.state);
  }
};

template <class T, int kDim, int kStages>
__global__ void __launch_bounds__(kWalkThreads, 1) walk_back_kernel(GatedDeltaBackwardParams p, Chunks chunks) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kColumns = slice_of<T, kDim>();
  const Slice slice(p, kColumns);
  if (slice.is_padding(p)) return zero_padding<T, kColumns>(p, slice, p.dv);
  const WalkShared<T, kDim, kColumns> own(shared);
  State<kDim, kColumns> dstate;
  dstate.load(p.dfinal_state, slice.state_offset(p), p.head_dim_v);
  dstate.store(own.state);
  const StepBack<T, kDim> step{p, chunks, slice, own, dstate};
  const auto load = [&](const auto& stage, int chunk) { stage.template load<true>(p, chunks, p.dout, slice, chunk); };
  for_each_chunk<kStages, -1>(own, slice.chunks - 1, slice.chunks, load, step);
  if (p.dinitial_state) dstate.template store<float>(p.dinitial_state, slice.state_offset(p), p.head_dim_v);
}

}  // namespace

template <class T>
void launch_walk_back(const GatedDeltaBackwardParams& p, const Chunks& chunks, const CudaLaunch& launch) {
  dispatch_walk<T>(p, [&](auto dim, auto stages) {
    constexpr int kColumns = slice_of<T, dim>();
    constexpr int kBytes = WalkShared<T, dim, kColumns>::bytes(stages);
    const auto kernel = walk_back_kernel<T, dim, stages>;
    allow_shared(reinterpret_cast<const void*>(kernel), kBytes);
    kernel<<<walk_grid(p, kColumns), kWalkThreads, kBytes, stream_of(launch)>>>(p, chunks);
    check_launch("walk_back_kernel");
  });
}

template void launch_walk_back<float>(const GatedDeltaBackwardParams&, const Chunks&, const CudaLaunch&);
template void launch_walk_back<__half>(const GatedDeltaBackwardParams&, const Chunks&, const CudaLaunch&);
template void launch_walk_back<__nv_bfloat16>(const GatedDeltaBackwardParams&, const Chunks&, const CudaLaunch&);

}  // namespace packing_ops::scan
