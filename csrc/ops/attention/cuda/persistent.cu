// Launches persistent kernels: a grid that fills the GPU once, whose blocks loop over the plan's units.
#include <stdexcept>
#include <string>

#include "core/launch.cuh"
#include "ops/attention/cuda/persistent.cuh"

namespace packing_ops::attention {

namespace {

int query_resident_blocks(const void* kernel, int threads, int shared, int device) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  if (properties.major < 8) {
    throw std::runtime_error(std::string("varlen_attention: expected a GPU of compute capability 8.0 or newer, got ") +
                             properties.name + " with " + std::to_string(properties.major) + "." +
                             std::to_string(properties.minor));
  }
  if (static_cast<size_t>(shared) > properties.sharedMemPerBlockOptin) {
    throw std::runtime_error("varlen_attention: expected a GPU with " + std::to_string(shared) +
                             " bytes of shared memory a block for this head_dim, got " + properties.name + " with " +
                             std::to_string(properties.sharedMemPerBlockOptin));
  }
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
  int blocks = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, static_cast<size_t>(shared)),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return (blocks < 1 ? 1 : blocks) * properties.multiProcessorCount;
}

}  // namespace

void launch_persistent(PersistentKernel& kernel, const void* args, int64_t units, cudaStream_t stream, bool overlaps) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  int& cached = kernel.resident_blocks[device % kMaxDevices];
  int64_t max_blocks = __atomic_load_n(&cached, __ATOMIC_RELAXED);
  if (max_blocks == 0) {
    max_blocks = query_resident_blocks(kernel.entry, kernel.threads, kernel.shared, device);
    __atomic_store_n(&cached, static_cast<int>(max_blocks), __ATOMIC_RELAXED);
  }
  const unsigned grid = static_cast<unsigned>(units < 1 ? 1 : (units < max_blocks ? units : max_blocks));
  int major = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
  config.dynamicSmemBytes = static_cast<size_t>(kernel.shared);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps && major >= 9 ? 1 : 0;
  void* parameters[] = {const_cast<void*>(args)};
  check_cuda(cudaLaunchKernelExC(&config, kernel.entry, parameters), kernel.name);
}

}  // namespace packing_ops::attention
