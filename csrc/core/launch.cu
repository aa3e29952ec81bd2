#include "core/launch.cuh"

#include <stdexcept>
#include <string>

namespace packing_ops {

void fail_cuda(cudaError_t status, const char* what) {
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

}  // namespace packing_ops
