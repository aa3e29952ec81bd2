"""Attention over prefix trees: samples that share a prefix, whose shared tokens are in the row once.

A tree is a row of segments in depth-first order. A segment's keys are its path: the rows of its ancestors, then its
own. varlen_attention's kernels run on the paths: queries of a segment are the last ones of a document. They read
k and v in place, by the row of each tile's first key. Of paths whose rows do not follow each other in every 128 keys
(forks that another library puts anywhere) k and v are gathered. The backward writes dk and dv of each key of a path,
which are added up by row.

A row's out and lse depend only on the keys that it sees. Gradients of a document's last queries do not depend on how
many of them a call has. So sharing changes no bit of out and lse, nor of the gradients of rows that only one sample
holds. dk and dv of a shared row are sums over the segments that see it, in their order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from packing_ops._runtime import gate
from packing_ops._runtime.autograd import call_below_autograd, implements, register_autograd, register_no_autograd
from packing_ops.keys import FORK_ALIGNMENT


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
