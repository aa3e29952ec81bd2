// Forward of head_dim up to 128 in the half types on compute capability 9.0: documents of more than one unit's keys.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "ops/attention/sm80/args.h"

namespace packing_ops::sm90 {

// A unit is two tiles of packed rows, one for each warpgroup that computes. A tile starts at a whole token, so that one
// box of q holds it.
constexpr int kTileRows = 64;
constexpr int kKeys = 128;
constexpr int kMostGroup = 64;
constexpr int tile_tokens(int group) {
  return kTileRows / group;
}
constexpr int forward_rows(int group) {
  return 2 * tile_tokens(group) * group;
}

// By geometry and device alone, so that a document's bits do not depend on what it is packed with. The plan of all
// calls of that geometry has its units, also of those that sm80/ and fp32/ serve.
bool has_forward(int64_t head_dim, int64_t group, int device);

// A map's dimensions: the columns, heads and tokens (of q and out; of k and v tokens and heads), the tokens again, and
// one that takes kMapTokens tokens off, for the first of the tokens' dimensions ends at kMapTokens.
constexpr int32_t kMapTokens = 1 << 30;

struct ForwardArgs {
  CUtensorMap q, k, v, out;
  sm80::Args common;
  int32_t tile_tokens = 0;
};

// Scores that pass through softcap, and a softmax_scale that is not positive, are left to sm80/.
template <class T, int kDim>
void run_forward(const sm80::Args& args, DType dtype, cudaStream_t stream);

}  // namespace packing_ops::sm90
