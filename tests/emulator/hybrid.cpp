// The CUDA launchers of causal_conv1d, gated_delta_rule and mamba2_scan, forward and backward, for ctypes.
#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/conv/conv.h"
#include "ops/scan/scan.h"

using namespace packing_ops;

namespace {

std::string error;

template <class Call>
const char* caught(const Call& call) {
  unsigned long long fault_word = 0;
  CudaLaunch launch;
  launch.fault.word = &fault_word;
  try {
    call(launch);
    error = fault_word == 0 ? "" : "fault " + std::to_string(fault_word >> 56);
  } catch (const std::exception& found) {
    error = found.what();
  }
  return error.c_str();
}

// run(memory of that many bytes), which must not write past it.
template <class Run>
void with_scratch(int64_t bytes, const Run& run) {
  std::vector<uint8_t> scratch(bytes + 256, 0xff);
  auto* begin = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(scratch.data()) + 127) / 128 * 128);
  run(begin);
  if (std::any_of(begin + bytes, begin + bytes + 16, [](uint8_t byte) { return byte != 0xff; })) {
    throw std::runtime_error("a kernel wrote past the scratch");
  }
}

const char* scanned(ScanBackwardParams& p) {
  return caught([&](const CudaLaunch& launch) {
    with_scratch(scan_scratch_bytes(p), [&](uint8_t* memory) {
      p.scratch = memory;
      launch_scan_cuda(p, launch);
    });
    if (p.dout.data == nullptr) return;
    with_scratch(scan_backward_scratch_bytes(p), [&](uint8_t* memory) {
      p.scratch = memory;
      launch_scan_backward_cuda(p, launch);
    });
  });
}

HeadRows rows(void* data, int64_t heads, int64_t dim) {
  return {data, heads * dim, dim};
}

}  // namespace

extern "C" {

// Contiguous tensors; those that may be missing may be null, and with dout there is a backward. Returns what went
// wrong, or an empty string.
const char* emulated_conv(const int64_t* sizes, void* const* tensors) {
  const auto [total, documents, channels, width, silu, dtype] = reinterpret_cast<const std::array<int64_t, 6>&>(*sizes);
  CausalConvBackwardParams p;
  p.documents = {static_cast<const int32_t*>(tensors[0]), documents, total};
  p.dtype = static_cast<DType>(dtype);
  p.channels = p.x_row = p.dout_row = channels;
  p.width = width;
  p.silu = silu != 0;
  p.x = tensors[1];
  p.weight = tensors[2];
  p.bias = tensors[3];
  p.initial_state = tensors[4];
  p.dout = tensors[5];
  p.dfinal_state = tensors[6];
  p.out = tensors[7];
  p.final_state = tensors[8];
  p.dx = tensors[9];
  p.dweight = tensors[10];
  p.dbias = tensors[11];
  p.dinitial_state = tensors[12];
  return caught([&](const CudaLaunch& launch) {
    launch_causal_conv1d_cuda(p, launch);
    with_scratch(4 * causal_conv1d_partial_sums(total) * (width + 1) * channels, [&](uint8_t* memory) {
      p.partial = reinterpret_cast<float*>(memory);
      launch_causal_conv1d_backward_cuda(p, launch);
    });
  });
}

const char* emulated_scan(const int64_t* sizes, double scale, void* const* tensors) {
  const auto [total, documents, k_heads, v_heads, head_dim, head_dim_v, l2norm, dtype] =
      reinterpret_cast<const std::array<int64_t, 8>&>(*sizes);
  ScanBackwardParams p;
  p.documents = {static_cast<const int32_t*>(tensors[0]), documents, total};
  p.dtype = static_cast<DType>(dtype);
  p.num_k_heads = k_heads;
  p.num_v_heads = v_heads;
  p.head_dim = head_dim;
  p.head_dim_v = head_dim_v;
  p.scale = scale;
  p.l2norm = l2norm != 0;
  p.q = rows(tensors[1], k_heads, head_dim);
  p.k = rows(tensors[2], k_heads, head_dim);
  p.v = rows(tensors[3], v_heads, head_dim_v);
  p.g = tensors[4];
  p.beta = tensors[5];
  p.initial_state = tensors[6];
  p.dout = rows(tensors[7], v_heads, head_dim_v);
  p.dfinal_state = tensors[8];
  p.out = tensors[9];
  p.final_state = tensors[10];
  p.dq = tensors[11];
  p.dk = tensors[12];
  p.dv = tensors[13];
  p.dg = tensors[14];
  p.dbeta = tensors[15];
  p.dinitial_state = tensors[16];
  return scanned(p);
}

const char* emulated_mamba(const int64_t* sizes, double dt_min, double dt_max, void* const* tensors) {
  const auto [total, documents, groups, heads, state_dim, head_dim, softplus, dtype] =
      reinterpret_cast<const std::array<int64_t, 8>&>(*sizes);
  ScanBackwardParams p;
  p.documents = {static_cast<const int32_t*>(tensors[0]), documents, total};
  p.dtype = static_cast<DType>(dtype);
  p.corrects = false;
  p.num_k_heads = groups;
  p.num_v_heads = heads;
  p.head_dim = state_dim;
  p.head_dim_v = head_dim;
  p.softplus = softplus != 0;
  p.dt_min = dt_min;
  p.dt_max = dt_max;
  p.v = rows(tensors[1], heads, head_dim);
  p.beta = tensors[2];
  p.a = tensors[3];
  p.k = rows(tensors[4], groups, state_dim);
  p.q = rows(tensors[5], groups, state_dim);
  p.skip = tensors[6];
  p.dt_bias = tensors[7];
  p.initial_state = tensors[8];
  p.dout = rows(tensors[9], heads, head_dim);
  p.dfinal_state = tensors[10];
  p.out = tensors[11];
  p.final_state = tensors[12];
  p.dv = tensors[13];
  p.dbeta = tensors[14];
  p.dg = tensors[15];
  p.dk = tensors[16];
  p.dq = tensors[17];
  p.dskip = tensors[18];
  p.dinitial_state = tensors[19];
  return scanned(p);
}

const char* emulated_gate(const int64_t* sizes, void* const* tensors) {
  const auto [total, documents, heads, head_dim, dtype] = reinterpret_cast<const std::array<int64_t, 5>&>(*sizes);
  GateBackwardParams p;
  p.documents = {static_cast<const int32_t*>(tensors[0]), documents, total};
  p.dtype = static_cast<DType>(dtype);
  p.num_heads = heads;
  p.head_dim = head_dim;
  p.x = rows(tensors[1], heads, head_dim);
  p.z = rows(tensors[2], heads, head_dim);
  p.dout = rows(tensors[3], heads, head_dim);
  p.out = tensors[4];
  p.dx = tensors[5];
  p.dz = tensors[6];
  return caught([&](const CudaLaunch& launch) {
    if (p.out) return launch_gate_cuda(p, launch);
    launch_gate_backward_cuda(p, launch);
  });
}
}
