// Every schema, one per line, grouped by family.
#include <torch/csrc/stable/library.h>

// clang-format off
STABLE_TORCH_LIBRARY(packing_ops, m) {
  // library
  m.def("build_info() -> str");
  m.def("attention_kernels(bool half, int num_heads, int num_kv_heads, int head_dim, int device, int? head_dim_v=None) -> str");

  // boundaries
  m.def("cu_seqlens_from_lengths(Tensor lengths) -> Tensor");
  m.def("position_ids_from_cu_seqlens(Tensor cu_seqlens, SymInt total) -> Tensor");
  m.def("seq_idx_from_cu_seqlens(Tensor cu_seqlens, SymInt total) -> Tensor");
  m.def("cu_seqlens_from_position_ids(Tensor position_ids) -> (Tensor, Tensor)");
  m.def("prompt_end_indices(Tensor uids) -> (Tensor, Tensor)");
  m.def("mask_boundary_labels(Tensor labels, Tensor cu_seqlens, int ignore_index) -> Tensor");
  m.def("mask_boundary_labels_shifted_(Tensor(a!) labels, Tensor cu_seqlens, int ignore_index) -> ()");
  m.def("shift_labels(Tensor labels, Tensor cu_seqlens, int ignore_index) -> Tensor");
  m.def("segment_sum(Tensor values, Tensor cu_seqlens, Tensor? mask, bool average) -> Tensor");
  m.def("segment_sum_backward(Tensor grad, Tensor cu_seqlens, Tensor? mask, bool average, SymInt total, ScalarType dtype) -> Tensor");
  m.def("router_sums(Tensor probabilities, Tensor routed, Tensor cu_seqlens, Tensor? copies) -> (Tensor, Tensor, Tensor)");
  m.def("gae(Tensor rewards, Tensor values, Tensor cu_seqlens, Tensor? mask, Tensor? bootstrap, float gamma, float lam) -> (Tensor, Tensor)");
  m.def("count_target_tokens(Tensor labels, Tensor cu_seqlens, int ignore_index) -> Tensor");
  m.def("block_causal_mask(Tensor cu_seqlens, SymInt total, ScalarType dtype, int window) -> Tensor");
  m.def("check_documents(Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? mask, Tensor? position_ids, SymInt batch, SymInt seqlen) -> ()");
  m.def("checked_documents(Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? mask, Tensor? position_ids, SymInt batch, SymInt seqlen) -> (Tensor, Tensor)");
  m.def("check_unchanged(Tensor values, Tensor expected, str wanted=\"as it was\") -> ()");

  // padding
  m.def("unpad_layout(Tensor attention_mask, Tensor? unused_mask, bool host_totals) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("trim_padding_range(Tensor attention_mask, str side, int min_length, int multiple_of) -> Tensor");
  m.def("unpad_rows(Tensor[] inputs, Tensor attention_mask, Tensor? unused_mask) -> (Tensor[], Tensor, Tensor, Tensor, Tensor)");
  m.def("gather_rows(Tensor input, Tensor indices, SymInt total) -> Tensor");
  m.def("gather_rows_many(Tensor[] inputs, Tensor indices, SymInt total) -> Tensor[]");
  m.def("scatter_rows(Tensor packed, Tensor indices, SymInt batch, SymInt seqlen) -> Tensor");
  m.def("scatter_rows_many(Tensor[] packed, Tensor indices, SymInt batch, SymInt seqlen) -> Tensor[]");

  // packing
  m.def("pack_sequences(Tensor lengths, int capacity, str strategy, int alignment, int? max_sequences_per_bin, int min_bins, int bins_multiple_of, str overlong, bool balance, float token_cost, float square_cost, str ties, int? seed) -> (Tensor bin_offsets, Tensor item_indices, Tensor starts, Tensor piece_lengths, Tensor overlong_items, Tensor counts)");
  m.def("pack_ffd(Tensor lengths, int capacity, int alignment, bool ties_last) -> (Tensor, Tensor, Tensor)");
  m.def("pack_prefix_tree(Tensor tokens, Tensor cu_seqlens, Tensor? groups, int? capacity, int min_shared) -> (Tensor rows, Tensor segments, Tensor parents, Tensor position_ids, Tensor row_of_token, Tensor copies, Tensor bin_offsets, Tensor sample_bins, Tensor repeated)");

  // rope
  m.def("rope_qk(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? position_ids, int[]? sections, int? rotary_dim, bool interleaved, int unsqueeze_dim, bool conjugate) -> (Tensor, Tensor)");
  m.def("rope_qk_(Tensor(a!) q, Tensor(b!)? k, Tensor cos, Tensor sin, Tensor? position_ids, int[]? sections, int? rotary_dim, bool interleaved, int unsqueeze_dim, bool conjugate) -> ()");

  // conv
  m.def("causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, Tensor? initial_state, bool silu, bool output_final_state) -> (Tensor, Tensor)");
  m.def("causal_conv1d_backward(Tensor dout, Tensor? dfinal_state, Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, Tensor? initial_state, bool silu) -> (Tensor, Tensor, Tensor, Tensor)");

  // scan
  m.def("gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, Tensor? initial_state, float scale, bool use_qk_l2norm, bool output_final_state) -> (Tensor, Tensor)");
  m.def("gated_delta_rule_backward(Tensor dout, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, Tensor? initial_state, float scale, bool use_qk_l2norm) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("mamba2_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias, Tensor cu_seqlens, Tensor? initial_state, bool dt_softplus, float dt_min, float dt_max, bool output_final_state) -> (Tensor, Tensor)");
  m.def("mamba2_scan_backward(Tensor dout, Tensor? dfinal_state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias, Tensor cu_seqlens, Tensor? initial_state, bool dt_softplus, float dt_min, float dt_max) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("mamba2_gate(Tensor x, Tensor z, Tensor cu_seqlens) -> Tensor");
  m.def("mamba2_gate_backward(Tensor dout, Tensor x, Tensor z, Tensor cu_seqlens) -> (Tensor, Tensor)");

  // attention
  m.def("attention_plan(Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt total_q, SymInt total_k, SymInt num_heads, SymInt num_kv_heads, SymInt head_dim, bool causal, int window_left, int window_right, SymInt? head_dim_v=None, Tensor? visible_end=None) -> Tensor");
  m.def("varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? sinks, bool causal, float? softmax_scale, int window_left, int window_right, float softcap, Tensor? plan, Tensor? visible_end=None, Tensor? row_of_key=None) -> (Tensor, Tensor)");
  m.def("varlen_attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? sinks, bool causal, float? softmax_scale, int window_left, int window_right, float softcap, Tensor? plan, Tensor? visible_end=None, Tensor? row_of_key=None) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("paged_attention_plan(Tensor cu_seqlens_q, Tensor seqused_k, SymInt total_q, SymInt max_keys, SymInt num_heads, SymInt num_kv_heads, SymInt head_dim, bool causal, int window_left, int window_right, SymInt? head_dim_v=None) -> Tensor");
  m.def("paged_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor block_table, Tensor seqused_k, Tensor? sinks, bool causal, float? softmax_scale, int window_left, int window_right, float softcap, Tensor? plan) -> (Tensor, Tensor)");
  m.def("prefix_paths(Tensor cu_seqlens, Tensor parents, SymInt total, bool forks_anywhere=False) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("prefix_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor path_cu_seqlens, Tensor? sinks, Tensor row_of_key, Tensor key_offsets, Tensor keys_of_row, float? softmax_scale, int window_left, float softcap, Tensor? plan, bool? in_blocks=None) -> (Tensor, Tensor)");
  m.def("prefix_attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens, Tensor path_cu_seqlens, Tensor? sinks, Tensor row_of_key, Tensor key_offsets, Tensor keys_of_row, float? softmax_scale, int window_left, float softcap, Tensor? plan, bool? in_blocks=None) -> (Tensor, Tensor, Tensor, Tensor)");

  // logps
  m.def("logps_targets(Tensor labels, Tensor cu_seqlens, int ignore_index, SymInt vocab) -> Tensor");
  m.def("logps_rows(Tensor targets, SymInt size) -> Tensor");
  m.def("logps_allowed(Tensor allowed_ids, Tensor allowed_offsets, Tensor targets, SymInt vocab, int ahead) -> (Tensor ids, Tensor offsets)");
  m.def("logps_allowed_mask(Tensor ids, Tensor offsets, Tensor? index, SymInt first, SymInt columns) -> Tensor");
  m.def("logps_chunk_(Tensor logits, Tensor? bias, Tensor targets, SymInt first, Tensor scales, float inner, Tensor(a!) state, Tensor? mask=None) -> ()");
  m.def("logps_chunk_backward_(Tensor(a!) logits, Tensor? bias, Tensor targets, SymInt first, Tensor scales, float inner, Tensor lse, Tensor slopes, Tensor? mask=None) -> ()");
  m.def("mm_by_rows_(Tensor(a!) out, Tensor x, Tensor other, bool add) -> ()");
  m.def("token_logps(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? temperature, float outer, float inner, SymInt? chunk, SymInt? max_targets, SymInt keep_logits, bool more, str? group, Tensor? allowed_ids=None, Tensor? allowed_offsets=None) -> (Tensor logps, Tensor lse, Tensor entropy, Tensor sum_p2, Tensor mean_logit, Tensor top1, Tensor logits)");
  m.def("token_logps_backward(Tensor slopes, Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? temperature, Tensor lse, Tensor logits, float outer, float inner, SymInt? chunk, SymInt? max_targets, str? group, bool need_hidden, bool need_weight, bool need_bias, Tensor? allowed_ids=None, Tensor? allowed_offsets=None) -> (Tensor, Tensor, Tensor)");
  m.def("token_logps_backward_(Tensor slopes, Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? temperature, Tensor lse, Tensor(a!) logits, float outer, float inner, SymInt? chunk, SymInt? max_targets, str? group, bool need_hidden, bool need_weight, bool need_bias, Tensor? allowed_ids=None, Tensor? allowed_offsets=None) -> (Tensor, Tensor, Tensor)");
  m.def("kl_rows(Tensor logits, Tensor? bias, Tensor teacher_logits, Tensor? teacher_bias, Tensor targets, float inv_temperature, float teacher_inv_temperature, float beta) -> Tensor");
  m.def("kl_chunk_backward_(Tensor logits, Tensor? bias, Tensor teacher_logits, Tensor? teacher_bias, Tensor targets, float inv_temperature, float teacher_inv_temperature, float beta, Tensor stats, Tensor? scales, Tensor(a!) out) -> ()");
  m.def("kl_scale_kept_(Tensor dz, Tensor scales, Tensor(a!) out) -> ()");
  m.def("token_kl(Tensor hidden, Tensor weight, Tensor? bias, Tensor teacher_hidden, Tensor teacher_weight, Tensor? teacher_bias, Tensor targets, float inv_temperature, float teacher_inv_temperature, float beta, SymInt? chunk, SymInt? max_targets, SymInt keep_logits) -> (Tensor kl, Tensor stats, Tensor kept_dz)");
  m.def("token_kl_backward(Tensor? grad, Tensor hidden, Tensor weight, Tensor? bias, Tensor teacher_hidden, Tensor teacher_weight, Tensor? teacher_bias, Tensor targets, Tensor stats, Tensor kept_dz, float inv_temperature, float teacher_inv_temperature, float beta, SymInt? chunk, SymInt? max_targets, bool need_hidden, bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)");
}
