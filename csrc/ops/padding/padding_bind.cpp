// Padding: check -> allocate -> fill the params -> launch.
#include "ops/padding/padding_bind.h"

#include <algorithm>
#include <tuple>

#include "host/launch.h"
#include "host/register.h"
#include "host/tensor_check.h"

namespace packing_ops {

namespace {

// What a kernel reads without a copy: `leading` dimensions with any stride, then a row in one block of memory.
Tensor with_dense_rows(const Tensor& t, int64_t leading) {
  int64_t expected = 1;
  for (int64_t d = t.dim() - 1; d >= leading; --d) {
    if (t.size(d) != 1 && t.stride(d) != expected) return dense(t);
    expected *= t.size(d);
  }
  return t;
}

int64_t row_bytes_of(const Tensor& t, int64_t leading) {
  int64_t bytes = static_cast<int64_t>(t.element_size());
  for (int64_t d = leading; d < t.dim(); ++d) bytes *= t.size(d);
  return bytes;
}

// `front`, then the dimensions of `t` from `leading` on.
std::vector<int64_t> shape_with(std::vector<int64_t> front, const Tensor& t, int64_t leading) {
  for (int64_t d = leading; d < t.dim(); ++d) front.push_back(t.size(d));
  return front;
}

MoveRowsParams move_params(const Tensor& indices, int64_t total, int64_t batch, int64_t seqlen) {
  MoveRowsParams p;
  p.indices = static_cast<const int64_t*>(indices.data_ptr());
  p.num_indices = indices.numel();
  p.total = total;
  p.batch = batch;
  p.seqlen = seqlen;
  return p;
}

// The next move of `p`: fills it and returns its output. The memory of `input` must live until the launch.
Tensor add_gather(MoveRowsParams& p, const Tensor& input) {
  Tensor packed = empty_as(shape_with({p.total}, input, 2), input);
  const auto size = static_cast<int64_t>(input.element_size());
  RowMove& m = p.moves[p.num_moves++];
  m.input = static_cast<const char*>(input.data_ptr());
  m.batch_stride = input.stride(0) * size;
  m.row_stride = input.stride(1) * size;
  m.row_bytes = row_bytes_of(input, 2);
  m.output = static_cast<char*>(packed.data_ptr());
  return packed;
}

Tensor add_scatter(MoveRowsParams& p, const Tensor& packed) {
  Tensor padded = empty_as(shape_with({p.batch, p.seqlen}, packed, 1), packed);
  RowMove& m = p.moves[p.num_moves++];
  m.input = static_cast<const char*>(packed.data_ptr());
  m.row_stride = packed.stride(0) * static_cast<int64_t>(packed.element_size());
  m.row_bytes = row_bytes_of(packed, 1);
  m.output = static_cast<char*>(padded.data_ptr());
  return padded;
}

void check_padded(const Tensor& input, const Tensor& indices) {
  if (input.dim() < 2) fail("input: expected [batch, seqlen, ...], got ", describe(input));
  check_same_device(input, "input", indices, "indices");
}

void check_packed(const Tensor& packed, const Tensor& indices) {
  if (packed.dim() < 1) fail("packed: expected [total, ...], got ", describe(packed));
  check_same_device(packed, "packed", indices, "indices");
}

void check_indices_tensor(const Tensor& indices, int64_t total) {
  check_dtype(indices, "indices", {DType::kInt64});
  check_rank(indices, "indices", 1);
  check(total >= 0, "total: expected at least 0, got ", total);
  if (indices.numel() < total) fail("indices: expected at least total=", total, " entries, got ", describe(indices));
}

void check_batch(int64_t batch, int64_t seqlen) {
  check(batch >= 0 && batch <= kMaxTotal, "batch: expected 0 to ", kMaxTotal, ", got ", batch);
  check(seqlen >= 0 && seqlen <= kMaxTotal, "seqlen: expected 0 to ", kMaxTotal, ", got ", seqlen);
}

}  // namespace

// input [batch, seqlen, ...] -> packed [total, ...]
Tensor gather_rows(const Tensor& input, const Tensor& indices, int64_t total) {
  check_padded(input, indices);
  check_indices_tensor(indices, total);
  const Tensor dense_indices = dense(indices);
  const Tensor dense_input = with_dense_rows(input, 2);
  MoveRowsParams p = move_params(dense_indices, total, input.size(0), input.size(1));
  Tensor packed = add_gather(p, dense_input);
  launch(input, p, launch_gather_rows_cpu, PACKING_OPS_CUDA(launch_gather_rows_cuda));
  return packed;
}

std::vector<Tensor> gather_rows_many(const std::vector<Tensor>& inputs, const Tensor& indices, int64_t total) {
  for (const Tensor& input : inputs) {
    check_padded(input, indices);
    if (input.size(0) != inputs[0].size(0) || input.size(1) != inputs[0].size(1)) {
      fail("input: expected the same [batch, seqlen] in every tensor, got ", describe(inputs[0]), " and ",
           describe(input));
    }
  }
  check_indices_tensor(indices, total);
  const Tensor dense_indices = dense(indices);
  std::vector<Tensor> dense_inputs;  // copies must live until the launch
  std::vector<Tensor> packed;
  for (const Tensor& input : inputs) dense_inputs.push_back(with_dense_rows(input, 2));
  for (size_t first = 0; first < inputs.size(); first += kMaxRowMoves) {
    MoveRowsParams p = move_params(dense_indices, total, inputs[0].size(0), inputs[0].size(1));
    const size_t end = std::min(first + kMaxRowMoves, inputs.size());
    for (size_t i = first; i < end; ++i) packed.push_back(add_gather(p, dense_inputs[i]));
    launch(indices, p, launch_gather_rows_cpu, PACKING_OPS_CUDA(launch_gather_rows_cuda));
  }
  return packed;
}

// Layout and gather in one call: the host launches the gather as soon as it knows total, while the layout is written.
std::tuple<std::vector<Tensor>, Tensor, Tensor, Tensor, Tensor> unpad_rows(const std::vector<Tensor>& inputs,
                                                                           const Tensor& attention_mask,
                                                                           std::optional<Tensor> unused_mask) {
  auto [indices, cu_seqlens, seqused, totals] = start_layout(attention_mask, unused_mask, true);
  const auto* counts = static_cast<const int64_t*>(totals.data_ptr());
  const int64_t total = wait_for_value(attention_mask, counts);
  std::vector<Tensor> packed;
  try {
    packed = gather_rows_many(inputs, indices, total);
  } catch (...) {
    wait_for_value(attention_mask, counts + 1);  // a kernel may still write to the memory that is about to be freed
    throw;
  }
  wait_for_value(attention_mask, counts + 1);
  return {packed, torch::stable::narrow(indices, 0, 0, total), cu_seqlens, seqused, totals};
}

// packed [total, ...] -> [batch, seqlen, ...]
Tensor scatter_rows(const Tensor& packed, const Tensor& indices, int64_t batch, int64_t seqlen) {
  check_packed(packed, indices);
  check_indices_tensor(indices, packed.size(0));
  check_batch(batch, seqlen);
  const Tensor dense_indices = dense(indices);
  const Tensor dense_packed = with_dense_rows(packed, 1);
  MoveRowsParams p = move_params(dense_indices, packed.size(0), batch, seqlen);
  Tensor padded = add_scatter(p, dense_packed);
  const std::optional<Tensor> inverse =
      cuda_scratch(indices, PACKING_OPS_CUDA(scatter_rows_scratch_cuda), batch, seqlen);
  p.inverse = static_cast<int32_t*>(data_or_null(inverse));
  launch(packed, p, launch_scatter_rows_cpu, PACKING_OPS_CUDA(launch_scatter_rows_cuda));
  return padded;
}

std::vector<Tensor> scatter_rows_many(const std::vector<Tensor>& packed, const Tensor& indices, int64_t batch,
                                      int64_t seqlen) {
  for (const Tensor& rows : packed) {
    check_packed(rows, indices);
    if (rows.size(0) != packed[0].size(0)) {
      fail("packed: expected the same total in every tensor, got ", describe(packed[0]), " and ", describe(rows));
    }
  }
  const int64_t total = packed.empty() ? 0 : packed[0].size(0);
  check_indices_tensor(indices, total);
  check_batch(batch, seqlen);
  const Tensor dense_indices = dense(indices);
  std::vector<Tensor> dense_packed;
  std::vector<Tensor> padded;
  for (const Tensor& rows : packed) dense_packed.push_back(with_dense_rows(rows, 1));
  for (size_t first = 0; first < packed.size(); first += kMaxRowMoves) {
    MoveRowsParams p = move_params(dense_indices, total, batch, seqlen);
    const size_t end = std::min(first + kMaxRowMoves, packed.size());
    for (size_t i = first; i < end; ++i) padded.push_back(add_scatter(p, dense_packed[i]));
    const std::optional<Tensor> inverse =
        cuda_scratch(indices, PACKING_OPS_CUDA(scatter_rows_scratch_cuda), batch, seqlen);
    p.inverse = static_cast<int32_t*>(data_or_null(inverse));
    launch(indices, p, launch_scatter_rows_cpu, PACKING_OPS_CUDA(launch_scatter_rows_cuda));
  }
  return padded;
}

PACKING_OPS_REGISTER(m) {
  m.impl("unpad_rows", TORCH_BOX(&unpad_rows));
  m.impl("gather_rows", TORCH_BOX(&gather_rows));
  m.impl("gather_rows_many", TORCH_BOX(&gather_rows_many));
  m.impl("scatter_rows", TORCH_BOX(&scatter_rows));
  m.impl("scatter_rows_many", TORCH_BOX(&scatter_rows_many));
}

}  // namespace packing_ops
