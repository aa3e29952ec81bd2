// mamba2_gate and its gradient: a block for each token, a vector of one head for each thread.
#include "core/launch.cuh"
#include "core/vec.cuh"
#include "ops/scan/scan.h"
#include "ops/scan/scan_gates.h"

namespace packing_ops {

namespace {

constexpr int kThreads = 256;

template <class T, int kVec>
__device__ __forceinline__ Vec<T, kVec> load(const HeadRows& rows, int64_t token, int head, int column) {
  const T* from = static_cast<const T*>(rows.data) + token * rows.token + head * rows.head + column;
  return *reinterpret_cast<const Vec<T, kVec>*>(from);
}

// call(head, column, its place in a contiguous tensor) for this thread's vectors of the block's token.
template <int kVec, class Call>
__device__ __forceinline__ void for_each_vector(const GateParams& p, const Call& call) {
  const int dim = static_cast<int>(p.head_dim), row = static_cast<int>(p.num_heads) * dim;
  for (int i = static_cast<int>(threadIdx.x) * kVec; i < row; i += kThreads * kVec) {
    call(i / dim, i % dim, static_cast<int64_t>(blockIdx.x) * row + i);
  }
}

template <class T, int kVec>
__global__ void __launch_bounds__(kThreads) gate_kernel(GateParams p) {
  const int64_t token = blockIdx.x;
  const bool inside = token < p.documents.end();
  for_each_vector<kVec>(p, [&](int head, int column, int64_t at) {
    float out[kVec] = {};
    if (inside) {
      const auto x = load<T, kVec>(p.x, token, head, column), z = load<T, kVec>(p.z, token, head, column);
#pragma unroll
      for (int i = 0; i < kVec; ++i) out[i] = x.get(i) * OutputGate<float>(z.get(i)).silu;
    }
    store_row<T, kVec>(out, static_cast<T*>(p.out) + at);
  });
}

template <class T, int kVec>
__global__ void __launch_bounds__(kThreads) gate_backward_kernel(GateBackwardParams p) {
  const int64_t token = blockIdx.x;
  const bool inside = token < p.documents.end();
  for_each_vector<kVec>(p, [&](int head, int column, int64_t at) {
    float dx[kVec] = {}, dz[kVec] = {};
    if (inside) {
      const auto x = load<T, kVec>(p.x, token, head, column), z = load<T, kVec>(p.z, token, head, column);
      const auto dout = load<T, kVec>(p.dout, token, head, column);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const OutputGate<float> gate(z.get(i));
        dx[i] = dout.get(i) * gate.silu;
        dz[i] = dout.get(i) * x.get(i) * gate.slope;
      }
    }
    store_row<T, kVec>(dx, static_cast<T*>(p.dx) + at);
    store_row<T, kVec>(dz, static_cast<T*>(p.dz) + at);
  });
}

// Whether rows can be read in vectors of 16 bytes.
bool has_vectors(const HeadRows& rows, int64_t bytes) {
  const auto whole = [](int64_t number) { return number % 16 == 0; };
  return whole(static_cast<int64_t>(reinterpret_cast<uintptr_t>(rows.data))) && whole(rows.token * bytes) &&
         whole(rows.head * bytes);
}

// call(element, elements of a vector), a grid of blocks for `p`.
template <class Call>
void dispatch_gate(const GateParams& p, bool vectors, const Call& call) {
  const auto with_type = [&](auto zero) {
    constexpr int kVec = 16 / static_cast<int>(sizeof(zero));
    if (vectors && p.head_dim % kVec == 0) return call(zero, std::integral_constant<int, kVec>{});
    call(zero, std::integral_constant<int, 1>{});
  };
  if (p.documents.total == 0 || p.num_heads * p.head_dim == 0) return;
  if (p.dtype == DType::kBFloat16) return with_type(__nv_bfloat16{});
  if (p.dtype == DType::kFloat16) return with_type(__half{});
  with_type(float{});
}

}  // namespace

void launch_gate_cuda(const GateParams& p, const CudaLaunch& launch) {
  const int64_t bytes = p.dtype == DType::kFloat32 ? 4 : 2;
  dispatch_gate(p, has_vectors(p.x, bytes) && has_vectors(p.z, bytes), [&](auto zero, auto vec) {
    const auto kernel = gate_kernel<decltype(zero), vec>;
    kernel<<<static_cast<unsigned>(p.documents.total), kThreads, 0, stream_of(launch)>>>(p);
    check_launch("gate_kernel");
  });
}

void launch_gate_backward_cuda(const GateBackwardParams& p, const CudaLaunch& launch) {
  const int64_t bytes = p.dtype == DType::kFloat32 ? 4 : 2;
  const bool vectors = has_vectors(p.x, bytes) && has_vectors(p.z, bytes) && has_vectors(p.dout, bytes);
  dispatch_gate(p, vectors, [&](auto zero, auto vec) {
    const auto kernel = gate_backward_kernel<decltype(zero), vec>;
    kernel<<<static_cast<unsigned>(p.documents.total), kThreads, 0, stream_of(launch)>>>(p);
    check_launch("gate_backward_kernel");
  });
}

}  // namespace packing_ops
