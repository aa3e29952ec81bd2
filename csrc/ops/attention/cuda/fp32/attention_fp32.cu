// A warp for each (token, head); a row is spread over the lanes, lane l holds columns l, l + 32, ...
#include "core/launch.cuh"
#include "ops/attention/cuda/fp32/attention_fp32.h"
#include "ops/attention/cuda/mask.cuh"
#include "ops/attention/cuda/pages.cuh"
#include "ops/attention/cuda/plan_check.cuh"
#include "ops/attention/cuda/softmax.cuh"

namespace packing_ops::attention::fp32 {

namespace {

constexpr int kThreads = 256;
// kWords: of a lane, for head_dims up to 32 kWords.
template <int kWords>
struct Row {
  float x[kWords];
};

__device__ const float* address(const AttentionTensor& t, int64_t token, int64_t head) {
  return static_cast<const float*>(t.data) + token * t.token_stride + head * t.head_stride;
}

template <int kWords>
__device__ Row<kWords> load(const AttentionTensor& t, int64_t token, int64_t head, int head_dim) {
  const float* from = address(t, token, head);
  Row<kWords> row;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const int column = static_cast<int>(threadIdx.x & 31) + 32 * i;
    row.x[i] = column < head_dim ? from[column] : 0.f;
  }
  return row;
}

template <int kWords>
__device__ void store(const AttentionTensor& t, int64_t token, int64_t head, int head_dim, const Row<kWords>& row,
                      float scale) {
  float* to = const_cast<float*>(address(t, token, head));
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const int column = static_cast<int>(threadIdx.x & 31) + 32 * i;
    if (column < head_dim) to[column] = row.x[i] * scale;
  }
}

template <int kWords>
__device__ float dot(const Row<kWords>& a, const Row<kWords>& b) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kWords; ++i) sum = fmaf(a.x[i], b.x[i], sum);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

// A sum of many terms, 32 at a time (pairwise summation of one level).
constexpr int kTerms = 32;
template <int kWords>
struct Sum {
  Row<kWords> total{};
  Row<kWords> partial{};
  int terms = 0;

  __device__ void add(const Row<kWords>& row, float factor) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) partial.x[i] = fmaf(row.x[i], factor, partial.x[i]);
    if (++terms == kTerms) close();
  }
  __device__ const Row<kWords>& close() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      total.x[i] += partial.x[i];
      partial.x[i] = 0.f;
    }
    terms = 0;
    return total;
  }
  __device__ void scale(float factor) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      total.x[i] *= factor;
      partial.x[i] *= factor;
    }
  }
};

// Of a token or key; `exists`: not padding.
struct DocumentPosition {
  DocumentWithEnds document;
  int32_t index;
  bool exists;
};

__device__ DocumentPosition position_of(const Args& args, const Documents& documents, int64_t end, int64_t token,
                                        bool is_key) {
  if (token >= end) return {{}, 0, false};
  const int64_t i = documents.document_of(token);
  const DocumentWithEnds d = document_with_ends(args.documents_q, args.documents_k, i, args.plan);
  return {d, static_cast<int32_t>(token - (is_key ? d.start_k : d.start_q)), true};
}

template <int kWords>
__global__ void __launch_bounds__(kThreads) forward_fp32_kernel(__grid_constant__ const Args args) {
  check_plan(args.plan, args.documents_q, args.documents_k, args.fault);
  check_visible_end(args.plan, args.visible_end, args.fault);
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / 32;
  const int64_t rows = args.documents_q.total * args.num_heads;
  const int64_t end = args.plan.data[PlanView::kEndQ];
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32; i < rows; i += warps) {
    const int64_t token = i / args.num_heads;
    const int64_t head = i % args.num_heads;
    const int64_t kv_head = head / args.group;
    const DocumentPosition position = position_of(args, args.documents_q, end, token, false);
    const Interval<int32_t> keys =
        position.exists ? position.document.visible_keys(position.index, position.index) : Interval<int32_t>{0, 0};
    float row_max = position.exists && args.sinks != nullptr ? args.sinks[head] : -INFINITY;
    float sum = row_max == -INFINITY ? 0.f : 1.f;
    Sum<kWords> out;
    float partial = 0.f;  // of sum
    if (!keys.empty()) {
      const auto q = load<kWords>(args.q, token, head, args.head_dim);
      for (int32_t key = keys.begin; key < keys.end; ++key) {
        const int64_t at = row_of_key(args, position.document, key);
        float slope;
        const float score = score_of(dot(q, load<kWords>(args.k, at, kv_head, args.head_dim)), args.scores, &slope);
        const float top = fmaxf(row_max, score);
        const float base = top == -INFINITY ? 0.f : top;
        const float p = expf(score - base);
        if (top > row_max) {
          const float factor = expf(row_max - base);
          sum *= factor;
          partial *= factor;
          out.scale(factor);
          row_max = top;
        }
        partial += p;
        if (out.terms + 1 == kTerms) {
          sum += partial;
          partial = 0.f;
        }
        out.add(load<kWords>(args.v, at, kv_head, args.head_dim_v), p);
      }
    }
    sum += partial;
    store(args.out, token, head, args.head_dim_v, out.close(), sum == 0.f ? 0.f : 1.f / sum);
    if ((threadIdx.x & 31) == 0) {
      args.lse[head * args.documents_q.total + token] = sum == 0.f ? -INFINITY : row_max + logf(sum);
    }
  }
}

// p and ds (by the dot product) of one query row and one key.
template <int kWords>
__device__ float2 gradients(const Args& args, int64_t token, int64_t head, const Row<kWords>& q,
                            const Row<kWords>& dout, const Row<kWords>& k, const Row<kWords>& v) {
  float slope;
  const float score = score_of(dot(q, k), args.scores, &slope);
  const float p = expf(score - args.lse[head * args.documents_q.total + token]);
  return {p, p * (dot(dout, v) - args.row_stats[token * args.num_heads + head].y) * slope};
}

template <int kWords>
__global__ void __launch_bounds__(kThreads) backward_dq_fp32_kernel(__grid_constant__ const Args args) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / 32;
  const int64_t rows = args.documents_q.total * args.num_heads;
  const int64_t end = args.plan.data[PlanView::kEndQ];
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32; i < rows; i += warps) {
    const int64_t token = i / args.num_heads;
    const int64_t head = i % args.num_heads;
    const int64_t kv_head = head / args.group;
    const DocumentPosition position = position_of(args, args.documents_q, end, token, false);
    const Interval<int32_t> keys =
        position.exists ? position.document.visible_keys(position.index, position.index) : Interval<int32_t>{0, 0};
    Sum<kWords> dq;
    if (!keys.empty()) {
      const auto q = load<kWords>(args.q, token, head, args.head_dim);
      const auto dout = load<kWords>(args.dout, token, head, args.head_dim_v);
      for (int32_t key = keys.begin; key < keys.end; ++key) {
        const int64_t at = row_without_pages(args, position.document, key);
        const auto k = load<kWords>(args.k, at, kv_head, args.head_dim);
        dq.add(k, gradients(args, token, head, q, dout, k, load<kWords>(args.v, at, kv_head, args.head_dim_v)).y);
      }
    }
    store(args.dq, token, head, args.head_dim, dq.close(), 1.f);
  }
}

template <int kWords>
__global__ void __launch_bounds__(kThreads) backward_dkv_fp32_kernel(__grid_constant__ const Args args) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / 32;
  const int64_t rows = args.documents_k.total * args.num_kv_heads;
  const int64_t end = args.plan.data[PlanView::kEndK];
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32; i < rows; i += warps) {
    const int64_t at = i / args.num_kv_heads;
    const int64_t kv_head = i % args.num_kv_heads;
    const DocumentPosition position = position_of(args, args.documents_k, end, at, true);
    const Interval<int32_t> tokens = position.exists
                                         ? position.document.tokens_attending_to(position.index, position.index)
                                         : Interval<int32_t>{0, 0};
    Sum<kWords> dk;
    Sum<kWords> dv;
    if (!tokens.empty()) {
      const int64_t row = row_without_pages(args, position.document, position.index);
      const auto k = load<kWords>(args.k, row, kv_head, args.head_dim);
      const auto v = load<kWords>(args.v, row, kv_head, args.head_dim_v);
      for (int32_t t = tokens.begin; t < tokens.end; ++t) {
        const int64_t token = position.document.start_q + t;
        for (int64_t head = kv_head * args.group; head < (kv_head + 1) * args.group; ++head) {
          const auto q = load<kWords>(args.q, token, head, args.head_dim);
          const auto dout = load<kWords>(args.dout, token, head, args.head_dim_v);
          const float2 g = gradients(args, token, head, q, dout, k, v);
          dk.add(q, g.y);
          dv.add(dout, g.x);
        }
      }
    }
    store(args.dk, at, kv_head, args.head_dim, dk.close(), 1.f);
    store(args.dv, at, kv_head, args.head_dim_v, dv.close(), 1.f);
  }
}

}  // namespace

namespace {

template <int kWords>
void run_forward_of(const Args& args, cudaStream_t stream) {
  const int64_t rows = args.documents_q.total * args.num_heads;
  forward_fp32_kernel<kWords><<<grid_for(rows * 32, kThreads), kThreads, 0, stream>>>(args);
  check_launch("forward_fp32_kernel");
}

template <int kWords>
void run_backward_of(const Args& args, cudaStream_t stream) {
  const int64_t rows = args.documents_q.total * args.num_heads;
  backward_dq_fp32_kernel<kWords><<<grid_for(rows * 32, kThreads), kThreads, 0, stream>>>(args);
  check_launch("backward_dq_fp32_kernel");
  const int64_t keys = args.documents_k.total * args.num_kv_heads;
  backward_dkv_fp32_kernel<kWords><<<grid_for(keys * 32, kThreads), kThreads, 0, stream>>>(args);
  check_launch("backward_dkv_fp32_kernel");
}

bool is_wide(const Args& args) {
  return args.head_dim > 256 || args.head_dim_v > 256;
}

}  // namespace

void run_forward(const Args& args, cudaStream_t stream) {
  is_wide(args) ? run_forward_of<16>(args, stream) : run_forward_of<8>(args, stream);
}

void run_backward(const Args& args, cudaStream_t stream) {
  is_wide(args) ? run_backward_of<16>(args, stream) : run_backward_of<8>(args, stream);
}

}  // namespace packing_ops::attention::fp32
