// torch's thread pool for CPU kernels (launch.cpp), without its headers, which take longer to compile than a
// kernel.
#pragma once

#include <cstdint>

namespace packing_ops {

int64_t get_num_threads();

void parallel_for(int64_t begin, int64_t end, int64_t grain_size, void (*call)(const void* f, int64_t, int64_t),
                  const void* f);

// f(begin, end) for parts of begin .. end, each of at least grain_size if there are several.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain_size, const F& f) {
  const auto call = [](const void* of, int64_t from, int64_t to) { (*static_cast<const F*>(of))(from, to); };
  parallel_for(begin, end, grain_size, call, &f);
}

}  // namespace packing_ops
