"""Attention over a group by heads: all-to-all to whole documents with a part of the heads, and back.

Jacobs et al., DeepSpeed Ulysses (2023). A rank with ``rows`` slots of the row gets all ``ranks * rows`` slots of
``num_heads / ranks`` heads, calls varlen_attention over the whole row, and sends the rows of others back. Every head is
computed as on one GPU, in the same order: out and gradients have the same bits. The heads of a rank are received and
sent in parts (overlap.py).

A rank receives, for n ranks, H heads over G key heads of dimension D and e bytes an element,
``(n-1)/n * rows * D * e * (2*H + 2*max(G, n))`` bytes in forward (q, k, v, out), and as many in backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from packing_ops._runtime.arguments import described
from packing_ops._runtime.batch_cache import BatchCache, forget, kept_with
from packing_ops.data.context_parallel import chunks_of_ranks, slots_of_chunks
from packing_ops.keys import PrefixPaths, checked_tree, plan_for
from packing_ops.metadata import PackedMetadata
from packing_ops.parallel.agreement import check_agreement
from packing_ops.parallel.collectives import (
    Received,
    as_16_byte_elements,
    no_second_derivative,
    rows_at,
    start_all_to_all,
)
from packing_ops.parallel.overlap import slices, together, ulysses_parts
from packing_ops.parallel.sharding import check_rows, whole_row
from packing_ops.varlen.attention import attend
from packing_ops.varlen.ops import attention_backward, attention_forward
from packing_ops.varlen.options import AttentionOptions, of_heads, refuse_in_tree

Order = tuple[torch.Tensor, torch.Tensor]  # of a zigzag row: _order


def attend_by_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: PackedMetadata | torch.Tensor,
    group: dist.ProcessGroup,
    scheme: str,
    options: AttentionOptions,
    *,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute ulysses_attention of checked options; return (out, lse), lse only if asked for."""
    documents = check_rows(q, k, v, documents)
    ranks, rows = group.size(), q.shape[0]
    if ranks == 1:
        out, lse = attend(q, k, v, documents, documents, options)
        return out, lse if return_lse else None
    # Checks, first those of all ranks together.
    check_agreement("ulysses_attention", scheme, q, k, v, documents, group, options, return_lse=return_lse)
    cu_seqlens = whole_row(documents, rows, ranks)
    if why := head_refusal(q.shape[1], k.shape[1], ranks):
        raise ValueError(f"{why} (gathered_attention takes any)")
    if q.shape[1] % max(k.shape[1], 1):
        raise ValueError(f"k: expected num_kv_heads that divide num_q_heads={q.shape[1]}, got {k.shape[1]}")
    sinks = options.sinks
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks: expected [num_q_heads={q.shape[1]}], got {described(sinks)}")
    # What each part of the heads needs.
    own = q.shape[1] // ranks
    options = of_heads(options, slice(own * group.rank(), own * (group.rank() + 1)))
    order = _order(cu_seqlens, rows, ranks, documents) if scheme == "zigzag" else None
    cache = paths = None
    if isinstance(documents, PackedMetadata):
        options, cache = options._replace(visible_end=documents.visible_end), documents._cache
        if documents.paths is not None:
            refuse_in_tree(options)
            found = checked_tree(documents.paths, cu_seqlens, rows * ranks, cache)
            paths = found if isinstance(found, PrefixPaths) else None
    heads = [(tensor.shape[1], tensor.shape[2]) for tensor in (q, k, v)]
    parts = 1 if torch.compiler.is_compiling() else ulysses_parts(ranks, rows, heads, q.element_size())
    # Tensors are passed next to the options: autograd and torch.compile see only the arguments of apply.
    tensors = options.sinks, cu_seqlens, options.visible_end, paths, order
    try:
        without = options._replace(sinks=None, visible_end=None)
        out, *of_rows = _Attention.apply(q, k, v, *tensors, group, cache, without, return_lse, parts)
    except ValueError:
        forget()  # as varlen_attention
        raise
    return out, of_rows[0].T.contiguous() if return_lse else None


def head_refusal(num_heads: int, num_kv_heads: int, ranks: int) -> str:
    """Return why these heads cannot be dealt to the ranks; empty if they can."""
    if num_heads % ranks:
        return f"num_q_heads: expected a multiple of the {ranks} ranks, got {num_heads}"
    if num_kv_heads % ranks and ranks % max(num_kv_heads, 1):
        return f"num_kv_heads: expected a multiple of the {ranks} ranks or a divisor of them, got {num_kv_heads}"
    return ""


def _order(cu_seqlens: torch.Tensor, rows: int, ranks: int, documents: PackedMetadata | torch.Tensor) -> Order:
    """Return (row_of, gathered_of): the row's slot of each row that an all-gather gives, and the other way round."""
    cache = documents._cache if isinstance(documents, PackedMetadata) else None

    def make() -> Order:
        starts = torch.nn.functional.pad(cu_seqlens, (0, 1), value=ranks * rows).long()
        begin, end = chunks_of_ranks(starts, rows, ranks, "zigzag")
        row_of = torch.cat([slots_of_chunks(starts, begin[r], end[r], rows)[0] for r in range(ranks)])
        slots = torch.arange(ranks * rows, device=row_of.device)
        return row_of, torch.empty_like(row_of).scatter_(0, row_of, slots)

    return kept_with((cu_seqlens,), ("rows of ranks", rows, ranks), make, cache=cache)


# --- rows of this rank with all heads <-> all rows with this rank's heads ---


class _Attention(torch.autograd.Function):
    """All parts of the heads (overlap.py) set out at once, and what attention gives of a part goes back as it is there:
    attention over one part runs while the next is received and the last one sent."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        cu_seqlens: torch.Tensor,
        visible_end: torch.Tensor | None,
        paths: PrefixPaths | None,
        order: Order | None,
        group: dist.ProcessGroup,
        cache: BatchCache | None,
        options: AttentionOptions,
        return_lse: bool,
        parts: int,
    ) -> tuple[torch.Tensor, ...]:
        """Return out, and with return_lse lse, whose rows are the first dimension here."""
        size, ctx.options = group.size(), options
        keys = cu_seqlens if paths is None else paths
        options = options._replace(sinks=sinks, visible_end=visible_end)
        # k and v before q: attention needs all keys before its first tile, and q is the largest.
        coming = [
            [start_all_to_all(_by_head(tensor, size, part, parts), group) for tensor in (k, v, q)]
            for part in range(parts)
        ]
        leaving, saved = [], []
        for of_part in _of_parts(options, parts, q.shape[1] // size):
            key, value, query = (_in_row_order(received().flatten(0, 1), order) for received in coming.pop(0))
            plan = plan_for(query, key, value, cu_seqlens, keys, of_part, cache)
            out, lse = attention_forward(query, key, value, cu_seqlens, keys, of_part, plan)
            rows = (out, lse.T) if return_lse else (out,)
            leaving.append([start_all_to_all(_by_rank(each, size, order), group) for each in rows])
            saved += [query, key, value, out, lse]
        ctx.save_for_backward(sinks, cu_seqlens, visible_end, plan, *saved)
        ctx.group, ctx.order, ctx.paths = group, order, paths
        ctx.num_heads = [tensor.shape[1] for tensor in (q, k, v)]
        ctx.set_materialize_grads(False)
        return tuple(_whole(leaving, [q.shape[1]] * len(rows)))

    @staticmethod
    @no_second_derivative("ulysses_attention")
    def backward(ctx: Any, *of_rows: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        sinks, cu_seqlens, visible_end, plan, *saved = ctx.saved_tensors
        size, group, order = ctx.group.size(), ctx.group, ctx.order
        keys = cu_seqlens if ctx.paths is None else ctx.paths
        parts, rows, heads = len(saved) // 5, len(saved[0]) // ctx.group.size(), ctx.num_heads[0]
        # Every rank sends the same tensors, also those that its loss does not use.
        shapes = (rows, heads, saved[3].shape[2]), (rows, heads)
        given = [
            like.new_zeros(shape) if each is None else each
            for each, like, shape in zip(of_rows, saved[3:5], shapes, strict=False)
        ]
        coming = [
            [start_all_to_all(_by_head(each, size, part, parts), group) for each in given] for part in range(parts)
        ]
        leaving, dsinks = [], []
        options = ctx.options._replace(sinks=sinks, visible_end=visible_end)
        for part, of_part in enumerate(_of_parts(options, parts, heads // size)):
            saved_of = saved[5 * part : 5 * part + 5]
            do, *dl = (_in_row_order(received().flatten(0, 1), order) for received in coming.pop(0))
            gradients = attention_backward(do, dl[0].T if dl else None, saved_of, cu_seqlens, keys, of_part, plan)
            leaving.append([start_all_to_all(_by_rank(each, size, order), group) for each in gradients[:3]])
            dsinks.append(gradients[3])
        dsink = None if sinks is None else together(dsinks, 0)
        return *_whole(leaving, ctx.num_heads), dsink, *(9 * [None])


def _of_parts(options: AttentionOptions, parts: int, heads: int) -> list[AttentionOptions]:
    """Return the options of each part of this rank's ``heads``."""
    return [of_heads(options, part) for part in slices(heads, parts)]


def _by_head(rows: torch.Tensor, ranks: int, part: int, parts: int) -> torch.Tensor:
    """Return ``[ranks, rows, heads of that rank, ...]`` of ``[rows, heads, ...]``, of one of their parts; too few
    heads are repeated.
    """
    heads = rows.shape[1]
    if heads < ranks:
        return rows.transpose(0, 1).repeat_interleave(ranks // heads, 0)[:, :, None]
    return rows.unflatten(1, (ranks, parts, heads // ranks // parts))[:, :, part].transpose(0, 1)


def _by_rank(rows: torch.Tensor, ranks: int, order: Order | None) -> torch.Tensor:
    """Return ``[ranks, rows of that rank, heads, ...]`` of all rows."""
    if order is not None:
        rows = rows_at(rows, order[0])
    return rows.unflatten(0, (ranks, rows.shape[0] // ranks))


def _in_row_order(gathered: torch.Tensor, order: Order | None) -> torch.Tensor:
    return gathered if order is None else rows_at(gathered, order[1])


def _whole(parts: Sequence[Sequence[Received]], num_heads: Sequence[int]) -> list[torch.Tensor]:
    """Return ``[rows, heads, ...]`` of each tensor, of ``[ranks, rows, heads of that rank, ...]`` for all its parts;
    gradients of repeated heads are summed.
    """
    found = []
    for of_tensor, heads in zip(zip(*parts, strict=True), num_heads, strict=True):
        received = [each() for each in of_tensor]
        ranks, dtype = len(received[0]), received[0].dtype
        if heads < ranks:
            received = [part.unflatten(0, (heads, ranks // heads)).sum(1) for part in received]
        by_row = torch.stack([as_16_byte_elements(part).transpose(0, 1) for part in received], 2)
        found.append(by_row.view(dtype).flatten(1, 3))
    return found
