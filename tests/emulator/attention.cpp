// varlen_attention's CUDA launchers, from the plan to the gradients, for ctypes.
#include "ops/attention/attention.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/attention/attention_kernels.h"
#include "ops/attention/cuda/args.cuh"

using namespace packing_ops;

namespace {

std::string launched;  // symbols of the kernels of the last call

}  // namespace

extern "C" {

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  // for_the_emulator makes them references.
  Dl_info symbol = {};
  if (dladdr(kernel, &symbol) != 0 && symbol.dli_sname != nullptr) launched += std::string(symbol.dli_sname) + "\n";
  const auto entry = reinterpret_cast<void (*)(const void*)>(kernel);
  emulator::run(config->gridDim, config->blockDim, [&] { entry(arguments[0]); });
  return cudaSuccess;
}

int64_t emulated_plan_size(int64_t total_q, int64_t total_k, int64_t documents, int64_t group, int64_t visible_end,
                           int64_t pages) {
  static const int32_t kGiven = 0;
  AttentionPlanParams p;
  p.documents_q = {nullptr, documents, total_q};
  p.documents_k = {nullptr, documents, total_k};
  p.num_q_heads = group;
  p.num_kv_heads = 1;
  p.visible_end = visible_end != 0 ? &kGiven : nullptr;
  p.pages.used = pages != 0;
  return attention_plan_size(p);
}

const char* emulated_launched() {
  return launched.c_str();
}

// "forward, backward": the folders of the kernels that serve a call.
const char* emulated_kernels(int64_t dtype, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t head_dim_v,
                             double softcap, int64_t device, int64_t visible_end) {
  static const int32_t kGiven = 0;
  static std::string kernels;
  VarlenAttentionParams p;
  p.dtype = static_cast<DType>(dtype);
  p.num_q_heads = heads;
  p.num_kv_heads = kv_heads;
  p.head_dim = head_dim;
  p.head_dim_v = head_dim_v;
  p.softcap = softcap;
  p.device = static_cast<int32_t>(device);
  p.visible_end = visible_end != 0 ? &kGiven : nullptr;
  kernels = std::string(attention_forward_kernels_cuda(p)) + ", " + attention_backward_kernels_cuda(p);
  return kernels.c_str();
}

// Contiguous tensors; sinks, dlse, dsinks, visible_end, block_table and what another plan is made of may be null, and
// dout: then there is no backward. With block_table k and v are pages, and seqused_k represents cu_seqlens_k; with
// row_of_key k and v have rows_k rows, and cu_seqlens_k counts the keys of the paths of a prefix tree. Returns
// what went wrong, or an empty string.
const char* emulated_attention(const int64_t* sizes, const double* options, void* const* tensors) {
  static std::string error;
  const auto [total_q, total_k, documents, heads, kv_heads, head_dim, head_dim_v, left, right, dtype, device, num_pages,
              page_size, columns, rows_k] = reinterpret_cast<const std::array<int64_t, 15>&>(*sizes);
  const auto rows = [](void* data, int64_t heads, int64_t dim) { return AttentionTensor{data, heads * dim, dim}; };
  launched.clear();
  unsigned long long fault_word = 0;
  CudaLaunch launch;
  launch.fault.word = &fault_word;
  try {
    VarlenAttentionBackwardParams p;
    p.documents_q = {static_cast<const int32_t*>(tensors[4]), documents, total_q};
    p.documents_k = {static_cast<const int32_t*>(tensors[5]), documents, total_k};
    p.dtype = static_cast<DType>(dtype);
    p.device = static_cast<int32_t>(device);
    p.num_q_heads = heads;
    p.num_kv_heads = kv_heads;
    p.head_dim = head_dim;
    p.head_dim_v = head_dim_v;
    p.softmax_scale = options[0];
    p.softcap = options[1];
    p.window_left = left;
    p.window_right = right;
    p.q = rows(tensors[0], heads, head_dim);
    p.k = rows(tensors[1], kv_heads, head_dim);
    p.v = rows(tensors[2], kv_heads, head_dim_v);
    p.dout = rows(tensors[3], heads, head_dim_v);
    p.sinks = tensors[6];
    p.dlse = tensors[7];
    p.out = rows(tensors[8], heads, head_dim_v);
    p.lse = tensors[9];
    p.dq = rows(tensors[10], heads, head_dim);
    p.dk = rows(tensors[11], kv_heads, head_dim);
    p.dv = rows(tensors[12], kv_heads, head_dim_v);
    p.dsinks = tensors[13];
    p.visible_end = static_cast<const int32_t*>(tensors[15]);

    if (page_size > 0) {
      p.pages.used = true;
      p.pages.seqused_k = p.documents_k.cu_seqlens;
      p.documents_k.cu_seqlens = nullptr;
      p.pages.max_keys = columns * page_size;
      p.pages.block_table = static_cast<const int32_t*>(tensors[17]);
      p.pages.table_stride = columns;
      p.pages.num_pages = num_pages;
      p.pages.page_size = p.pages.page_rows = page_size;
    }
    p.pages.row_of_key = static_cast<const int32_t*>(tensors[18]);
    p.pages.num_rows = rows_k;
    AttentionPlanParams plan = plan_params(p);
    const int64_t documents = plan.documents_q.num_documents;
    if (tensors[14] != nullptr) {  // and of their rows
      const auto* planned = static_cast<const int32_t*>(tensors[14]);
      plan.documents_q.cu_seqlens = plan.documents_k.cu_seqlens = planned;
      plan.documents_q.total = plan.documents_k.total = planned[documents];
    }
    std::vector<int32_t> words(std::max(attention_plan_size(plan), attention_plan_size(plan_params(p))) + 4, -1);
    plan.plan = p.plan = reinterpret_cast<int32_t*>((reinterpret_cast<uintptr_t>(words.data()) + 15) / 16 * 16);
    if (tensors[16] != nullptr) plan.visible_end = static_cast<const int32_t*>(tensors[16]);
    std::vector<uint8_t> scratch;
    const auto with_scratch = [&](int64_t bytes, auto&& run) {
      scratch.assign(bytes + 32, 0xff);
      auto* begin = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(scratch.data()) + 15) / 16 * 16);
      p.scratch = begin;
      run();
      if (std::any_of(begin + bytes, begin + bytes + 16, [](uint8_t byte) { return byte != 0xff; })) {
        throw std::runtime_error("a kernel wrote past the scratch");
      }
    };
    launch_attention_plan_cuda(plan, launch);
    with_scratch(attention_scratch_cuda(p), [&] { launch_varlen_attention_cuda(p, launch); });
    if (p.dout.data != nullptr) {
      with_scratch(attention_backward_scratch_cuda(p), [&] { launch_varlen_attention_backward_cuda(p, launch); });
    }
    error = fault_word == 0 ? "" : "fault " + std::to_string(fault_word >> 56);
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  return error.c_str();
}
}
