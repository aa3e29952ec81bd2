"""Shapes of the ops' results for torch.compile: one entry an op, which gets the arguments by their names in
csrc/schema.cpp.

Those of attention are in varlen/ops.py; those of token_logps and token_kl, whose sizes come from their chunks, in
losses/.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from packing_ops._runtime.arguments import sum_dtype

INT32, INT64 = torch.int32, torch.int64


def nothing(a: SimpleNamespace) -> None:
    """Return nothing, as an op that writes into its arguments, or checks them."""
    return None


def like(*tensors: torch.Tensor | None, of: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Empty tensors of the tensors' shapes, of no rows for None, in the dtype of ``of``."""
    return tuple(of.new_empty(0 if t is None else t.shape) for t in tensors)


def empty(tensor: torch.Tensor, *sizes: Any, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
    """Empty tensors of these sizes, on the device of ``tensor``."""
    return tuple(tensor.new_empty(size, dtype=tensor.dtype if dtype is None else dtype) for size in sizes)


def on_cpu(*sizes: Any, dtype: torch.dtype = INT64) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(size, dtype=dtype, device="cpu") for size in sizes)


def new_sizes(count: int) -> list[Any]:
    """Make sizes that only the values decide."""
    return [torch.library.get_ctx().new_dynamic_size() for _ in range(count)]


def unpadded(a: SimpleNamespace, total: Any, totals: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return indices, cu_seqlens, seqused and the totals of an attention_mask."""
    mask = a.attention_mask
    return *empty(mask, total, dtype=INT64), *empty(mask, mask.shape[0] + 1, mask.shape[0], dtype=INT32), totals


def unpadded_rows(a: SimpleNamespace) -> tuple[Any, ...]:
    (total,) = new_sizes(1)
    return [t.new_empty((total, *t.shape[2:])) for t in a.inputs], *unpadded(a, total, *on_cpu(2))


def bins(a: SimpleNamespace) -> tuple[torch.Tensor, ...]:
    bins_plus_one = torch.library.get_ctx().new_dynamic_size(min=1)
    pieces, overlong = new_sizes(2)
    return on_cpu(bins_plus_one, pieces, pieces, (pieces, *a.lengths.shape[1:]), overlong, 4)


def tree(a: SimpleNamespace) -> tuple[torch.Tensor, ...]:
    rows, segments = new_sizes(2)
    bins_plus_one = torch.library.get_ctx().new_dynamic_size(min=1)
    others = rows, a.tokens.numel(), rows, bins_plus_one, a.cu_seqlens.numel() - 1, 2
    return *on_cpu(rows), *on_cpu(segments + 1, segments, dtype=INT32), *on_cpu(*others)


def paths(a: SimpleNamespace) -> tuple[torch.Tensor, ...]:
    (keys,) = new_sizes(1)
    return empty(a.cu_seqlens, a.cu_seqlens.shape[0], keys, a.total + 1, keys, dtype=INT32)


def states(a: SimpleNamespace, *sizes: Any) -> Any:
    """Return the shape of the final states, one a document; empty if the op is not asked for them."""
    return (a.cu_seqlens.numel() - 1, *sizes) if a.output_final_state else (0,)


def gradients_of_head(a: SimpleNamespace) -> tuple[torch.Tensor, ...]:
    shapes = (a.need_hidden, a.hidden.shape), (a.need_weight, a.weight.shape), (a.need_bias, a.weight.shape[:1])
    return empty(a.hidden, *(shape if needed else 0 for needed, shape in shapes))


FAKES: dict[str, Callable[[SimpleNamespace], Any]] = {
    # boundaries
    "cu_seqlens_from_lengths": lambda a: a.lengths.new_empty(a.lengths.numel() + 1, dtype=INT32),
    "position_ids_from_cu_seqlens": lambda a: a.cu_seqlens.new_empty(a.total, dtype=INT64),
    "seq_idx_from_cu_seqlens": lambda a: a.cu_seqlens.new_empty(a.total, dtype=INT32),
    "cu_seqlens_from_position_ids": lambda a: (
        *empty(a.position_ids, a.position_ids.numel() + 1, dtype=INT32), *empty(a.position_ids, 1, dtype=INT64)
    ),
    "prompt_end_indices": lambda a: empty(a.uids, a.uids.numel(), 1, dtype=INT64),
    "mask_boundary_labels": lambda a: a.labels.new_empty(a.labels.shape),
    "mask_boundary_labels_shifted_": nothing,
    "shift_labels": lambda a: a.labels.new_empty(a.labels.shape),
    "count_target_tokens": lambda a: a.labels.new_empty((), dtype=INT64),
    "block_causal_mask": lambda a: a.cu_seqlens.new_empty((a.total, a.total), dtype=a.dtype),
    "check_documents": nothing,
    "checked_documents": lambda a: (
        *like(a.cu_seqlens_q, of=a.cu_seqlens_q),
        *(empty(a.cu_seqlens_q, 0, dtype=INT64) if a.position_ids is None else like(a.position_ids, of=a.position_ids)),
    ),
    "check_unchanged": nothing,
    # sums over documents
    "segment_sum": lambda a: a.values.new_empty(
        (a.cu_seqlens.numel() - 1, *a.values.shape[1:]), dtype=sum_dtype(a.values.dtype)
    ),
    "segment_sum_backward": lambda a: a.grad.new_empty((a.total, *a.grad.shape[1:]), dtype=a.dtype),
    "router_sums": lambda a: empty(
        a.probabilities,
        *2 * [(a.cu_seqlens.numel() - 1, a.probabilities.shape[1])],
        a.cu_seqlens.numel() - 1,
        dtype=sum_dtype(a.probabilities.dtype),
    ),
    "gae": lambda a: empty(a.rewards, *2 * [a.rewards.shape[0]], dtype=sum_dtype(a.rewards.dtype)),
    # padding
    "unpad_layout": lambda a: unpadded(
        a,
        a.attention_mask.numel(),
        torch.empty(2, dtype=INT64, device="cpu" if a.host_totals else a.attention_mask.device),
    ),
    "trim_padding_range": lambda a: torch.empty(2, dtype=INT64, device="cpu"),
    "unpad_rows": unpadded_rows,
    "gather_rows": lambda a: a.input.new_empty((a.total, *a.input.shape[2:])),
    "gather_rows_many": lambda a: [t.new_empty((a.total, *t.shape[2:])) for t in a.inputs],
    "scatter_rows": lambda a: a.packed.new_empty((a.batch, a.seqlen, *a.packed.shape[1:])),
    "scatter_rows_many": lambda a: [t.new_empty((a.batch, a.seqlen, *t.shape[1:])) for t in a.packed],
    # packing
    "pack_sequences": bins,
    "pack_ffd": lambda a: empty(a.lengths, a.lengths.numel() + 1, a.lengths.numel(), 1, dtype=INT64),
    "pack_prefix_tree": tree,
    "prefix_paths": paths,
    # layers
    "rope_qk": lambda a: (torch.empty_like(a.q), a.q.new_empty(0) if a.k is None else torch.empty_like(a.k)),
    "rope_qk_": nothing,
    "causal_conv1d": lambda a: empty(a.x, a.x.shape, states(a, a.x.shape[1], a.weight.shape[1] - 1)),
    "causal_conv1d_backward": lambda a: like(a.x, a.weight, a.bias, a.initial_state, of=a.x),
    "gated_delta_rule": lambda a: (
        a.v.new_empty(a.v.shape), a.g.new_empty(states(a, a.v.shape[1], a.q.shape[2], a.v.shape[2]))
    ),
    "gated_delta_rule_backward": lambda a: (
        *(t.new_empty(t.shape) for t in (a.q, a.k, a.v, a.g, a.beta)), *like(a.initial_state, of=a.g)
    ),
    "mamba2_scan": lambda a: (
        a.x.new_empty(a.x.shape), a.dt.new_empty(states(a, a.x.shape[1], a.x.shape[2], a.B.shape[2]))
    ),
    "mamba2_scan_backward": lambda a: (
        *(t.new_empty(t.shape) for t in (a.x, a.dt, a.dt, a.B, a.C, a.dt)), *like(a.initial_state, of=a.dt)
    ),
    "mamba2_gate": lambda a: a.x.new_empty(a.x.shape),
    "mamba2_gate_backward": lambda a: empty(a.x, *2 * [a.x.shape]),
    # log-probabilities
    "logps_targets": lambda a: a.labels.new_empty(a.labels.numel(), dtype=INT32),
    "logps_rows": lambda a: a.targets.new_empty(a.size, dtype=INT64),
    "logps_allowed": lambda a: (
        *empty(a.allowed_ids, a.allowed_ids.shape[0], dtype=INT32),
        *empty(a.allowed_ids, a.targets.shape[0] + 1, dtype=INT64),
    ),
    "logps_allowed_mask": lambda a: a.ids.new_empty(
        a.offsets.shape[0] - 1 if a.index is None else a.index.shape[0], (a.columns + 31) // 32, dtype=INT32
    ),
    "logps_chunk_": nothing,
    "logps_chunk_backward_": nothing,
    "mm_by_rows_": nothing,
    "token_logps_backward": gradients_of_head,
    "token_logps_backward_": gradients_of_head,
    "kl_rows": lambda a: a.logits.new_empty((4, a.logits.shape[0]), dtype=sum_dtype(a.logits.dtype)),
    "kl_chunk_backward_": nothing,
    "kl_scale_kept_": nothing,
    "token_kl_backward": gradients_of_head,
}  # fmt: skip
