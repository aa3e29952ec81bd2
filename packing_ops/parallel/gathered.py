"""Attention over a group by keys: queries stay, the keys and values that a rank's documents need come from the others.

One varlen call runs over this rank's queries and the keys received (key_layout.py). Saved for backward are the rank's
rows: backward receives the keys again, and their gradients go back to be summed at their rank, in the order of the ranks.

Bytes and flops, for T tokens in documents of L, H heads over G key heads of dimension D, e bytes an element, B bytes/s
into a rank and F flops/s:
    Where every rank needs every key, a rank receives 2*G*D*e*T*(n-1)/n bytes in forward, the same in backward, and there
    sends as many of gradients. It computes 2*H*D*T*L/n flops in forward, 2.5 times that in backward.
    Forward spends (n-1)*(G/H)*e*F / (L*B) as long on the wire as it computes. With H = 4*G, bfloat16, F = 600e12 and
    B = 400e9 (one node) that is (n-1)*750/L: 1% for n = 2 and L = 65,536. With B = 50e9 (between nodes) it is
    (n-1)*6000/L: 64% for n = 8 and the same L.
    A layer holds 2*G*D*e*T bytes of received keys and values while it runs, 268 MB for 8 heads of 128 at 65,536 tokens,
    and (2n+1)/(2n) times that of them in document order.
    Where documents are shorter than a rank's part of a contiguous row, a rank receives the keys of one document at most.
A ring moves the same bytes, one neighbour's keys at a time, each hidden behind the attention over the last ones; it pays
with n calls of the kernel, of 1/n the work each, and with merging their outputs. It pays where the share above is no
longer small (between nodes, short documents on many ranks: at most the share is won) or where the gathered keys do not
fit (rows of millions of tokens). Inside a node it does not.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from packing_ops import _ops
from packing_ops._arguments import window_sides
from packing_ops._batch_cache import kept_with, plan_for
from packing_ops.attention import varlen_attention, wide_sinks
from packing_ops.metadata import PackedMetadata
from packing_ops.parallel.agreement import check_agreement
from packing_ops.parallel.collectives import (
    Group,
    no_second_derivative,
    process_group,
    start_all_gather,
    start_all_to_all,
    start_sum_of_parts,
)
from packing_ops.parallel.key_layout import Exchange, KeyLayout, RowSpans, key_layout
from packing_ops.parallel.sharding import check_rows, check_scheme, whole_row


def gathered_attention(
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
    """varlen_attention over documents whose rows lie on all ranks of ``group``, each rank with its own queries.

    Only the keys that a rank's documents need are moved to it. Every rank of the group calls it, forward and backward, in
    the same order. Differentiable as varlen_attention.

    Args:
        q: ``[rows, num_q_heads, head_dim]``, this rank's slots of the row, equally many on all ranks.
        k, v: ``[rows, num_kv_heads, head_dim]``, of the same slots; any number of heads that varlen_attention takes.
        documents: PackedMetadata of the whole row (``total`` is ``ranks * rows``), or its cu_seqlens, on this device.
        group: a process group, a DeviceMesh of one dimension, or None for all processes.
        scheme: how the row was split, as in shard_packed. "zigzag" gives all ranks equal work under a causal mask over
            long documents; "contiguous" moves the fewest keys of short ones.
        causal, softmax_scale, softcap, sinks, return_lse: as varlen_attention; sinks of all heads.
        window_size: as varlen_attention; one that looks ahead, or has no causal mask, is refused.

    Returns:
        out ``[rows, num_q_heads, head_dim]``, and with ``return_lse`` lse ``[num_q_heads, rows]``; slots of no document
        have 0 and -inf. The gradient of sinks is of this rank's queries alone, as that of any parameter. Deterministic;
        in low precision not the bits of one GPU, since keys are summed over rank after rank (in float32).

    Example:
        One document of 8 tokens on 2 ranks, zigzag: rank 0 holds tokens 0, 1, 6, 7 and its query documents attend to keys
        0..1 and 0..7; rank 1 holds 2, 3, 4, 5, which attend to 0..3 and 0..5.

        >>> metadata = PackedMetadata.from_lengths([8])
        >>> out = gathered_attention(q, k, v, metadata, group, scheme="zigzag")  # needs two processes # doctest: +SKIP

    Raises:
        NotImplementedError: a window without causal, documents with a visible_end; a second derivative.
        ValueError: documents of another row, ranks that disagree on options, heads, dtypes, rows or documents (found in the
            first call with these options), and as varlen_attention.

    Synchronises a few times per batch on a GPU, in the first layer. Not traced by torch.compile: a graph breaks here.

    Method: Llama Team, The Llama 3 Herd of Models (2024): gathered keys and values, 2 * ranks chunks.
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
    if group.size() == 1:
        out, lse = varlen_attention(q, k, v, documents, sinks=sinks, return_lse=True, **options)
        return (out, lse) if return_lse else out
    told = {"attention": "gathered_attention", "scheme": scheme, **options}
    check_agreement(q, k, v, documents, group, told, sinks)
    refuse_window(causal, window_size)
    _refuse_visible_end(documents)
    cu_seqlens = whole_row(documents, len(q), group.size())
    if len(q) == 0:
        out, lse = varlen_attention(q, k, v, documents, sinks=sinks, return_lse=True, **options)
    else:
        layout = layout_of(documents, cu_seqlens, len(q), group, scheme, causal, window_sides(window_size)[0])
        out, lse = attention_over_keys(q, k, v, layout, group, sinks=sinks, **options)
    return (out, lse) if return_lse else out


def refuse_window(causal: bool, window_size: tuple[int, int]) -> None:
    if not causal and tuple(window_size) != (-1, -1):
        raise NotImplementedError(
            f"window_size: expected (-1, -1) without a causal mask under context parallelism, got {tuple(window_size)} "
            "(ulysses_attention takes it)"
        )


def _refuse_visible_end(documents: PackedMetadata | torch.Tensor) -> None:
    if isinstance(documents, PackedMetadata) and documents.visible_end is not None:
        raise NotImplementedError(
            "documents: expected no visible_end with gathered keys, got a PackedMetadata that has one (ulysses_attention "
            "takes it)"
        )


def layout_of(
    documents: PackedMetadata | torch.Tensor,
    cu_seqlens: torch.Tensor,
    rows: int,
    group: dist.ProcessGroup,
    scheme: str,
    causal: bool,
    left: int,
) -> KeyLayout:
    """Kept with the documents for all layers."""
    ranks, rank = group.size(), group.rank()
    cache = documents._cache if isinstance(documents, PackedMetadata) else None

    def make() -> KeyLayout:
        wrong = (cu_seqlens[0] != 0) | (cu_seqlens.diff() < 0).any() | (cu_seqlens[-1] > ranks * rows)
        if wrong:
            raise ValueError(
                f"documents: expected cu_seqlens from 0 that never decrease, to at most the {ranks * rows} rows of "
                f"{ranks} ranks, got {cu_seqlens.tolist()}"
            )
        spans = RowSpans.of(cu_seqlens, cu_seqlens, rows, ranks, scheme)
        return key_layout(spans, rank, causal=causal, left=left)

    key = ("keys of ranks", rows, ranks, rank, scheme, causal, left)
    return kept_with((cu_seqlens,), key, make, cache=cache)


@torch.compiler.disable
def attention_over_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: KeyLayout,
    group: dist.ProcessGroup,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of this rank's queries over the keys of a layout, which come from the ranks of ``group``."""
    options = (causal, softmax_scale, *window_sides(window_size), softcap)
    return _Attention.apply(q, k, v, None if sinks is None else wide_sinks(sinks), layout, group, options)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        layout: KeyLayout,
        group: dist.ProcessGroup,
        options: tuple[Any, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = _keys_and_values(k, v, layout, group)
        documents = layout.cu_seqlens_q, layout.cu_seqlens_k
        ctx.plan = plan_for(q, keys, values, *documents, options[0], *options[2:4])
        out, lse = _ops.varlen_attention(q, keys, values, *documents, sinks, *options, ctx.plan, None)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.layout, ctx.group, ctx.options = layout, group, options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @no_second_derivative("gathered_attention")
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        keys, values = _keys_and_values(k, v, ctx.layout, ctx.group)
        documents = ctx.layout.cu_seqlens_q, ctx.layout.cu_seqlens_k
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dkeys, dvalues, dsinks = _ops.varlen_attention_backward(
            dout, dlse, q, keys, values, out, lse, *documents, sinks, *ctx.options, ctx.plan, None
        )
        dk, dv = _gradients_of_rows(dkeys, dvalues, k, ctx.layout, ctx.group)
        return dq, dk, dv, None if sinks is None else dsinks, None, None, None


def _keys_and_values(
    k: torch.Tensor, v: torch.Tensor, layout: KeyLayout, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Of the call, from all ranks."""
    under_way, exchange = [], layout.exchange
    if exchange is not None and exchange.to_others is not None:
        own, send, receive = _without_own(exchange, group.rank())
        for local in (k, v):
            rows = local.index_select(0, exchange.to_others)
            under_way.append(start_all_to_all(rows, group, receive, send))
        lower = sum(receive[: group.rank()])
        pairs = ((local, received()) for local, received in zip((k, v), under_way, strict=True))
        return [torch.cat([others[:lower], local[:own], others[lower:]]) for local, others in pairs]
    for local in (k, v):
        if exchange is None:
            under_way.append(start_all_gather(local, group))
        else:
            rows = local.index_select(0, exchange.index)
            under_way.append(start_all_to_all(rows, group, exchange.receive, exchange.send))
    return [received().index_select(0, layout.key_index) for received in under_way]


def _gradients_of_rows(
    dkeys: torch.Tensor, dvalues: torch.Tensor, k: torch.Tensor, layout: KeyLayout, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """The gradients of this rank's rows, summed over the ranks. A received key is in the call once or twice."""
    exchange = layout.exchange
    if exchange is not None and exchange.to_others is not None:
        return _gradients_in_order((dkeys, dvalues), len(k), exchange, group)
    under_way = []
    for gradient in (dkeys, dvalues):
        rows = gradient.index_select(0, layout.key_positions[0])
        for again in layout.key_positions[1:]:
            rows += gradient.index_select(0, again)
        if exchange is None:
            under_way.append(start_sum_of_parts(rows, group))
        else:
            under_way.append(start_all_to_all(rows, group, exchange.send, exchange.receive))
    received = [wait() for wait in under_way]
    if exchange is None:
        return received
    sums, own = [], group.rank()
    for parts in received:
        of_ranks, rows_of_ranks = list(parts.split(exchange.send)), exchange.index.split(exchange.send)
        total = parts.new_zeros(len(k), *parts.shape[1:])
        total.index_copy_(0, rows_of_ranks[own], of_ranks.pop(own))
        sums.append(_with_others(total, of_ranks, exchange))
    return sums


def _gradients_in_order(
    gradients: tuple[torch.Tensor, torch.Tensor], rows: int, exchange: Exchange, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """_gradients_of_rows where the keys lie as the ranks have them: this rank's are a part of the gradients."""
    own, send, receive = _without_own(exchange, group.rank())
    lower, under_way, sums = sum(receive[: group.rank()]), [], []
    for gradient in gradients:
        of_others = torch.cat([gradient[:lower], gradient[lower + own :]])
        under_way.append(start_all_to_all(of_others, group, send, receive))
    for gradient, received in zip(gradients, under_way, strict=True):
        total = gradient[lower : lower + own]
        if own < rows:
            total = F.pad(total, (0, 0, 0, 0, 0, rows - own))
        sums.append(_with_others(total, received().split(send), exchange))
    return sums


def _without_own(exchange: Exchange, rank: int) -> tuple[int, list[int], list[int]]:
    """(rows that stay here, send, receive) where to_others is sent."""
    send, receive = list(exchange.send), list(exchange.receive)
    own, send[rank], receive[rank] = send[rank], 0, 0
    return own, send, receive


def _with_others(total: torch.Tensor, parts: Iterable[torch.Tensor], exchange: Exchange) -> torch.Tensor:
    """This rank's own part, in place, and on it those of the others in their order. A rank got a row at most once."""
    parts = list(parts)
    wide = total.index_select(0, exchange.shared).to(torch.promote_types(total.dtype, torch.float32))
    for part, index in zip(parts, exchange.shared_index.split([len(part) for part in parts]), strict=True):
        wide.index_add_(0, index, part.to(wide.dtype))
    return total.index_copy_(0, exchange.shared, wide.to(total.dtype))
