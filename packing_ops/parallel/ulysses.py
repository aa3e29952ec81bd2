"""Attention over a group by heads: all-to-all to whole documents with a part of the heads, and back.

Jacobs et al., DeepSpeed Ulysses (2023). A rank with ``rows`` slots of the row gets all ``ranks * rows`` slots of
``num_heads / ranks`` heads, calls varlen_attention over the whole row, and sends the rows of others back. Every head is
computed as on one GPU, in the same order: out and gradients have the same bits.

A rank receives, for n ranks, H heads over G key heads of dimension D and e bytes an element,
``(n-1)/n * rows * D * e * (2*H + 2*max(G, n))`` bytes in forward (q, k, v, out), and as many in backward.
"""

from typing import Any

import torch
import torch.distributed as dist

from packing_ops._arguments import check_tensor, described
from packing_ops._batch_cache import kept_with
from packing_ops.attention import varlen_attention
from packing_ops.data.context_parallel import chunks_of_ranks, slots_of_chunks
from packing_ops.metadata import PackedMetadata
from packing_ops.parallel.agreement import check_agreement
from packing_ops.parallel.collectives import Group, dense, no_second_derivative, process_group, start_all_to_all
from packing_ops.parallel.sharding import check_rows, check_scheme, whole_row

Order = tuple[torch.Tensor, torch.Tensor]  # of a zigzag row: _order


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: PackedMetadata | torch.Tensor,
    group: Group | None = None,
    *,
    scheme: str = "contiguous",
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """varlen_attention over documents whose rows lie on all ranks of ``group``, each rank with a part of the heads.

    Every rank of the group calls it, forward and backward, in the same order. Differentiable as varlen_attention.

    Args:
        q: ``[rows, num_q_heads, head_dim]``, this rank's slots of the row, equally many on all ranks; num_q_heads is a
            multiple of the ranks. Any dtype and strides of varlen_attention.
        k, v: ``[rows, num_kv_heads, head_dim]``, of the same slots. num_kv_heads is a multiple of the ranks, or the ranks
            are one of it: then each key head goes to several ranks, and its gradients are summed in their order, in
            float32 and rounded once.
        documents: PackedMetadata of the whole row (``total`` is ``ranks * rows``), or its cu_seqlens, on this device.
        group: a process group, a DeviceMesh of one dimension, or None for all processes.
        scheme: how the row was split, as in shard_packed. "contiguous" saves a copy of each tensor.
        causal, softmax_scale, window_size, softcap, sinks, return_lse: as varlen_attention; sinks of all heads.

    Returns:
        out ``[rows, num_q_heads, head_dim]``, and with ``return_lse`` lse ``[num_q_heads, rows]``. With num_kv_heads of at
        least the ranks they have the bits of varlen_attention over the whole row, and so have the gradients. That of
        sinks is of this rank's heads over all rows, 0 for the others: its sum over the ranks is the whole one.

    Example:
        Under ``torchrun --nproc-per-node 2``: one document of 8 tokens, 4 of them on each rank.

        >>> metadata = PackedMetadata.from_lengths([8])
        >>> out = ulysses_attention(q, k, v, metadata, group)  # needs two processes # doctest: +SKIP

    Raises:
        NotImplementedError: a second derivative.
        ValueError: heads that the ranks do not divide, documents of another row, ranks that disagree on options, heads,
            dtypes, rows or documents (found in the first call with these options), and as varlen_attention.
    """
    group = process_group(group)
    scheme = check_scheme(scheme)
    options: dict[str, Any] = {
        "causal": causal,
        "softmax_scale": softmax_scale,
        "window_size": tuple(window_size),
        "softcap": softcap,
    }
    documents = check_rows(q, k, v, documents)
    ranks, rows = group.size(), q.shape[0]
    if ranks == 1:
        out, lse = varlen_attention(q, k, v, documents, sinks=sinks, return_lse=True, **options)
        return (out, lse) if return_lse else out
    told = {"attention": "ulysses_attention", "scheme": scheme, **options}
    check_agreement(q, k, v, documents, group, told, sinks)
    cu_seqlens = whole_row(documents, rows, ranks)
    _check_heads(q, k, v, ranks)
    if sinks is not None:
        check_tensor(sinks, "sinks")
        if sinks.shape != (q.shape[1],):
            raise ValueError(f"sinks: expected [num_q_heads={q.shape[1]}], got {described(sinks)}")
        own = q.shape[1] // ranks
        sinks = sinks[own * group.rank() : own * (group.rank() + 1)]
    order = _order(cu_seqlens, rows, ranks, documents) if scheme == "zigzag" else None
    k, v, q = _ToHeads.apply(k, v, q, group, order)
    out, lse = varlen_attention(q, k, v, documents, sinks=sinks, return_lse=True, **options)
    out, lse = _ToRows.apply(out, lse if return_lse else None, group, order)
    return (out, lse) if return_lse else out


def head_refusal(num_heads: int, num_kv_heads: int, ranks: int) -> str:
    """Why these heads cannot be dealt to the ranks; empty where they can."""
    if num_heads % ranks:
        return f"num_q_heads: expected a multiple of the {ranks} ranks, got {num_heads}"
    if num_kv_heads % ranks and ranks % max(num_kv_heads, 1):
        return f"num_kv_heads: expected a multiple of the {ranks} ranks or a divisor of them, got {num_kv_heads}"
    return ""


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranks: int) -> None:
    if why := head_refusal(q.shape[1], k.shape[1], ranks):
        raise ValueError(f"{why} (gathered_attention takes any)")
    if q.shape[1] % max(k.shape[1], 1):
        raise ValueError(f"k: expected num_kv_heads that divide num_q_heads={q.shape[1]}, got {k.shape[1]}")


def _order(cu_seqlens: torch.Tensor, rows: int, ranks: int, documents: PackedMetadata | torch.Tensor) -> Order:
    """(row_of, gathered_of): the row's slot of each row that an all-gather gives, and the other way round."""
    cache = documents._cache if isinstance(documents, PackedMetadata) else None

    def make() -> Order:
        starts = torch.nn.functional.pad(cu_seqlens, (0, 1), value=ranks * rows).long()
        begin, end = chunks_of_ranks(starts, rows, ranks, "zigzag")
        row_of = torch.cat([slots_of_chunks(starts, begin[r], end[r], rows)[0] for r in range(ranks)])
        slots = torch.arange(ranks * rows, device=row_of.device)
        return row_of, torch.empty_like(row_of).scatter_(0, row_of, slots)

    return kept_with((cu_seqlens,), ("rows of ranks", rows, ranks), make, cache=cache)


# --- rows of this rank with all heads <-> all rows with this rank's heads ---


class _ToHeads(torch.autograd.Function):
    """k, v, q in that order: attention needs all keys before its first tile, and q is the largest."""

    @staticmethod
    def forward(
        ctx: Any, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, group: dist.ProcessGroup, order: Order | None
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.order, ctx.num_heads = group, order, [t.shape[1] for t in (k, v, q)]
        under_way = [start_all_to_all(_by_head(tensor, group.size()), group) for tensor in (k, v, q)]
        return tuple(_in_row_order(received().flatten(0, 1), order) for received in under_way)

    @staticmethod
    @no_second_derivative("ulysses_attention")
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, order = ctx.group, ctx.order
        under_way = [start_all_to_all(_by_rank(gradient, group.size(), order), group) for gradient in gradients]
        given = zip(under_way, ctx.num_heads, strict=True)
        return *(_heads_together(received(), num_heads) for received, num_heads in given), None, None


class _ToRows(torch.autograd.Function):
    """out ``[total, heads, head_dim]`` and lse ``[heads, total]`` or None."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, lse: torch.Tensor | None, group: dist.ProcessGroup, order: Order | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.group, ctx.order = group, order
        ctx.set_materialize_grads(False)
        size, under_way = group.size(), []
        for tensor in (out, lse):
            if tensor is not None:
                rows = tensor if tensor is out else tensor.T
                under_way.append(start_all_to_all(_by_rank(rows, size, order), group))
        heads = out.shape[1] * size
        out = _heads_together(under_way[0](), heads)
        return out, None if lse is None else _heads_together(under_way[1](), heads).T.contiguous()

    @staticmethod
    @no_second_derivative("ulysses_attention")
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        size, under_way = ctx.group.size(), []
        for gradient in (dout, None if dlse is None else dlse.T):
            under_way.append(None if gradient is None else start_all_to_all(_by_head(gradient, size), ctx.group))
        dout, dlse = (
            None if received is None else _in_row_order(received().flatten(0, 1), ctx.order) for received in under_way
        )
        return dout, None if dlse is None else dlse.T, None, None


def _by_head(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """``[ranks, rows, heads of that rank, ...]`` of ``[rows, heads, ...]``; too few heads are repeated."""
    heads = rows.shape[1]
    if heads < ranks:
        return rows.transpose(0, 1).repeat_interleave(ranks // heads, 0)[:, :, None]
    return rows.unflatten(1, (ranks, heads // ranks)).transpose(0, 1)


def _by_rank(rows: torch.Tensor, ranks: int, order: Order | None) -> torch.Tensor:
    """``[ranks, rows of that rank, heads, ...]`` of all rows."""
    if order is not None:
        rows = rows.index_select(0, order[0])
    return rows.unflatten(0, (ranks, rows.shape[0] // ranks))


def _in_row_order(gathered: torch.Tensor, order: Order | None) -> torch.Tensor:
    return gathered if order is None else gathered.index_select(0, order[1])


def _heads_together(received: torch.Tensor, heads: int) -> torch.Tensor:
    """``[rows, heads, ...]`` of ``[ranks, rows, heads of that rank, ...]``; gradients of repeated heads are summed."""
    ranks = received.shape[0]
    if heads < ranks:
        received = received.unflatten(0, (heads, ranks // heads)).sum(1)
    return dense(received.transpose(0, 1)).flatten(1, 2)
