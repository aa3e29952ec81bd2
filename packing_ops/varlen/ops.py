"""The ops of attention: the one for the keys of a call, shapes for torch.compile, gradients.

A prefix tree is a row of segments in depth-first order. A segment's keys are its path: the rows of its ancestors, then
its own. varlen_attention's kernels run on the paths: queries of a segment are the last ones of a document. They read
k and v in place, by the row of each tile's first key. Of paths whose rows do not follow each other in every 128 keys
(forks that another library puts anywhere) k and v are gathered. The backward writes dk and dv of each key of a path,
which are added up by row.

A row's out and lse depend only on the keys that it sees. Gradients of a document's last queries do not depend on how
many of them a call has. So sharing changes no bit of out and lse, nor of the gradients of rows that only one sample
holds. dk and dv of a shared row are sums over the segments that see it, in their order.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import sum_dtype
from packing_ops._runtime.autograd import call_below_autograd, implements, register_autograd, register_no_autograd
from packing_ops.keys import FORK_ALIGNMENT, KeyPages, Keys, PrefixPaths
from packing_ops.varlen.options import AttentionOptions


def token_major(rows: torch.Tensor) -> torch.Tensor:
    """Return ``[1, num_heads, total, head_dim]`` as ``[1, total, num_heads, head_dim]`` and back; three dimensions
    stay.
    """
    return rows if rows.dim() == 3 else rows.transpose(1, 2)


def along_paths(
    k: torch.Tensor, v: torch.Tensor, row_of_key: torch.Tensor, in_blocks: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return k, v and row_of_key for a kernel that reads rows in place, or k and v gathered and None."""
    tokens = 0 if k.dim() == 3 else 2
    if in_blocks and k.shape[tokens] >= FORK_ALIGNMENT:  # a shorter row has no fork
        return k, v, row_of_key
    return k.index_select(tokens, row_of_key), v.index_select(tokens, row_of_key), None


def _sum_by_row(grad: torch.Tensor, key_offsets: torch.Tensor, keys_of_row: torch.Tensor) -> torch.Tensor:
    """Add up the gradients of the keys of each row, in ascending order."""
    by_token = token_major(grad)
    flat = by_token.reshape(keys_of_row.shape[0], by_token.shape[-2] * by_token.shape[-1])
    summed = F.embedding_bag(keys_of_row, flat, key_offsets, mode="sum", include_last_offset=True)
    return token_major(summed.view(*by_token.shape[:-3], -1, *by_token.shape[-2:]))


@implements("prefix_attention")
def _prefix_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, ...]:
    path_cu_seqlens, sinks, row_of_key, _, _, *options = given
    of_varlen, in_blocks = _as_varlen(sinks, *options)
    k, v, row_of_key = along_paths(k, v, row_of_key, in_blocks)
    return gate.varlen_attention(q, k, v, cu_seqlens, path_cu_seqlens, *of_varlen, row_of_key)


@implements("prefix_attention_backward")
def _prefix_attention_backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, ...]:
    out, lse, cu_seqlens, path_cu_seqlens, sinks, row_of_key, key_offsets, keys_of_row, *options = given
    of_varlen, in_blocks = _as_varlen(sinks, *options)
    k, v, row_of_key = along_paths(k, v, row_of_key, in_blocks)
    dq, dk, dv, dsinks = gate.varlen_attention_backward(
        dout, dlse, q, k, v, out, lse, cu_seqlens, path_cu_seqlens, *of_varlen, row_of_key
    )
    dk = _sum_by_row(dk, key_offsets, keys_of_row)
    dv = _sum_by_row(dv, key_offsets, keys_of_row)
    return dq, dk, dv, dsinks


def _as_varlen(
    sinks: torch.Tensor | None, softmax_scale: float | None, left: int, *others: Any
) -> tuple[tuple[Any, ...], bool]:
    """Return the options as varlen_attention's op takes them, causal and without visible_end, and in_blocks.

    others: softcap and the plan, the same in both ops, then in_blocks unless it is None.
    """
    return (sinks, True, softmax_scale, left, -1, *others[:2], None), any(others[2:])


def gradients_of(
    op: Callable[..., tuple[torch.Tensor, ...]], dout: torch.Tensor | None, dlse: torch.Tensor | None,
    inputs: Sequence[torch.Tensor], options: tuple[Any, ...],
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k, v, both cu_seqlens and sinks. inputs: these, with out and lse after v, and more."""
    dout = torch.zeros_like(inputs[3]) if dout is None else dout
    dq, dk, dv, dsinks = call_below_autograd(op, dout, dlse, *inputs, *options)
    return dq, dk, dv, None, None, None if inputs[7] is None else dsinks


def _context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    # after_plan: in_blocks
    (q, k, v, *tree), (*ctx.options, plan), ctx.after_plan = inputs[:9], inputs[9:13], inputs[13:]
    ctx.save_for_backward(q, k, v, *output, *tree, plan)


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    *inputs, plan = ctx.saved_tensors
    options = *ctx.options, plan, *ctx.after_plan
    others = 3 + len(options)  # three tensors of the tree
    return *gradients_of(gate.prefix_attention_backward, dout, dlse, inputs, options), *(others * [None])


register_autograd("prefix_attention", _backward, setup_context=_context)
register_no_autograd("prefix_attention_backward", of="prefix_attention")


# --- prefix trees ---


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
