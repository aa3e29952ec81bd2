"""Attention over prefix trees: samples that share a prefix, whose shared tokens stand in the row once.

A tree is a row of segments in depth-first order. A segment's keys are its path: the rows of its ancestors, then its own.
k and v are gathered along the paths, and varlen_attention's kernels run on them: queries of a segment are the last ones of a
document. A row's out, lse and dq depend on the keys that it sees alone, so sharing changes no bit of them. dk and dv of a
shared row are sums over the segments that see it, in their order.

The gathered k and v are not kept for the backward, which gathers them again.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from packing_ops import _ops
from packing_ops._autograd import on_its_own, past_autograd, register_autograd, register_no_autograd
from packing_ops._batch_cache import BatchCache, is_captured, kept_with


class PrefixPaths(NamedTuple):
    """The paths of a tree's segments, one after the other: which rows of k and v they hold. int32, on the device of k.

    Attributes:
        cu_seqlens: ``[num_segments + 1]``, where each path starts in ``rows``.
        rows: ``[paths]``, the row of each key.
        copy_offsets: ``[total + 1]``; row ``r`` stands at the indices ``copies[copy_offsets[r] : copy_offsets[r + 1]]`` of rows.
        copies: ``[paths]``.
        shares: whether a segment has a parent. Without, the segments are documents, and attention gathers nothing.
    """

    cu_seqlens: torch.Tensor
    rows: torch.Tensor
    copy_offsets: torch.Tensor
    copies: torch.Tensor
    shares: bool = True

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """As the op takes them."""
        return self.cu_seqlens, self.rows, self.copy_offsets, self.copies

    def padded(self, total: int) -> "PrefixPaths":
        """Of the same tree in a row of ``total`` slots."""
        more = total + 1 - self.copy_offsets.shape[0]
        last = self.copy_offsets[-1:].expand(more)
        return self._replace(copy_offsets=torch.cat([self.copy_offsets, last]))

    def to(self, device: torch.device | str | None) -> "PrefixPaths":
        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device or tensor.device, non_blocking=True)

        cu_seqlens, rows, copy_offsets, copies = map(move, self.tensors)
        return PrefixPaths(cu_seqlens, rows, copy_offsets, copies, self.shares)


def prefix_paths(cu_seqlens: torch.Tensor, parents: torch.Tensor, total: int) -> PrefixPaths:
    """The paths of a tree's segments. Tensors on CUDA are copied to the host, which waits for them.

    Args:
        cu_seqlens: int32 ``[num_segments + 1]``; a segment with children has a multiple of 128 tokens.
        parents: int32 ``[num_segments]``, the index of an earlier segment, -1 for a root; segments are in depth-first order.
        total: rows, those after the last segment included.

    Example:
        >>> cu_seqlens = torch.tensor([0, 128, 130, 131], dtype=torch.int32)
        >>> paths = prefix_paths(cu_seqlens, torch.tensor([-1, 0, 0], dtype=torch.int32), 131)
        >>> paths.cu_seqlens.tolist(), paths.rows[128 + 128 :].tolist()[:4], paths.rows[-1:].tolist()
        ([0, 128, 258, 387], [128, 129, 0, 1], [130])

    Raises:
        ValueError: segments or parents that are no tree in this form; the message names the argument.
    """
    path_cu_seqlens, rows, copy_offsets, copies = _ops.prefix_paths(cu_seqlens, parents, total)
    shares = torch.compiler.is_compiling() or bool((parents >= 0).any())
    return PrefixPaths(path_cu_seqlens, rows, copy_offsets, copies, shares)


def paths_of_rows(cu_seqlens: torch.Tensor, rows: torch.Tensor, total: int) -> PrefixPaths:
    """The paths of a library that finds their rows itself. No synchronisation.

    Args:
        cu_seqlens: int32 ``[num_segments + 1]``, where each path starts in ``rows``.
        rows: integer ``[paths]``.
        total: rows of k and v.

    Example:
        >>> paths = paths_of_rows(torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 1, 0, 1, 2]), 3)
        >>> paths.copy_offsets.tolist(), paths.copies.tolist()
        ([0, 2, 4, 5], [0, 2, 1, 3, 4])
    """
    in_order, copies = rows.sort(stable=True)
    copy_offsets = torch.searchsorted(in_order, torch.arange(total + 1, device=rows.device))
    return PrefixPaths(cu_seqlens, rows.int(), copy_offsets.int(), copies.int())


def kept_paths(cu_seqlens: torch.Tensor, parents: torch.Tensor, total: int, cache: BatchCache | None) -> PrefixPaths:
    """prefix_paths, once for the layers of a model."""
    if is_captured(cu_seqlens):
        raise ValueError(
            "parents: expected PackedMetadata.from_prefix_tree in place of parents while a CUDA graph is captured, since "
            "the host reads them"
        )
    key = ("paths", total)
    return kept_with((cu_seqlens, parents), key, lambda: prefix_paths(cu_seqlens, parents, total), cache=cache)


# --- the op and its backward ---


def token_major(rows: torch.Tensor) -> torch.Tensor:
    """``[1, num_heads, total, head_dim]`` as ``[1, total, num_heads, head_dim]``, and back; three dimensions are so."""
    return rows if rows.dim() == 3 else rows.transpose(1, 2)


def _along_paths(rows: torch.Tensor, path_rows: torch.Tensor, total: int) -> torch.Tensor:
    dim = 0 if rows.dim() == 3 else 2
    if rows.shape[dim] != total:
        raise ValueError(f"parents: expected a tree of the {rows.shape[dim]} rows of k and v, got one of {total} rows")
    return rows.index_select(dim, path_rows)


def _sum_of_copies(grad: torch.Tensor, copy_offsets: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
    """Of each row, over its indices in the paths, in ascending order."""
    by_token = token_major(grad)
    flat = by_token.reshape(copies.shape[0], by_token.shape[-2] * by_token.shape[-1])
    summed = F.embedding_bag(copies, flat, copy_offsets, mode="sum", include_last_offset=True)
    return token_major(summed.view(*by_token.shape[:-3], -1, *by_token.shape[-2:]))


@on_its_own
def _prefix_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, ...]:
    path_cu_seqlens, path_rows, copy_offsets, _, *options = given
    k, v = (_along_paths(t, path_rows, copy_offsets.shape[0] - 1) for t in (k, v))
    return _ops.varlen_attention(q, k, v, cu_seqlens, path_cu_seqlens, *_as_varlen(*options))


@on_its_own
def _prefix_attention_backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, ...]:
    out, lse, cu_seqlens, path_cu_seqlens, path_rows, copy_offsets, copies, *options = given
    k, v = (_along_paths(t, path_rows, copy_offsets.shape[0] - 1) for t in (k, v))
    dq, dk, dv, dsinks = _ops.varlen_attention_backward(
        dout, dlse, q, k, v, out, lse, cu_seqlens, path_cu_seqlens, *_as_varlen(*options)
    )
    dk, dv = (_sum_of_copies(grad, copy_offsets, copies) for grad in (dk, dv))
    return dq, dk, dv, dsinks


def _as_varlen(
    sinks: torch.Tensor | None, softmax_scale: float | None, left: int, softcap: float, plan: torch.Tensor | None
) -> tuple[Any, ...]:
    """The options as varlen_attention's op takes them: causal, no window to the right, no visible_end."""
    return sinks, True, softmax_scale, left, -1, softcap, plan, None


# --- registration: gradients; the shapes are those of varlen_attention, in attention.py ---

_registrations = torch.library.Library("packing_ops", "IMPL")
for _key in ("CPU", "CUDA"):
    _registrations.impl("prefix_attention", _prefix_attention, _key)
    _registrations.impl("prefix_attention_backward", _prefix_attention_backward, _key)


@_ops.register_fake("prefix_paths")
def _(cu_seqlens: torch.Tensor, parents: torch.Tensor, total: int) -> tuple[torch.Tensor, ...]:
    paths = torch.library.get_ctx().new_dynamic_size()
    sizes = cu_seqlens.shape[0], paths, total + 1, paths
    return tuple(cu_seqlens.new_empty(size, dtype=torch.int32) for size in sizes)


def _context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, *tree, sinks, ctx.softmax_scale, ctx.left, ctx.softcap, plan = inputs
    ctx.save_for_backward(q, k, v, *output, *tree, sinks, plan)


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    *inputs, sinks, plan = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(inputs[3])
    options = ctx.softmax_scale, ctx.left, ctx.softcap, plan
    dq, dk, dv, dsinks = past_autograd(_ops.prefix_attention_backward, dout, dlse, *inputs, sinks, *options)
    return dq, dk, dv, *(5 * [None]), None if sinks is None else dsinks, *(4 * [None])


register_autograd("prefix_attention", _backward, setup_context=_context)
register_no_autograd("prefix_attention_backward", of="prefix_attention")
