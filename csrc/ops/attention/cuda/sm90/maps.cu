#include <stdexcept>
#include <string>

#include "core/launch.cuh"
#include "ops/attention/cuda/sm90/maps.h"

namespace packing_ops::attention::sm90 {

namespace {

// Asked for by name, so that nothing links to the driver's library.
auto encode_function() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    check_cuda(status, "cudaGetDriverEntryPoint");
    if (result != cudaDriverEntryPointSuccess) {
      throw std::runtime_error("varlen_attention: the CUDA driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return found;
}

struct Dimension {
  int64_t size;
  int64_t stride;  // in elements
  int64_t box;
};

// Of a tensor that has one token or head, any stride: any but 0 is good.
int64_t stride_of(int64_t size, int64_t stride, int64_t head_dim) {
  return size > 1 ? stride : (head_dim + 7) / 8 * 8;
}

// Token t of a document that starts at token s and has n is at coordinates kMapTokens - n + t, s + n and kMapTokens, by
// strides that add up to token s + t modulo 2^64. The first is outside of its dimension from t = n on.
CUtensorMap make_map(const AttentionTensor& tensor, DType dtype, int64_t head_dim, Dimension middle, Dimension outer) {
  constexpr int64_t kBytes = 2;
  const int64_t back = (int64_t{1} << 34) - tensor.token_stride * kBytes;  // 2^30 times that is 2^30 tokens back
  const auto bytes = [](int64_t stride) { return static_cast<cuuint64_t>(stride * kBytes); };
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(middle.size),
                              static_cast<cuuint64_t>(outer.size), kMapTokens, kMapTokens + 1};
  const cuuint64_t strides[] = {bytes(middle.stride), bytes(outer.stride), bytes(tensor.token_stride),
                                static_cast<cuuint64_t>(back)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(middle.box), static_cast<cuuint32_t>(outer.box), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  CUtensorMap map{};
  const CUresult result = encode_function()(
      &map, dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5,
      tensor.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("varlen_attention: cuTensorMapEncodeTiled failed with " + std::to_string(result));
  }
  return map;
}

// Rows of q, dout and out: heads of the group, then `tokens` tokens.
CUtensorMap map_of_rows(const Args& args, DType dtype, AttentionTensor t, int64_t head_dim, int tokens) {
  t.token_stride = stride_of(args.documents_q.total, t.token_stride, head_dim);
  t.head_stride = stride_of(args.num_heads, t.head_stride, head_dim);
  return make_map(t, dtype, head_dim, {args.num_heads, t.head_stride, args.group},
                  {kMapTokens, t.token_stride, tokens});
}

CUtensorMap map_of_keys(const Args& args, DType dtype, AttentionTensor t, int64_t head_dim, int keys) {
  t.token_stride = stride_of(args.documents_k.total, t.token_stride, head_dim);
  t.head_stride = stride_of(args.num_kv_heads, t.head_stride, head_dim);
  if (args.documents_k.total == 0) t.data = args.q.data;  // some memory, of which no box reads anything
  return make_map(t, dtype, head_dim, {kMapTokens, t.token_stride, keys}, {args.num_kv_heads, t.head_stride, 1});
}

}  // namespace

ForwardArgs forward_args(const Args& args, DType dtype, int step_keys) {
  ForwardArgs forward;
  forward.common = args;
  forward.tile_tokens = tile_tokens(args.group);
  if (args.documents_q.total == 0) return forward;  // nothing is copied
  forward.q = map_of_rows(args, dtype, args.q, args.head_dim, forward.tile_tokens);
  forward.k = map_of_keys(args, dtype, args.k, args.head_dim, step_keys);
  forward.v = map_of_keys(args, dtype, args.v, args.head_dim_v, step_keys);
  forward.out = map_of_rows(args, dtype, args.out, args.head_dim_v, forward.tile_tokens);
  return forward;
}

BackwardArgs backward_args(const Args& args, DType dtype, int copied_keys, int stored_keys) {
  BackwardArgs backward;
  backward.common = args;
  const int tokens = tile_tokens(args.group);
  backward.tile_tokens = Divisor(static_cast<uint32_t>(tokens));
  if (args.documents_k.total == 0) return backward;  // nothing is copied
  AttentionTensor q = args.q;
  AttentionTensor dout = args.dout;
  if (args.documents_q.total == 0) q.data = dout.data = args.k.data;
  backward.q = map_of_rows(args, dtype, q, args.head_dim, tokens);
  backward.dout = map_of_rows(args, dtype, dout, args.head_dim_v, tokens);
  if (args.documents_q.cu_seqlens != args.documents_k.cu_seqlens) {
    backward.q_token = map_of_rows(args, dtype, q, args.head_dim, 1);
    backward.dout_token = map_of_rows(args, dtype, dout, args.head_dim_v, 1);
  }
  backward.k = map_of_keys(args, dtype, args.k, args.head_dim, copied_keys);
  backward.v = map_of_keys(args, dtype, args.v, args.head_dim_v, copied_keys);
  backward.dk = map_of_keys(args, dtype, args.dk, args.head_dim, stored_keys);
  backward.dv = map_of_keys(args, dtype, args.dv, args.head_dim_v, stored_keys);
  return backward;
}

}  // namespace packing_ops::attention::sm90
