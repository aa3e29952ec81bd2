// RoPE: check -> allocate -> fill the params -> launch.
#include <string>
#include <tuple>

#include "host/launch.h"
#include "host/memory_overlap.h"
#include "host/register.h"
#include "host/tensor_check.h"
#include "ops/rope/rope.h"

namespace packing_ops {

namespace {

constexpr auto kFloats = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

// Which dimension is which; [total, num_heads, head_dim] is one batch of `total` tokens.
struct HeadsLayout {
  int64_t batch, token, head;  // batch = -1 without one
};

struct RopeCall {
  RopeParams params;
  HeadsLayout layout;
  Tensor cos, sin;  // what params point into
};

HeadsLayout heads_layout(const Tensor& q, int64_t unsqueeze_dim) {
  if (q.dim() == 3) return {-1, 0, 1};
  if (q.dim() != 4) {
    fail("q: expected 4 dimensions (heads at unsqueeze_dim) or 3 (total, num_heads, head_dim), got ", describe(q));
  }
  check(unsqueeze_dim == 1 || unsqueeze_dim == 2, "unsqueeze_dim: expected 1 for [batch, num_heads, seqlen, ",
        "head_dim] or 2 for [batch, seqlen, num_heads, head_dim], got ", unsqueeze_dim);
  return {0, 3 - unsqueeze_dim, unsqueeze_dim};
}

void check_k(const Tensor& k, const Tensor& q, const HeadsLayout& layout) {
  check_same_device(k, "k", q, "q");
  check_same_dtype(k, "k", q, "q");
  bool fits = k.dim() == q.dim();
  for (int64_t i = 0; fits && i < q.dim(); ++i) fits = i == layout.head || k.size(i) == q.size(i);
  if (!fits) {
    fail("k: expected the shape of q but for the heads in dimension ", layout.head, ", got ", describe(k), " for q ",
         describe(q));
  }
  check_last_dim_contiguous(k, "k");
}

// Layout of position_ids, cos and sin: [seqlen, ...] or [1 or batch, seqlen, ...], with sections [rows, ...] in front.
struct PerToken {
  int64_t rows = 1, batches = 1;          // sizes, 1 where memory repeats
  int64_t row = 0, batch = 0, token = 0;  // strides, 0 where memory repeats
};

PerToken per_token(const Tensor& t, const char* name, const RopeParams& p, bool sections, bool entries) {
  const int64_t lead = sections ? 1 : 0;
  const int64_t dims = t.dim() - lead - (entries ? 1 : 0);
  bool fits = (dims == 1 || dims == 2) && t.size(lead + dims - 1) == p.seqlen;
  fits = fits && (dims == 1 || t.size(lead) == 1 || t.size(lead) == p.batch);
  fits = fits && (!sections || t.size(0) == 3 || t.size(0) == 4);
  if (!fits) {
    const std::string rows = sections ? "[3 or 4, " : "[";
    const std::string tail = "seqlen=" + std::to_string(p.seqlen) + (entries ? ", entries]" : "]");
    fail(name, ": expected ", rows, tail, " or ", rows, "1 or batch=", p.batch, ", ", tail,
         sections ? " with sections" : "", ", got ", describe(t));
  }
  PerToken view;
  view.token = t.stride(lead + dims - 1);
  if (dims == 2 && t.size(lead) > 1 && t.stride(lead) != 0) {
    view.batch = t.stride(lead);
    view.batches = p.batch;
  }
  if (sections) {
    view.row = t.stride(0);
    view.rows = t.size(0);
  }
  return view;
}

// Without the caller's word the width of the table tells rotary_dim.
void set_rotary_dim(RopeParams& p, const Tensor& cos, const std::optional<int64_t>& rotary_dim) {
  const int64_t width = cos.size(cos.dim() - 1);
  p.rotary_dim = rotary_dim ? *rotary_dim : (2 * width == p.head_dim ? p.head_dim : width);
  if (p.rotary_dim < 0 || p.rotary_dim % 2 != 0 || p.rotary_dim > p.head_dim) {
    fail(rotary_dim ? "rotary_dim" : "cos", ": expected an even rotary_dim, at most head_dim=", p.head_dim, ", got ",
         p.rotary_dim, " with cos ", describe(cos));
  }
  if (width != p.rotary_dim && 2 * width != p.rotary_dim) {
    fail("cos: expected rotary_dim=", p.rotary_dim, " or rotary_dim / 2 entries in the last dimension, got ",
         describe(cos));
  }
  p.full_table = width == p.rotary_dim;
}

// Without sections (or with an empty list): one chunk.
bool set_sections(RopeParams& p, const std::optional<std::vector<int64_t>>& lengths) {
  const int64_t pairs = p.rotary_dim / 2;
  p.section_ends[0] = pairs;
  if (!lengths || lengths->empty()) return false;
  const std::vector<int64_t>& sections = *lengths;
  p.num_sections = static_cast<int64_t>(sections.size());
  check(p.num_sections <= kMaxRopeSections, "sections: expected at most ", kMaxRopeSections, " lengths, got ",
        p.num_sections);
  int64_t end = 0;
  for (int64_t i = 0; i < p.num_sections; ++i) {
    check(sections[i] >= 0, "sections: expected no negative length, got ", sections[i], " at index ", i);
    end += sections[i];
    p.section_ends[i] = end;
  }
  check(end == pairs, "sections: expected lengths that sum to rotary_dim / 2 = ", pairs, ", got ", end);
  return true;
}

RopeTable gathered_view(const Tensor& table, const PerToken& view) {
  return {table.data_ptr(), view.row, view.batch, view.token};
}

void set_gathered(RopeParams& p, const Tensor& cos, const Tensor& sin, bool sections) {
  const PerToken view = per_token(cos, "cos", p, sections, true);
  p.rows = view.rows;
  p.cos = gathered_view(cos, view);
  p.sin = gathered_view(sin, per_token(sin, "sin", p, sections, true));
}

void set_cache(RopeParams& p, const Tensor& cos, const Tensor& sin, const Tensor& position_ids, bool sections) {
  if (cos.dim() != 2) fail("cos: expected a cache [max_positions, entries] with position_ids, got ", describe(cos));
  check_dtype(position_ids, "position_ids", {DType::kInt32, DType::kInt64});
  const PerToken view = per_token(position_ids, "position_ids", p, sections, false);
  p.position_ids = index_view(position_ids);
  p.rows = view.rows;
  p.position_batches = view.batches;
  p.position_row = view.row;
  p.position_batch = view.batch;
  p.position_token = view.token;
  p.max_positions = cos.size(0);
  p.cos = {cos.data_ptr(), 0, 0, cos.stride(0)};
  p.sin = {sin.data_ptr(), 0, 0, sin.stride(0)};
}

// cos and sin are read through any strides but the entries'.
Tensor dense_entries(const Tensor& table) {
  return table.stride(table.dim() - 1) == 1 ? table : dense(table);
}

// Everything but the memory of q and k.
RopeCall rope_call(const Tensor& q, const std::optional<Tensor>& k, const Tensor& cos, const Tensor& sin,
                   const std::optional<Tensor>& position_ids, const std::optional<std::vector<int64_t>>& sections,
                   const std::optional<int64_t>& rotary_dim, int64_t unsqueeze_dim) {
  check_dtype(q, "q", kFloats);
  const HeadsLayout layout = heads_layout(q, unsqueeze_dim);
  check_last_dim_contiguous(q, "q");
  if (k) check_k(*k, q, layout);
  check_dtype(cos, "cos", kFloats);
  if (cos.dim() < 2) {
    fail("cos: expected [max_positions, entries] or [1 or batch, seqlen, entries], got ", describe(cos));
  }
  check_same_device(cos, "cos", q, "q");
  check_same_dtype(sin, "sin", cos, "cos");
  check_same_device(sin, "sin", q, "q");
  check_shape(sin, "sin", sizes_of(cos), "the shape of cos");
  if (position_ids) check_same_device(*position_ids, "position_ids", q, "q");
  RopeCall call{{}, layout, dense_entries(cos), dense_entries(sin)};
  RopeParams& p = call.params;
  p.dtype = dtype_of(q);
  p.table_dtype = dtype_of(cos);
  p.batch = layout.batch < 0 ? 1 : q.size(layout.batch);
  p.seqlen = q.size(layout.token);
  p.head_dim = q.size(q.dim() - 1);
  check(p.batch <= INT32_MAX && p.seqlen <= INT32_MAX, "q: expected at most ", INT32_MAX, " batches and tokens");
  set_rotary_dim(p, cos, rotary_dim);
  const bool has_sections = set_sections(p, sections);
  if (position_ids) {
    set_cache(p, call.cos, call.sin, *position_ids, has_sections);
  } else {
    set_gathered(p, call.cos, call.sin, has_sections);
  }
  return call;
}

RopeHeads heads_view(const Tensor& in, const Tensor& out, const HeadsLayout& layout) {
  RopeHeads x;
  x.in = in.data_ptr();
  x.out = out.data_ptr();
  x.num_heads = in.size(layout.head);
  x.in_token = in.stride(layout.token);
  x.in_head = in.stride(layout.head);
  x.out_token = out.stride(layout.token);
  x.out_head = out.stride(layout.head);
  if (layout.batch >= 0) {
    x.in_batch = in.stride(layout.batch);
    x.out_batch = out.stride(layout.batch);
  }
  return x;
}

}  // namespace

// Without k the second result is empty.
std::tuple<Tensor, Tensor> rope_qk(const Tensor& q, std::optional<Tensor> k, const Tensor& cos, const Tensor& sin,
                                   std::optional<Tensor> position_ids, std::optional<std::vector<int64_t>> sections,
                                   std::optional<int64_t> rotary_dim, bool interleaved, int64_t unsqueeze_dim,
                                   bool conjugate) {
  RopeCall call = rope_call(q, k, cos, sin, position_ids, sections, rotary_dim, unsqueeze_dim);
  RopeParams& p = call.params;
  p.interleaved = interleaved;
  p.conjugate = conjugate;
  // The memory order of the inputs, whatever dimensions are called.
  Tensor q_out = empty_with_strides_of(q);
  Tensor k_out = k ? empty_with_strides_of(*k) : empty({0}, p.dtype, q);
  p.q = heads_view(q, q_out, call.layout);
  if (k) p.k = heads_view(*k, k_out, call.layout);
  launch(q, p, launch_rope_qk_cpu, PACKING_OPS_CUDA(launch_rope_qk_cuda));
  return {q_out, k_out};
}

void rope_qk_(Tensor q, std::optional<Tensor> k, const Tensor& cos, const Tensor& sin,
              std::optional<Tensor> position_ids, std::optional<std::vector<int64_t>> sections,
              std::optional<int64_t> rotary_dim, bool interleaved, int64_t unsqueeze_dim, bool conjugate) {
  RopeCall call = rope_call(q, k, cos, sin, position_ids, sections, rotary_dim, unsqueeze_dim);
  RopeParams& p = call.params;
  p.interleaved = interleaved;
  p.conjugate = conjugate;
  check_no_overlap(q, "q");
  if (k) check_no_overlap(*k, "k");
  if (k) check_no_overlap(*k, "k", q, "q");
  p.q = heads_view(q, q, call.layout);
  if (k) p.k = heads_view(*k, *k, call.layout);
  launch(q, p, launch_rope_qk_cpu, PACKING_OPS_CUDA(launch_rope_qk_cuda));
}

PACKING_OPS_REGISTER(m) {
  m.impl("rope_qk", TORCH_BOX(&rope_qk));
  m.impl("rope_qk_", TORCH_BOX(&rope_qk_));
}

}  // namespace packing_ops
