// The namespace of the ops in torch.ops. A Hub kernel has one of its own, so that it can be loaded beside the package.
#pragma once

#include <torch/csrc/stable/library.h>

#ifndef PACKING_OPS_NAMESPACE
#define PACKING_OPS_NAMESPACE packing_ops
#endif

// Through these the name is expanded before torch pastes it into others.
#define PACKING_OPS_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define PACKING_OPS_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)
