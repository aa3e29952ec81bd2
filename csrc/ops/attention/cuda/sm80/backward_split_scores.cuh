// p and ds of a step of wide rows, whose tiles are too few blocks of 16 rows and 16 keys for all warps: a warp of the
// first half computes s and p of one block, a warp of the second half its dp, which is passed through the shared memory
// of p and ds.
#pragma once

#include "ops/attention/cuda/sm80/backward_unit.cuh"

namespace packing_ops::attention::sm80 {

// Called by all warps, as BackwardUnit::scores. first_key: of the key tile; blocks: of 16 keys, visible to some row.
template <class Shape, class Unit>
__device__ __forceinline__ void split_scores(const Unit& u, uint8_t* shared, const Args& args,
                                             const DocumentWithEnds& d, const PackedRows& rows, int slot,
                                             int32_t first_key, Interval<int32_t> blocks) {
  constexpr int kKeyBlocks = Shape::kKeys / 16;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int block = warp % (Shape::kWarps / 2);
  const bool has_dp = warp >= Shape::kWarps / 2;
  const int first_row = block / kKeyBlocks * 16;
  const int tile_key = block % kKeyBlocks * 16;
  const bool active = first_row < rows.valid && tile_key >= 16 * blocks.begin && tile_key < 16 * blocks.end;
  const auto* stats = reinterpret_cast<const float2*>(shared + (u.stats(slot) - u.base));
  auto* exchanged =
      reinterpret_cast<float*>(shared + (u.tile_p(slot).base - u.base)) + block * 256 + (threadIdx.x & 31);
  typename Unit::Scores p;
  typename Unit::Scores slope;
  typename Unit::Scores ds;
  if (active && has_dp) {
    u.template product<1>(ds, u.tile_do(slot), first_row, u.tile_v(), tile_key);
#pragma unroll
    for (int i = 0; i < 8; ++i) exchanged[32 * i] = ds[0][i / 4][i % 4];
  } else if (active) {
    u.template product<1>(p, u.tile_q(slot), first_row, u.tile_k(), tile_key);
    const int32_t first = first_key + tile_key;
    const bool masked = !d.all_visible(d.end_of(rows.begin_token()), rows.last_token(), first, first + 15);
    Unit::template weights<1>(p, slope, stats, args, d, rows, {first_row, first_key, tile_key, masked});
  }
  __syncthreads();
  if (active && !has_dp) {
#pragma unroll
    for (int i = 0; i < 8; ++i) ds[0][i / 4][i % 4] = exchanged[32 * i];
  }
  __syncthreads();  // p and ds take the place of dp
  if (!active || has_dp) return;
  Unit::template store<1>(u.tile_p(slot), p, first_row, tile_key);
  Unit::template score_gradients<1>(ds, p, slope,
                                    [&](int m, int half) { return stats[Unit::lane_row(first_row, m, half)].y; });
  Unit::template store<1>(u.tile_ds(slot), ds, first_row, tile_key);
}

}  // namespace packing_ops::attention::sm80
