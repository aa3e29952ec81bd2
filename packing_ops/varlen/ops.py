"""The ops of attention: the one for the keys of a call, shapes for torch.compile, gradients."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import sum_dtype
from packing_ops._runtime.autograd import register_autograd, register_no_autograd
from packing_ops.keys import KeyPages, Keys, PrefixPaths
from packing_ops.varlen.options import AttentionOptions
from packing_ops.varlen.prefix_attention import along_paths, gradients_of, token_major


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    keys: Keys,
    options: AttentionOptions,
    plan: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse), by the op for these keys."""
    if isinstance(keys, PrefixPaths):
        tree = keys.cu_seqlens, options.sinks, keys.slot_of_key, keys.key_offsets, keys.keys_of_slot
        return gate.prefix_attention(q, k, v, cu_seqlens_q, *tree, *options.arguments_of_tree(plan), keys.in_blocks)
    if isinstance(keys, KeyPages):
        return gate.paged_attention(q, k, v, cu_seqlens_q, *keys, *options.arguments(plan)[:-1])
    return gate.varlen_attention(q, k, v, cu_seqlens_q, keys, *options.arguments(plan))


def attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    saved: Sequence[torch.Tensor],
    cu_seqlens_q: torch.Tensor,
    keys: torch.Tensor | PrefixPaths,
    options: AttentionOptions,
    plan: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv, dsinks), by the op's backward. ``saved``: q, k, v, out and lse."""
    if isinstance(keys, PrefixPaths):
        tree = keys.cu_seqlens, options.sinks, keys.slot_of_key, keys.key_offsets, keys.keys_of_slot
        after = *options.arguments_of_tree(plan), keys.in_blocks
        return gate.prefix_attention_backward(dout, dlse, *saved, cu_seqlens_q, *tree, *after)
    return gate.varlen_attention_backward(dout, dlse, *saved, cu_seqlens_q, keys, *options.arguments(plan))


# --- registration: shapes for torch.compile, gradients ---


def _plan_size(total_q: int, total_k: int, documents: int, group: int, visible_end: bool = False) -> int:
    """Call attention_plan_size of csrc/ops/attention/attention.h."""
    cu_seqlens = (2 * (documents + 1) + 7) // 8
    entries = 8 * (cu_seqlens + total_q * (group + 1) // 32 + total_k // 32 + 6 * documents)
    return 16 + entries + (total_q + total_k if visible_end else 0)


def _plan(a: SimpleNamespace) -> torch.Tensor:
    size, pages = 0, not hasattr(a, "total_k")
    if a.cu_seqlens_q.device.type == "cuda":
        sizes = a.total_q, 0 if pages else a.total_k, a.cu_seqlens_q.shape[0] - 1, a.num_heads // a.num_kv_heads
        size = 4 + _plan_size(*sizes) if pages else _plan_size(*sizes, a.visible_end is not None)
    return a.cu_seqlens_q.new_empty(size, dtype=torch.int32)


def _out_and_lse(a: SimpleNamespace) -> tuple[torch.Tensor, ...]:
    out = a.q.new_empty((*token_major(a.q).shape[:-1], a.v.shape[-1]))
    return out, a.q.new_empty(out.shape[-3:-1][::-1], dtype=sum_dtype(a.q.dtype))


def _gradients(a: SimpleNamespace) -> tuple[torch.Tensor, ...]:
    of_keys = not hasattr(a, "keys_of_row") and a.row_of_key is not None  # varlen_attention's: of each key of a path
    k, v, _ = along_paths(a.k, a.v, a.row_of_key, in_blocks=False) if of_keys else (a.k, a.v, None)
    dq, dk, dv = (token_major(t.new_empty(token_major(t).shape)) for t in (a.q, k, v))
    return dq, dk, dv, a.q.new_empty(0 if a.sinks is None else a.lse.shape[0], dtype=sum_dtype(a.q.dtype))


gate.register_fake("attention_plan", _plan)
gate.register_fake("paged_attention_plan", _plan)
gate.register_fake("paged_attention", _out_and_lse)
for _op in ("varlen_attention", "prefix_attention"):
    gate.register_fake(_op, _out_and_lse)
    gate.register_fake(f"{_op}_backward", _gradients)


def _varlen_attention_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, *ctx.options, plan, visible_end, row_of_key = inputs
    if row_of_key is not None:
        raise NotImplementedError("row_of_key: expected None where a gradient is recorded: prefix_attention has one")
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k, sinks, plan, visible_end)


def _varlen_attention_backward(
    ctx: Any, dout: torch.Tensor, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    *inputs, plan, visible_end = ctx.saved_tensors
    options = *ctx.options, plan, visible_end
    return *gradients_of(gate.varlen_attention_backward, dout, dlse, inputs, options), *(8 * [None])


register_autograd("varlen_attention", _varlen_attention_backward, setup_context=_varlen_attention_context)
register_no_autograd("varlen_attention_backward", of="varlen_attention")

register_no_autograd(
    "paged_attention",
    why="packing_ops::paged_attention has no gradient: keys in pages are for generation, train with keys end to end",
)
