// The kernels of gated_delta_rule and mamba2_scan one after the other, and the scratch memory between them.
#include <stdexcept>
#include <string>

#include "ops/scan/scan_kernels.cuh"

namespace packing_ops {

namespace scan {

namespace {

int max_shared() {
  int device = 0;
  int bytes = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  return bytes;
}

int64_t bytes_of(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : 2;
}

// Parts of scratch memory, one after the other.
struct Parts {
  uint8_t* start;
  int64_t bytes = 0;
  template <class T>
  T* take(int64_t size) {
    T* part = reinterpret_cast<T*>(start + bytes);
    bytes += ceil_div(size, 128) * 128;
    return part;
  }
};

// And their size in all. `start` may be null.
Chunks chunks_in(const ScanParams& p, void* start, bool backward, int64_t& bytes) {
  Parts parts{static_cast<uint8_t*>(start)};
  const int64_t count = chunk_places(p.documents) * p.num_v_heads;
  const int64_t size = bytes_of(p.dtype);
  Chunks chunks{};
  chunks.scales = parts.take<RowScales>(count * static_cast<int64_t>(sizeof(RowScales)));
  if (p.corrects) chunks.inverses = parts.take<void>(count * kChunk * kChunk * size);
  chunks.scores = parts.take<void>(count * kChunk * kChunk * size);
  if (backward) {
    const int64_t rows = p.documents.total * p.num_v_heads * p.head_dim_v * size;
    chunks.states = parts.take<void>(count * p.head_dim * p.head_dim_v * size);
    chunks.dstates = parts.take<void>(count * p.head_dim * p.head_dim_v * size);
    if (p.corrects) chunks.corrected = parts.take<void>(rows);
    if (p.corrects) chunks.dcorrected = parts.take<void>(rows);
  }
  bytes = parts.bytes;
  return chunks;
}

// call(T{}) with the element type.
template <class Call>
void dispatch_elements(DType dtype, const Call& call) {
  if (dtype == DType::kBFloat16) return call(__nv_bfloat16{});
  if (dtype == DType::kFloat16) return call(__half{});
  call(float{});
}

}  // namespace

bool has_shared(int bytes) {
  return bytes <= max_shared();
}

void allow_shared(const void* kernel, int bytes) {
  if (!has_shared(bytes)) {
    throw std::runtime_error("gated_delta_rule, mamba2_scan: expected a GPU with " + std::to_string(bytes) +
                             " bytes of shared memory a block for this head_dim and dtype, got one with " +
                             std::to_string(max_shared()));
  }
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
}

}  // namespace scan

int64_t scan_scratch_bytes(const ScanParams& p) {
  int64_t bytes = 0;
  scan::chunks_in(p, nullptr, false, bytes);
  return bytes;
}

int64_t scan_backward_scratch_bytes(const ScanParams& p) {
  int64_t bytes = 0;
  scan::chunks_in(p, nullptr, true, bytes);
  return bytes;
}

void launch_scan_cuda(const ScanParams& p, const CudaLaunch& launch) {
  if (p.num_v_heads == 0) return;
  int64_t bytes = 0;
  const scan::Chunks chunks = scan::chunks_in(p, p.scratch, false, bytes);
  scan::dispatch_elements(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    scan::launch_prepare<T>(p, chunks, launch);
    scan::launch_walk<T>(p, chunks, false, launch);
  });
}

void launch_scan_backward_cuda(const ScanBackwardParams& p, const CudaLaunch& launch) {
  if (p.num_v_heads == 0) return;
  int64_t bytes = 0;
  const scan::Chunks chunks = scan::chunks_in(p, p.scratch, true, bytes);
  scan::dispatch_elements(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    scan::launch_prepare<T>(p, chunks, launch);
    scan::launch_walk<T>(p, chunks, true, launch);
    scan::launch_walk_back<T>(p, chunks, launch);
    scan::launch_gradients<T>(p, chunks, launch);
  });
}

}  // namespace packing_ops
