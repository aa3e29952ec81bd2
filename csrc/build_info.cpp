// What this library was built from, for packing_ops.build_info() and bug reports.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/version.h>

#include <string>

#ifndef PACKING_OPS_CUDA_ARCHS
#define PACKING_OPS_CUDA_ARCHS ""
#endif

namespace packing_ops {

std::string build_info() {
  std::string info = "version=" PACKING_OPS_VERSION "|built_with_torch=";
  info += std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR) + "." +
          std::to_string(TORCH_VERSION_PATCH);
  info += "|compiler=" __VERSION__ "|cuda=";
#ifdef PACKING_OPS_WITH_CUDA
  info += PACKING_OPS_WITH_CUDA "|cuda_archs=" PACKING_OPS_CUDA_ARCHS "|attention_kernels=cpu, fp32, sm80";
#else
  info += "|cuda_archs=|attention_kernels=cpu";
#endif
#ifdef PACKING_OPS_SHARED_MEMORY_KB
  info += " for " PACKING_OPS_SHARED_MEMORY_KB " KB";
#endif
#ifdef PACKING_OPS_SM90
  info += ", sm90";
#endif
  return info;
}

STABLE_TORCH_LIBRARY_IMPL(packing_ops, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&build_info));
}

}  // namespace packing_ops
