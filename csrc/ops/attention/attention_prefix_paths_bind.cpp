// The paths of a prefix tree: check -> allocate -> fill the params -> launch.
#include <tuple>

#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/attention/attention.h"

namespace packing_ops {

namespace {

int32_t* values_of(const Tensor& t) {
  return static_cast<int32_t*>(t.data_ptr());
}

}  // namespace

// (cu_seqlens of the paths, rows, key_offsets, keys_of_row), on the device of cu_seqlens. Sizes depend on the values,
// so they are made on the host.
std::tuple<Tensor, Tensor, Tensor, Tensor> prefix_paths(Tensor cu_seqlens, const Tensor& parents, int64_t total,
                                                        bool forks_anywhere) {
  check_total(total, "total");
  check_rank(cu_seqlens, "cu_seqlens", 1);
  check_dtype(parents, "parents", {DType::kInt32});
  check_shape(parents, "parents", {cu_seqlens.numel() - 1}, "[num_segments]");
  check_same_device(parents, "parents", cu_seqlens, "cu_seqlens");
  const Tensor anchor = cu_seqlens, parents_on_host = dense(on_host(parents));
  cu_seqlens = on_host(cu_seqlens);
  take_cu_seqlens(cu_seqlens, "cu_seqlens", total, cu_seqlens, "cu_seqlens");
  const Tensor path_cu_seqlens = empty({cu_seqlens.numel()}, DType::kInt32, cu_seqlens);
  PrefixPathsParams p;
  p.segments = documents_view(cu_seqlens, total);
  p.forks_anywhere = forks_anywhere;
  p.parents = values_of(parents_on_host);
  p.cu_seqlens = values_of(path_cu_seqlens);
  launch_prefix_path_lengths_cpu(p);
  const Tensor rows = empty({p.cu_seqlens[p.segments.num_documents]}, DType::kInt32, cu_seqlens);
  const Tensor key_offsets = empty({total + 1}, DType::kInt32, cu_seqlens);
  const Tensor keys_of_row = empty({rows.numel()}, DType::kInt32, cu_seqlens);
  p.row_of_key = values_of(rows);
  p.key_offsets = values_of(key_offsets);
  p.keys_of_row = values_of(keys_of_row);
  launch_prefix_path_rows_cpu(p);
  return {on_device_of(path_cu_seqlens, anchor), on_device_of(rows, anchor), on_device_of(key_offsets, anchor),
          on_device_of(keys_of_row, anchor)};
}

PACKING_OPS_REGISTER(m) {
  m.impl("prefix_paths", TORCH_BOX(&prefix_paths));
}

}  // namespace packing_ops
