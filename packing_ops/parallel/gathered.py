"""Attention over a group by keys: queries stay, the keys and values that a rank's documents need are sent by the
others.

A varlen call runs over this rank's queries and the keys received (key_layout.py), or one for each part of the heads
(overlap.py). Backward receives the keys again unless they were kept, and their gradients go back to be summed at their
rank, in the order of the ranks.

Bytes and flops, for T tokens in documents of L, H heads over G key heads of dimension D, e bytes an element, B bytes/s
into a rank and F flops/s:
    Where every rank needs every key, a rank receives 2*G*D*e*T*(n-1)/n bytes in forward, as many of gradients in
    backward, and before these the keys again where they were not kept. It computes 2*H*D*T*L/n flops in forward, 2.5
    times that in backward. Forward spends (n-1)*(G/H)*e*F / (L*B) as long on the wire as it computes. With H = 4*G,
    bfloat16, F = 600e12 and B = 400e9 (one node) that is (n-1)*750/L: 1% for n = 2 and L = 65,536. With B = 50e9
    (between nodes) it is (n-1)*6000/L: 64% for n = 8 and the same L. In p parts, attention waits for one p-th of it in
    front, and backward for one p-th of the gradients at its end. A layer holds 2*G*D*e*T bytes of received keys and
    values while it runs, 268 MB for 8 heads of 128 at 65,536 tokens, and (2n+1)/(2n) times the memory of them in
    document order, which is what is kept. Where documents are shorter than a rank's part of a contiguous row, a rank
    receives the keys of one document at most.
A ring moves the same bytes, one neighbour's keys at a time, each hidden behind the attention over the last ones; it
pays with n calls of the kernel, of 1/n the work each, and with merging their outputs. It pays where the share above is
no longer small (between nodes, short documents on many ranks: at most the share is won) or where the gathered keys do
not fit (rows of millions of tokens). Inside a node it does not.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from packing_ops._runtime.batch_cache import is_captured, kept_with
from packing_ops.keys import plan_for
from packing_ops.metadata import PackedMetadata
from packing_ops.parallel.agreement import check_agreement
from packing_ops.parallel.collectives import (
    no_second_derivative,
    rows_at,
    start_all_gather,
    start_all_to_all,
    start_sum_of_parts,
)
from packing_ops.parallel.key_layout import Exchange, KeyLayout, RowSpans, key_layout
from packing_ops.parallel.overlap import gathered_parts, keeps_keys, slices, together
from packing_ops.parallel.sharding import check_rows, whole_row
from packing_ops.varlen.attention import attend
from packing_ops.varlen.ops import attention_backward, attention_forward
from packing_ops.varlen.options import AttentionOptions, of_heads


def attend_to_gathered(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: PackedMetadata | torch.Tensor,
    group: dist.ProcessGroup,
    scheme: str,
    options: AttentionOptions,
    *,
    keep_keys: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute gathered_attention of checked options; return (out, lse)."""
    documents = check_rows(q, k, v, documents)
    if group.size() == 1:
        return attend(q, k, v, documents, documents, options)
    check_agreement("gathered_attention", scheme, q, k, v, documents, group, options, keep_keys=keep_keys)
    refuse_window(options)
    if isinstance(documents, PackedMetadata):
        for name, given in (("visible_end", documents.visible_end), ("prefix tree", documents.paths)):
            if given is not None:
                raise NotImplementedError(
                    f"cu_seqlens: expected no {name} with gathered keys, got a PackedMetadata that has one "
                    "(ulysses_attention takes it)"
                )
    cu_seqlens = whole_row(documents, len(q), group.size())
    if len(q) == 0:
        return attend(q, k, v, documents, documents, options)
    layout = layout_of(documents, cu_seqlens, len(q), group, scheme, options.causal, options.window_size[0])
    return attention_over_keys(q, k, v, layout, group, options, keep_keys=keep_keys)


def refuse_window(options: AttentionOptions) -> None:
    if not options.causal and options.window_size != (-1, -1):
        raise NotImplementedError(
            "window_size: expected (-1, -1) without a causal mask under context parallelism, got "
            f"{options.window_size} (ulysses_attention takes it)"
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
    """Return the layout, kept with the documents for all layers. In a CUDA graph all keys are gathered, and each
    replay makes it again.
    """
    ranks, rank = group.size(), group.rank()
    cache = documents._cache if isinstance(documents, PackedMetadata) else None

    def make() -> KeyLayout:
        spans = RowSpans.of(cu_seqlens, cu_seqlens, rows, ranks, scheme)
        return key_layout(spans, rank, causal=causal, left=left, exchange=not is_captured(cu_seqlens))

    key = ("keys of ranks", rows, ranks, rank, scheme, causal, left)
    return kept_with((cu_seqlens,), key, make, cache=cache)


@torch.compiler.disable
def attention_over_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: KeyLayout,
    group: dist.ProcessGroup,
    options: AttentionOptions,
    *,
    keep_keys: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of this rank's queries over the keys of a layout, sent by the ranks of ``group``."""
    return _Attention.apply(q, k, v, options.sinks, layout, group, options._replace(sinks=None), keep_keys)


class _Attention(torch.autograd.Function):
    """Keys and values of all parts of the heads (overlap.py) set out at once, and gradients of a part as they are
    there: attention over one part runs while those of the next are under way.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        layout: KeyLayout,
        group: dist.ProcessGroup,
        options: AttentionOptions,
        keep_keys: bool | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse). ``sinks`` are passed next to the options, for their gradient."""
        ctx.options = options
        options = options._replace(sinks=sinks)
        heads = [(tensor.shape[1], tensor.shape[2]) for tensor in (q, k, v)]
        count = gathered_parts(layout.received, q.shape[0], heads, q.element_size())
        parts = list(zip(slices(q.shape[1], count), slices(k.shape[1], count), strict=True))  # heads of q and of k
        pending = [_start_keys(k[:, of_k], v[:, of_k], layout, group) for _, of_k in parts]
        documents, kept, found = (layout.cu_seqlens_q, layout.cu_seqlens_k), [], []
        for of_q, _ in parts:
            keys, values = pending.pop(0)()
            of_part = of_heads(options, of_q)
            ctx.plan = plan_for(q[:, of_q], keys, values, *documents, of_part)
            found.append(attention_forward(q[:, of_q], keys, values, *documents, of_part, ctx.plan))
            kept += [keys, values]
        outs, lses = zip(*found, strict=True)
        out, lse = together(outs, 1), together(lses, 0)
        if keep_keys is None:
            keep_keys = keeps_keys(layout.received, q.shape[0], q.shape[1], k.shape[1])
        ctx.save_for_backward(q, sinks, out, lse, *(kept if keep_keys else (k, v)))
        ctx.parts, ctx.keep_keys, ctx.layout, ctx.group = parts, keep_keys, layout, group
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @no_second_derivative("gathered_attention")
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, sinks, out, lse, *kept = ctx.saved_tensors
        layout, group, options, pending = ctx.layout, ctx.group, ctx.options._replace(sinks=sinks), []
        if not ctx.keep_keys:
            k, v = kept
            pending = [_start_keys(k[:, of_k], v[:, of_k], layout, group) for _, of_k in ctx.parts]
        documents = layout.cu_seqlens_q, layout.cu_seqlens_k
        dout = torch.zeros_like(out) if dout is None else dout
        dqs, dsinks, returning = [], [], []
        for part, (of_q, _) in enumerate(ctx.parts):
            keys, values = kept[2 * part : 2 * part + 2] if ctx.keep_keys else pending.pop(0)()
            saved = q[:, of_q], keys, values, out[:, of_q], lse[of_q]
            dlse_of, of_part = None if dlse is None else dlse[of_q], of_heads(options, of_q)
            dq, dkeys, dvalues, dsink = attention_backward(dout[:, of_q], dlse_of, saved, *documents, of_part, ctx.plan)
            returning.append(_start_gradients(dkeys, dvalues, len(q), layout, group))
            dqs.append(dq)
            dsinks.append(dsink)
        dks, dvs = zip(*(received() for received in returning), strict=True)
        dk, dv = together(dks, 1), together(dvs, 1)
        return together(dqs, 1), dk, dv, None if sinks is None else together(dsinks, 0), None, None, None, None


def _start_keys(
    k: torch.Tensor, v: torch.Tensor, layout: KeyLayout, group: dist.ProcessGroup
) -> Callable[[], list[torch.Tensor]]:
    """Start to gather the keys and values of the call from all ranks."""
    exchange = layout.exchange
    # Every rank needs most rows.
    if exchange is None:
        pending = [start_all_gather(local, group) for local in (k, v)]
        return lambda: [rows_at(received(), layout.key_index) for received in pending]
    # Chosen rows, in an order that the call does not have.
    if exchange.to_others is None:
        send, receive = exchange.send, exchange.receive
        pending = [start_all_to_all(rows_at(local, exchange.index), group, receive, send) for local in (k, v)]
        return lambda: [rows_at(received(), layout.key_index) for received in pending]
    # Chosen rows in the order of the call: this rank's stay where they are.
    own, send, receive = _without_own(exchange, group.rank())
    if not layout.received:
        return lambda: [k[:own], v[:own]]
    pending = [start_all_to_all(rows_at(local, exchange.to_others), group, receive, send) for local in (k, v)]
    lower = sum(receive[: group.rank()])

    def keys() -> list[torch.Tensor]:
        pairs = ((local, received()) for local, received in zip((k, v), pending, strict=True))
        return [torch.cat([others[:lower], local[:own], others[lower:]]) for local, others in pairs]

    return keys


def _start_gradients(
    dkeys: torch.Tensor, dvalues: torch.Tensor, rows: int, layout: KeyLayout, group: dist.ProcessGroup
) -> Callable[[], list[torch.Tensor]]:
    """Start to sum the gradients of this rank's rows over the ranks. A received key is in the call once or twice."""
    exchange, pending = layout.exchange, []
    if exchange is not None and exchange.to_others is not None:
        return _start_gradients_in_order((dkeys, dvalues), rows, layout.received, exchange, group)
    for gradient in (dkeys, dvalues):
        of_rows = rows_at(gradient, layout.key_positions[0])
        for again in layout.key_positions[1:]:
            of_rows += rows_at(gradient, again)
        if exchange is None:
            pending.append(start_sum_of_parts(of_rows, group))
        else:
            pending.append(start_all_to_all(of_rows, group, exchange.send, exchange.receive))
    if exchange is None:
        return lambda: [received() for received in pending]

    def sums(own: int = group.rank()) -> list[torch.Tensor]:
        found, rows_of_ranks = [], exchange.index.split(exchange.send)
        for received in pending:
            parts = received()
            of_ranks = list(parts.split(exchange.send))
            total = parts.new_zeros(rows, *parts.shape[1:])
            total.index_copy_(0, rows_of_ranks[own], of_ranks.pop(own))
            found.append(_with_others(total, of_ranks, exchange))
        return found

    return sums


def _start_gradients_in_order(
    gradients: tuple[torch.Tensor, torch.Tensor], rows: int, received: int, exchange: Exchange, group: dist.ProcessGroup
) -> Callable[[], list[torch.Tensor]]:
    """Do as _start_gradients where the keys are in the ranks' order: this rank's are a part of the gradients."""
    own, send, receive = _without_own(exchange, group.rank())
    lower, pending = sum(receive[: group.rank()]), []
    if received:
        of_others = [torch.cat([each[:lower], each[lower + own :]]) for each in gradients]
        pending = [start_all_to_all(each, group, send, receive) for each in of_others]

    def sums() -> list[torch.Tensor]:
        found = [each[lower : lower + own] for each in gradients]
        if own < rows:
            found = [F.pad(each, (0, 0, 0, 0, 0, rows - own)) for each in found]
        for total, each in zip(found, pending, strict=False):  # nothing is under way if no rank has any
            _with_others(total, each().split(send), exchange)
        return found

    return sums


def _without_own(exchange: Exchange, rank: int) -> tuple[int, list[int], list[int]]:
    """Return (rows that stay here, send, receive) of a call that sends to_others."""
    send, receive = list(exchange.send), list(exchange.receive)
    own, send[rank], receive[rank] = send[rank], 0, 0
    return own, send, receive


def _with_others(total: torch.Tensor, parts: Iterable[torch.Tensor], exchange: Exchange) -> torch.Tensor:
    """Add the others' parts, in their order, to this rank's part, in place. A rank got a row at most once."""
    parts = list(parts)
    wide = total.index_select(0, exchange.shared).to(torch.promote_types(total.dtype, torch.float32))
    for part, index in zip(parts, exchange.shared_index.split([len(part) for part in parts]), strict=True):
        wide.index_add_(0, index, part.to(wide.dtype))
    return total.index_copy_(0, exchange.shared, wide.to(total.dtype))
