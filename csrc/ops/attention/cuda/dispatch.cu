// From params to the instance that serves them: fp32/ for float32; for the half types sm90/ on compute capability 9.0
// where it serves the geometry (tiles.h), else sm80/, on every GPU from compute capability 8.0 on.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <string_view>
#include <type_traits>

#include "core/error.h"
#include "core/launch.cuh"
#include "ops/attention/attention_kernels.h"
#include "ops/attention/cuda/fp32/attention_fp32.h"
#include "ops/attention/cuda/plan.h"
#include "ops/attention/cuda/row_stats.h"
#include "ops/attention/cuda/sm80/backward.h"
#include "ops/attention/cuda/sm80/forward.h"
#include "ops/attention/cuda/sm90/backward.h"
#include "ops/attention/cuda/sm90/forward.h"
#include "ops/attention/cuda/softmax.cuh"
#include "ops/attention/cuda/tiers.h"

namespace packing_ops {

namespace {

using namespace attention;

Args forward_args(const VarlenAttentionParams& p, const FaultFlag& fault = {}) {
  Args a;
  a.fault = fault;
  a.q = p.q;
  a.k = p.k;
  a.v = p.v;
  a.out = p.out;
  a.documents_q = p.documents_q;
  a.documents_k = p.documents_k;
  a.lse = static_cast<float*>(p.lse);
  a.sinks = static_cast<const float*>(p.sinks);
  a.plan = plan_view(plan_params(p));
  a.num_heads = static_cast<int32_t>(p.num_q_heads);
  a.num_kv_heads = static_cast<int32_t>(p.num_kv_heads);
  a.group = static_cast<int32_t>(p.num_q_heads / p.num_kv_heads);
  a.group_inverse = static_cast<uint32_t>(((1 << 22) + a.group - 1) / a.group);
  a.kv_heads = Divisor(static_cast<uint32_t>(a.num_kv_heads));
  a.group_size = Divisor(static_cast<uint32_t>(a.group));
  a.page_size = Divisor(static_cast<uint32_t>(p.pages.page_size));
  a.head_dim = static_cast<int32_t>(p.head_dim);
  a.head_dim_v = static_cast<int32_t>(p.head_dim_v);
  const PaddedDims dims = padded_dims(a.head_dim, a.head_dim_v);
  const bool unpadded = dims.qk == a.head_dim && dims.v == a.head_dim_v;
  a.token_aligned_group = unpadded && 16 % a.group == 0 ? a.group : 0;
  a.scores = ScoreArgs(p);
  a.visible_end = p.visible_end;
  if (a.plan.tiles.kernels == Kernels::kSm90) a.counters = static_cast<int32_t*>(p.scratch);
  return a;
}

// Scratch of the backward: parts one after the other, each aligned to 16 bytes.
struct BackwardScratch {
  int64_t row_stats;  // bytes
  int64_t counters;
  int64_t partial_dq;

  BackwardScratch(const Args& a, bool fp32) {
    const int64_t rows = a.documents_q.total * a.num_heads;
    row_stats = (rows * static_cast<int64_t>(sizeof(float2)) + 15) / 16 * 16;
    counters = fp32 ? 0 : (4 * (Args::kWorkCounters + a.plan.dq_ring_tiles) + 15) / 16 * 16;
    const bool wgmma = a.plan.tiles.kernels == Kernels::kSm90;
    const int dim = wgmma_backward_dim(std::max(a.head_dim, a.head_dim_v));
    const int64_t tile = wgmma ? kTileRows * dim  // also where a tile has rows that are not used
                               : a.plan.tiles.backward_rows * padded_dims(a.head_dim, a.head_dim_v).qk;
    const int64_t tile_bytes = tile * static_cast<int64_t>(sizeof(float));
    partial_dq = fp32 ? 0 : a.plan.dq_ring_tiles * tile_bytes;
  }
};

Args backward_args(const VarlenAttentionBackwardParams& p, const FaultFlag& fault) {
  Args a = forward_args(p, fault);
  a.dout = p.dout;
  a.dq = p.dq;
  a.dk = p.dk;
  a.dv = p.dv;
  a.dlse = static_cast<const float*>(p.dlse);
  a.dsinks = static_cast<float*>(p.dsinks);
  const BackwardScratch scratch(a, p.dtype == DType::kFloat32);
  auto* bytes = static_cast<uint8_t*>(p.scratch);
  a.row_stats = reinterpret_cast<float2*>(bytes);
  a.counters = reinterpret_cast<int32_t*>(bytes + scratch.row_stats);
  a.num_counters = scratch.counters / 4;
  a.partial_dq = reinterpret_cast<float*>(bytes + scratch.row_stats + scratch.counters);
  a.all_row_stats =
      p.dtype == DType::kFloat32 || a.sinks != nullptr || a.documents_q.cu_seqlens != a.documents_k.cu_seqlens;
  return a;
}

template <int kDim, int kDimV = kDim>
struct Dims {
  static constexpr int qk = kDim;
  static constexpr int v = kDimV;
};

// The head_dims that were asked for, where not all were: " 64 128 ".
#if defined(PACKING_OPS_HEAD_DIMS)
constexpr std::string_view kHeadDims = " " PACKING_OPS_HEAD_DIMS " ";
#else
constexpr std::string_view kHeadDims = " 64 96 128 192 256 512 ";
#endif
constexpr bool is_built(int padded) {
  const std::string_view name = padded == 64    ? " 64 "
                                : padded == 96  ? " 96 "
                                : padded == 128 ? " 128 "
                                : padded == 192 ? " 192 "
                                : padded == 256 ? " 256 "
                                                : " 512 ";
  return kHeadDims.find(name) != std::string_view::npos;
}

// f(tier of this device), as a constant.
template <int kDim, int kDimV, class F>
void with_tier(int device, F&& f) {
  const int64_t bytes = max_shared_memory(device);
  const auto if_it_is = [&](auto constant) {
    constexpr SmemTier kTier = decltype(constant)::value;
    if constexpr (is_tier_built(kDim, kDimV, kTier)) {
      if (backward_tier(kDim, kDimV, bytes) != kTier) return false;
      f(constant);
      return true;
    }
    return false;
  };
  if (if_it_is(std::integral_constant<SmemTier, SmemTier::k227KB>{})) return;
  if (if_it_is(std::integral_constant<SmemTier, SmemTier::k163KB>{})) return;
  if (if_it_is(std::integral_constant<SmemTier, SmemTier::k99KB>{})) return;
  fail("PACKING_OPS_SHARED_MEMORY: expected a size of the GPUs that this library was built for (", kSharedMemoryKb,
       "KB), since it was built without PACKING_OPS_EVERY_INSTANCE=1, got ", bytes, " bytes");
}

// f(element type, padded head_dims, whether scores are transformed), each as a constant.
template <class F>
void dispatch(const VarlenAttentionParams& p, F&& f) {
  const auto with_all = [&](auto element, auto dim) {
    constexpr int kDim = decltype(dim)::qk;
    if constexpr (kDim == 512 && is_built(kDim)) {
      f(element, dim, std::true_type{});  // one instance for all scores
    } else if constexpr (is_built(kDim)) {
      transforms_scores(p) ? f(element, dim, std::true_type{}) : f(element, dim, std::false_type{});
    } else {
      fail("q: expected a head_dim of this library, which was built with PACKING_OPS_HEAD_DIMS =", kHeadDims,
           "(each serves those from the one before it on), got ", p.head_dim);
    }
  };
  const auto with_dim = [&](auto element) {
    const PaddedDims padded = padded_dims(p.head_dim, p.head_dim_v);
    if (padded.qk != padded.v) return with_all(element, Dims<192, 128>{});
    switch (padded.qk) {
      case 64:
        return with_all(element, Dims<64>{});
      case 96:
        return with_all(element, Dims<96>{});
      case 128:
        return with_all(element, Dims<128>{});
      case 192:
        return with_all(element, Dims<192>{});
      case 256:
        return with_all(element, Dims<256>{});
      default:
        return with_all(element, Dims<512>{});
    }
  };
  if (p.dtype == DType::kBFloat16) return with_dim(__nv_bfloat16{});
  if (p.dtype == DType::kFloat16) return with_dim(__half{});
  fail("q: expected bfloat16, float16 or float32 on CUDA, got ", dtype_name(p.dtype));
}

// has_short: whether short rows or documents run on kernels of sm80/ on a GPU that has those of sm90/ for the others.
template <class F>
const char* kernels_of(const VarlenAttentionParams& p, F&& has_short) {
  if (p.dtype == DType::kFloat32) return "fp32";
  const int64_t group = p.num_q_heads / p.num_kv_heads;
  const AttentionTiles tiles = attention_tiles(group, p.head_dim, p.head_dim_v, 0, p.device);
  if (tiles.kernels == Kernels::kSm80) return "sm80";
  return has_short(tiles) ? "sm90 and sm80" : "sm90";
}

}  // namespace

const char* attention_forward_kernels_cuda(const VarlenAttentionParams& p) {
  return kernels_of(p, [](const AttentionTiles& tiles) { return tiles.resident_max_keys >= 0; });
}

const char* attention_backward_kernels_cuda(const VarlenAttentionParams& p) {
  return kernels_of(p, [](const AttentionTiles& tiles) { return tiles.small_keys > 0 || tiles.single_keys > 0; });
}

int64_t attention_scratch_cuda(const VarlenAttentionParams& p) {
  const Kernels kernels = kernels_for(p.num_q_heads / p.num_kv_heads, p.head_dim, p.head_dim_v, p.device);
  return kernels == Kernels::kSm90 ? sizeof(int32_t) : 0;
}

int64_t attention_backward_scratch_cuda(const VarlenAttentionBackwardParams& p) {
  const BackwardScratch scratch(forward_args(p), p.dtype == DType::kFloat32);
  return scratch.row_stats + scratch.counters + scratch.partial_dq;
}

void launch_varlen_attention_cuda(const VarlenAttentionParams& p, const CudaLaunch& launch) {
  const Args args = forward_args(p, launch.fault);
  const cudaStream_t stream = stream_of(launch);
  if (p.dtype == DType::kFloat32) return fp32::run_forward(args, stream);
  dispatch(p, [&](auto element, auto dims, auto transform) {
    using T = decltype(element);
    constexpr int kDim = decltype(dims)::qk;
    constexpr int kDimV = decltype(dims)::v;
    constexpr bool kTransform = decltype(transform)::value;
    if constexpr (is_wide(kDim)) {
      with_tier<kDim, kDimV>(p.device, [&](auto tier) {
        constexpr bool kSmall = decltype(tier)::value == SmemTier::k99KB;
        sm80::run_forward_wide<T, kSmall ? SmemTier::k99KB : SmemTier::k163KB>(args, stream);
      });
    } else {
      const AttentionTiles& tiles = args.plan.tiles;
      const bool resident = tiles.resident_max_keys >= 0;
      if constexpr (is_resident_built(kDim)) {
        if (resident) sm80::run_forward_resident<T, kDim, kTransform>(args, stream);
      }
      if (tiles.kernels == Kernels::kSm90) {
        sm90::run_forward<T, kDim, kDimV, kTransform>(args, p.dtype, stream, resident);
      } else {
        sm80::run_forward<T, kDim, false, kTransform, kDimV>(args, stream, resident);
      }
      if constexpr (has_short_forward(kDim)) {
        if (tiles.short_max_keys >= 0) sm80::run_forward<T, kDim, true, kTransform>(args, stream, true);
      }
    }
  });
}

void launch_varlen_attention_backward_cuda(const VarlenAttentionBackwardParams& p, const CudaLaunch& launch) {
  const Args args = backward_args(p, launch.fault);
  const cudaStream_t stream = stream_of(launch);
  if (p.dtype == DType::kFloat32) {
    run_row_stats<float>(args, stream);
    fp32::run_backward(args, stream);
  } else {
    dispatch(p, [&](auto element, auto dims, auto transform) {
      using T = decltype(element);
      constexpr int kDim = decltype(dims)::qk;
      constexpr int kDimV = decltype(dims)::v;
      constexpr bool kTransform = decltype(transform)::value;
      run_row_stats<T>(args, stream);
      const Kernels kernels = args.plan.tiles.kernels;
      if constexpr (!is_wide(kDim)) {
        if (kernels == Kernels::kSm90)
          sm90::run_backward<T, wgmma_backward_dim(kDim), wgmma_backward_dim(kDimV), kTransform>(args, p.dtype, stream);
      }
      with_tier<kDim, kDimV>(p.device, [&](auto constant) {
        constexpr SmemTier kTier = decltype(constant)::value;
        constexpr SmemTier kSingleTier = backward_single_tier(kDim, kTier);
        constexpr int kSmallKeys = backward_small_keys(kDim, kTier);
        if (kernels == Kernels::kSm80) sm80::run_backward<T, kDim, kTransform, kTier, kDimV>(args, stream);
        if constexpr (kSmallKeys >= 0) {
          constexpr int kKeys = backward_keys(kDim, kTier);
          if (args.plan.tiles.single_keys > 0) {
            sm80::run_backward_single<T, kDim, kKeys, kTransform, kSingleTier, kDimV>(args, stream);
          }
        }
        if constexpr (kSmallKeys > 0) {
          sm80::run_backward_single<T, kDim, kSmallKeys, kTransform, kSingleTier>(args, stream);
        }
      });
    });
  }
  if (args.dsinks != nullptr) run_sinks_backward(args, stream);
}

}  // namespace packing_ops
