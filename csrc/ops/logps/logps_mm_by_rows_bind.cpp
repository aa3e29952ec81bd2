// mm_by_rows_: torch's product on the CPU, with bits of a row that no other row, place or number of threads changes.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "host/loaded_function.h"
#include "host/memory_overlap.h"
#include "host/parallel.h"
#include "host/register.h"
#include "host/tensor_check.h"

namespace packing_ops {

namespace {

// Products of other numbers of rows may sum in other orders; which ones depends on the CPU and the number of threads.
// Not 32: MKL's kernels for AVX2 take 6 rows at a time, and the 2 that remain by another one.
constexpr int64_t kRows = 16;
constexpr int64_t kProductGrain = 4096;  // GRAIN of packing_ops/invariance/mode.py: columns are cut at its multiples,
constexpr int64_t kColumns = 1024;       // and a grain here, so that threads share few rows. The last part has the rest

// While it exists, the products of the calling thread run in it alone: parallel_for may run a single part outside of
// a parallel region, where MKL splits a product by the row's position. Both numbers are the thread's: MKL does not
// follow OpenMP's where torch has set it, oneDNN does, and cuts a product by it even inside a parallel region.
class OneThread {
 public:
  OneThread() : mkl_before_(set_mkl() ? set_mkl()(1) : 0), before_(set_openmp() ? most()() : 0) {
    if (before_) set_openmp()(1);
  }
  ~OneThread() {
    if (before_) set_openmp()(before_);
    if (set_mkl()) set_mkl()(mkl_before_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  // As torch has them loaded, with its dependencies: another OpenMP would have other threads. Null if it has none.
  template <class Function>
  static Function of_torch(const char* name) {
    return loaded_function<Function>("libtorch_cpu.so", name);
  }
  using Set = int (*)(int);
  static Set set_mkl() {
    static const Set found = of_torch<Set>("MKL_Set_Num_Threads_Local");
    return found;
  }
  static void (*set_openmp())(int) {
    static const auto found = most() ? of_torch<void (*)(int)>("omp_set_num_threads") : nullptr;
    return found;
  }
  static int (*most())() {
    static const auto found = of_torch<int (*)()>("omp_get_max_threads");
    return found;
  }

  int mkl_before_;
  int before_;
};

// Rows and columns of a tensor, as one without a gradient.
struct Part {
  explicit Part(const Tensor& t) : tensor(t), step(t.stride(0)), column_step(t.stride(1)) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  }

  Tensor operator()(int64_t row, int64_t rows, int64_t column, int64_t columns) const {
    const int64_t sizes[] = {rows, columns}, strides[] = {step, column_step};
    char* data = static_cast<char*>(tensor.data_ptr()) +
                 (row * step + column * column_step) * static_cast<int64_t>(tensor.element_size());
    AtenTensorHandle part = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_create_tensor_from_blob(data, 2, sizes, strides, 0, dtype, aoti_torch_device_type_cpu(), 0, &part));
    return Tensor(part);
  }

  Tensor tensor;
  int64_t step, column_step;
  int32_t dtype = 0;
};

// Where the products begin, and the end.
std::vector<int64_t> column_cuts(int64_t columns) {
  std::vector<int64_t> found;
  for (int64_t grain = 0; grain < columns; grain += kProductGrain) {
    const int64_t parts = std::max<int64_t>(std::min(columns - grain, kProductGrain) / kColumns, 1);
    for (int64_t i = 0; i < parts; ++i) found.push_back(grain + i * kColumns);
  }
  found.push_back(columns);
  return found;
}

void check_products(const Tensor& out, const Tensor& x, const Tensor& other) {
  check(x.is_cpu(), "x: expected a tensor on the CPU, got ", describe(x));
  check_rank(x, "x", 2);
  check(x.size(0) % kRows == 0, "x: expected a multiple of ", kRows, " rows, got ", describe(x));
  check_rank(other, "other", 2);
  check_shape(other, "other", {x.size(1), other.size(1)}, "[columns of x, columns]");
  check_shape(out, "out", {x.size(0), other.size(1)}, "[rows of x, columns of other]");
  for (const auto& [t, name] : {std::pair{&other, "other"}, {&out, "out"}}) {
    check_same_dtype(*t, name, x, "x");
    check_same_device(*t, name, x, "x");
  }
  check_last_dim_contiguous(out, "out");
  check_no_overlap(out, "out");
}

}  // namespace

// out = x @ other, or out += x @ other. Blocks of 16 rows by parts of the columns, which are the same for each number
// of rows.
void mm_by_rows_(Tensor out, const Tensor& x, const Tensor& other, bool add) {
  check_products(out, x, other);
  if (out.numel() == 0) return;
  const Part out_of(out), x_of(dense(x));
  const Part other_of(other.stride(0) == 1 || other.stride(1) == 1 ? other : copy_of(other));
  const std::vector<int64_t> first = column_cuts(other.size(1));
  const int64_t blocks = x.size(0) / kRows, parts = static_cast<int64_t>(first.size()) - 1, terms = x.size(1);
  parallel_for(0, blocks * parts, 1, [&](int64_t begin, int64_t end) {
    const OneThread one;
    for (int64_t i = begin; i < end; ++i) {  // all blocks of a part of other follow each other: it stays in the cache
      const int64_t row = i % blocks * kRows, column = first[static_cast<size_t>(i / blocks)];
      const int64_t columns = first[static_cast<size_t>(i / blocks) + 1] - column;
      const Tensor to = out_of(row, kRows, column, columns), rows = x_of(row, kRows, 0, terms);
      const Tensor by = other_of(0, terms, column, columns);
      STABLE_TORCH_ERROR_CODE_CHECK(add ? aoti_torch_cpu_addmm_out(to.get(), to.get(), rows.get(), by.get(), 1, 1)
                                        : aoti_torch_cpu_mm_out(to.get(), rows.get(), by.get()));
    }
  });
}

PACKING_OPS_REGISTER(m) {
  m.impl("mm_by_rows_", TORCH_BOX(&mm_by_rows_));
}

}  // namespace packing_ops
