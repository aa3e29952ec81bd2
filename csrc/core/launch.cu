#include <stdexcept>
#include <string>

#include "core/launch.cuh"

namespace packing_ops {

void fail_cuda(cudaError_t status, const char* what) {
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

}  // namespace packing_ops
