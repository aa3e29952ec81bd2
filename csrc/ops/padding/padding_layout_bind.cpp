// The layout of a mask: check -> allocate -> fill the params -> launch.
#include <algorithm>
#include <string>
#include <tuple>

#include "host/launch.h"
#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/padding/padding_bind.h"

namespace packing_ops {

namespace {

constexpr auto kMaskDTypes = {DType::kBool,  DType::kUInt8,   DType::kInt8,     DType::kInt16,   DType::kInt32,
                              DType::kInt64, DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

void check_mask(const Tensor& mask, const char* name) {
  check_dtype(mask, name, kMaskDTypes);
  if (mask.dim() != 2) fail(name, ": expected [batch, seqlen], got ", describe(mask));
  if (mask.numel() > kMaxTotal) fail(name, ": expected at most ", kMaxTotal, " slots, got ", describe(mask));
}

}  // namespace

UnpadLayout start_layout(const Tensor& attention_mask, std::optional<Tensor> unused_mask, bool host_totals) {
  check_mask(attention_mask, "attention_mask");
  if (unused_mask) {
    check_mask(*unused_mask, "unused_mask");
    check_shape(*unused_mask, "unused_mask", sizes_of(attention_mask), "[batch, seqlen] like attention_mask");
    check_same_device(*unused_mask, "unused_mask", attention_mask, "attention_mask");
  }
  const Tensor mask = dense(attention_mask);
  const std::optional<Tensor> unused = dense(unused_mask);
  const int64_t batch = mask.size(0);
  const int64_t slots = mask.numel();
  Tensor indices = empty({slots}, DType::kInt64, mask);
  Tensor cu_seqlens = empty({batch + 1}, DType::kInt32, mask);
  Tensor seqused = empty({batch}, DType::kInt32, mask);
  Tensor totals = host_totals ? empty_on_host(2, DType::kInt64, mask) : empty({2}, DType::kInt64, mask);
  const Tensor real = scratch(mask.is_cuda() ? 0 : slots, mask);
  const std::optional<Tensor> memory =
      cuda_scratch(mask, PACKING_OPS_CUDA(unpad_layout_scratch_cuda), batch, mask.size(1));
  UnpadLayoutParams p;
  p.mask = mask.data_ptr();
  p.mask_dtype = dtype_of(mask);
  p.unused = data_or_null(unused);
  if (unused) p.unused_dtype = dtype_of(*unused);
  p.batch = batch;
  p.seqlen = mask.size(1);
  p.indices = static_cast<int64_t*>(indices.data_ptr());
  p.cu_seqlens = static_cast<int32_t*>(cu_seqlens.data_ptr());
  p.seqused = static_cast<int32_t*>(seqused.data_ptr());
  p.totals = static_cast<int64_t*>(totals.data_ptr());
  if (host_totals) p.totals[0] = p.totals[1] = kUnset;
  p.real = static_cast<uint8_t*>(real.data_ptr());
  p.scratch = data_or_null(memory);
  launch(attention_mask, p, launch_unpad_layout_cpu, PACKING_OPS_CUDA(launch_unpad_layout_cuda));
  return {indices, cu_seqlens, seqused, totals};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> unpad_layout(const Tensor& attention_mask, std::optional<Tensor> unused_mask,
                                                        bool host_totals) {
  const UnpadLayout layout = start_layout(attention_mask, unused_mask, host_totals);
  if (host_totals) {
    const auto* totals = static_cast<const int64_t*>(layout.totals.data_ptr());
    wait_for_value(attention_mask, totals);
    wait_for_value(attention_mask, totals + 1);
  }
  return {layout.indices, layout.cu_seqlens, layout.seqused, layout.totals};
}

// The columns that trimming keeps, [start, end) in host memory. Columns that min_length and multiple_of add are taken
// from the side that is cut; with "both" from the right first.
Tensor trim_padding_range(const Tensor& attention_mask, const std::string& side, int64_t min_length,
                          int64_t multiple_of) {
  if (side != "right" && side != "left" && side != "both") {
    fail("side: expected \"right\", \"left\" or \"both\", got '", side, "'");
  }
  check(min_length >= 0, "min_length: expected at least 0, got ", min_length);
  check(multiple_of >= 1, "multiple_of: expected at least 1, got ", multiple_of);
  check_mask(attention_mask, "attention_mask");
  const Tensor mask = dense(attention_mask);
  Tensor range = empty_on_host(2, DType::kInt64, mask);
  const std::optional<Tensor> memory = cuda_scratch(mask, PACKING_OPS_CUDA(real_columns_scratch_cuda));
  RealColumnsParams p;
  p.mask = mask.data_ptr();
  p.mask_dtype = dtype_of(mask);
  p.batch = mask.size(0);
  p.seqlen = mask.size(1);
  p.columns = static_cast<int64_t*>(range.data_ptr());
  p.columns[0] = p.columns[1] = kUnset;
  p.scratch = static_cast<int32_t*>(data_or_null(memory));
  launch(attention_mask, p, launch_real_columns_cpu, PACKING_OPS_CUDA(launch_real_columns_cuda));
  const int64_t first = wait_for_value(attention_mask, p.columns);
  const int64_t after = wait_for_value(attention_mask, p.columns + 1);

  const int64_t width = p.seqlen;
  const int64_t start = side == "right" ? 0 : side == "left" && after == 0 ? width : first;
  const int64_t needed = (side == "left" ? width : after) - start;
  int64_t kept = std::min(std::max(needed, min_length), width);
  if (kept > 0)
    kept = multiple_of >= width ? width : std::min((kept - 1) / multiple_of * multiple_of + multiple_of, width);
  const int64_t end = side == "left" ? width : std::min(start + kept, width);
  p.columns[0] = end - kept;
  p.columns[1] = end;
  return range;
}

PACKING_OPS_REGISTER(m) {
  m.impl("trim_padding_range", TORCH_BOX(&trim_padding_range));
  m.impl("unpad_layout", TORCH_BOX(&unpad_layout));
}

}  // namespace packing_ops
