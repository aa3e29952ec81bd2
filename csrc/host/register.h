// The last lines of every bind file: its functions, for the CPU and, where the library has the CUDA half, for CUDA.
#pragma once

#include <torch/csrc/stable/library.h>

#ifdef PACKING_OPS_WITH_CUDA
#define PACKING_OPS_REGISTER_CUDA(register_ops)     \
  STABLE_TORCH_LIBRARY_IMPL(packing_ops, CUDA, m) { \
    register_ops(m);                                \
  }
#else
#define PACKING_OPS_REGISTER_CUDA(register_ops)
#endif

// The head of a function in namespace packing_ops, whose body has an m.impl("op", TORCH_BOX(&op)) for each op. Its name
// has a number: several bind files may be compiled as one (tools/units.py).
#define PACKING_OPS_REGISTER(m) PACKING_OPS_REGISTER_BY(C10_CONCATENATE(register_ops_, C10_UID), m)
#define PACKING_OPS_REGISTER_BY(register_ops, m)                     \
  static void register_ops(torch::stable::detail::StableLibrary& m); \
  STABLE_TORCH_LIBRARY_IMPL(packing_ops, CPU, library) {             \
    register_ops(library);                                           \
  }                                                                  \
  PACKING_OPS_REGISTER_CUDA(register_ops)                            \
  static void register_ops(torch::stable::detail::StableLibrary& m)
