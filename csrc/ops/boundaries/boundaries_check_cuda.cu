// Checks of values, reported through the fault flag: nothing waits.
#include "core/launch.cuh"
#include "ops/boundaries/boundaries.h"

namespace packing_ops {

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) check_documents_kernel(CheckDocumentsParams p, FaultFlag fault) {
  const int64_t total = p.total();
  // Of several contradictions the flag holds one: the ends say most.
  const bool wrong_q = p.cu_seqlens_q[p.num_documents] != total;
  if (wrong_q || p.cu_seqlens_k[p.num_documents] != total) {
    if (thread_id() == 0) fault.raise(wrong_q ? Fault::kEndOfQueries : Fault::kEndOfKeys, p.num_documents);
    return;
  }
  for (int64_t t = thread_id(); p.mask && t < total; t += thread_count()) {
    if (!p.mask[t]) fault.raise(Fault::kPaddingInDocuments, t);
  }
  if (!p.positions) return;
  for (int64_t i = thread_id(); !p.same && i <= p.num_documents; i += thread_count()) {
    if (p.cu_seqlens_k[i] != p.cu_seqlens_q[i]) fault.raise(Fault::kKeysOfOtherDocuments, i);
  }
  for (int64_t t = thread_id(); t + 2 < total; t += thread_count()) {
    if (p.restarts_in_document(t)) fault.raise(Fault::kOtherPositions, t + 1);
  }
  for (int64_t i = thread_id(); i < p.num_documents; i += thread_count()) {
    if (p.goes_on(i)) fault.raise(Fault::kOtherPositions, p.cu_seqlens_q[i]);
  }
}

template <class Word>
__global__ void __launch_bounds__(kThreads)
    check_unchanged_kernel(const Word* values, const Word* expected, int64_t count, int64_t words_per_element,
                           Fault fault, FaultFlag flag) {
  for (int64_t i = thread_id(); i < count; i += thread_count()) {
    if (values[i] != expected[i]) flag.raise(fault, i / words_per_element);
  }
}

}  // namespace

void launch_check_documents_cuda(const CheckDocumentsParams& p, const CudaLaunch& launch) {
  check_documents_kernel<<<grid_for(p.total(), kThreads), kThreads, 0, stream_of(launch)>>>(p, launch.fault);
  check_launch("check_documents_kernel");
}

void launch_check_unchanged_cuda(const CheckUnchangedParams& p, const CudaLaunch& launch) {
  const auto run = [&](auto word) {
    using Word = decltype(word);
    const int64_t count = p.bytes / static_cast<int64_t>(sizeof(Word));
    const int64_t words = p.element_size / static_cast<int64_t>(sizeof(Word));
    check_unchanged_kernel<Word><<<grid_for(count, kThreads), kThreads, 0, stream_of(launch)>>>(
        static_cast<const Word*>(p.values), static_cast<const Word*>(p.expected), count, words, p.fault, launch.fault);
    check_launch("check_unchanged_kernel");
  };
  // Elements of 4 bytes and more are aligned to 4 bytes.
  p.element_size % 4 == 0 ? run(uint32_t{}) : run(uint8_t{});
}

}  // namespace packing_ops
