"""Which attention over a group: by heads, ranks and the lengths of the documents."""

from typing import Any, NamedTuple

import torch

from packing_ops._arguments import window_sides
from packing_ops._batch_cache import is_captured, kept_with
from packing_ops.metadata import PackedMetadata
from packing_ops.parallel.agreement import check_agreement
from packing_ops.parallel.collectives import Group, process_group
from packing_ops.parallel.gathered import gathered_attention
from packing_ops.parallel.key_layout import RowSpans, gathered_slots, needed_rows, rows_received
from packing_ops.parallel.overlap import gathered_parts, keeps_keys, pipelined, ulysses_parts
from packing_ops.parallel.sharding import check_rows, check_scheme, check_window, whole_row
from packing_ops.parallel.ulysses import head_refusal, ulysses_attention

# What the estimates stand on: one node of Hopper GPUs, half types.
FLOPS_PER_SECOND = 600e12
BYTES_PER_SECOND = 300e9  # into a rank
BACKWARD = 2.5  # of the arithmetic of forward


class Choice(NamedTuple):
    """Of varlen_attention_over.

    name: ``"ulysses"`` or ``"gathered"``.
    why: in words.
    seconds: the estimate for each, forward and backward; inf for one that cannot serve the call. Empty in a CUDA graph,
        where lengths are not read.
    """

    name: str
    why: str
    seconds: dict[str, float]


def choose_attention(
    documents: PackedMetadata | torch.Tensor,
    *,
    ranks: int,
    rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int = 128,
    scheme: str = "contiguous",
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    element_size: int = 2,
) -> Choice:
    """The attention that should be faster for these heads, ranks and documents, and why.

    Estimated for one node of Hopper GPUs from operations and bytes of the slowest rank: Ulysses divides the work evenly,
    and moves q, k, v and out; gathered attention moves the keys that each rank lacks, twice or (where they are not kept)
    three times, and waits for the rank with the most work. Attention over a part of the heads runs beside the
    communication of the others. The same on every rank, since it looks at the whole row.

    Args:
        documents: PackedMetadata of the whole row, or its cu_seqlens.
        ranks, rows: of the group, and slots of the row on each.
        num_heads, num_kv_heads, head_dim, element_size: of q, of k, and bytes of an element.
        scheme, causal, window_size: as ulysses_attention.

    Returns:
        Choice. One synchronisation where the documents are on a GPU.

    Example:
        >>> heads = {"num_heads": 32, "num_kv_heads": 8}
        >>> choose_attention(PackedMetadata.from_lengths([65_536]), ranks=4, rows=16_384, **heads).name
        'ulysses'
        >>> choose_attention(PackedMetadata.from_lengths([128] * 512), ranks=4, rows=16_384, **heads).name
        'gathered'
        >>> print(choose_attention(PackedMetadata.from_lengths([8]), ranks=2, rows=4, num_heads=3, num_kv_heads=3).why)
        num_q_heads: expected a multiple of the 2 ranks, got 3

    Raises:
        ValueError: an unknown scheme; heads and a window that neither can serve.
    """
    check_scheme(scheme)
    refused = head_refusal(num_heads, num_kv_heads, ranks)
    not_gathered = _not_gathered(documents, causal, window_size)
    if refused and not_gathered:
        raise ValueError(f"{refused}, and {not_gathered}")
    cu_seqlens = documents.cu_seqlens if isinstance(documents, PackedMetadata) else documents
    spans = RowSpans.of(cu_seqlens, cu_seqlens, rows, ranks, scheme)
    pairs, moved = _work_of_ranks(spans, causal, window_sides(window_size)[0])
    others = (ranks - 1) * rows
    heads = (num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, head_dim)
    received = rows_received(max(moved), others)
    forward = 4 * head_dim * num_heads / FLOPS_PER_SECOND  # of a pair
    per_head = head_dim * element_size / BYTES_PER_SECOND  # of a row
    of_q, of_kv = (others / ranks * each * per_head for each in (num_heads, 2 * max(num_kv_heads, ranks)))
    keys = received * 2 * num_kv_heads * per_head
    again = 0.0 if keeps_keys(received, rows, num_heads, num_kv_heads) else keys
    parts = ulysses_parts(ranks, rows, heads, element_size), gathered_parts(received, rows, heads, element_size)
    # All of these are seconds.
    even, busiest = sum(pairs) / ranks * forward, max(pairs) * forward
    seconds = {
        "ulysses": pipelined(of_q + of_kv, even, of_q, parts[0])
        + pipelined(of_q, BACKWARD * even, of_q + of_kv, parts[0]),
        "gathered": pipelined(keys, busiest, 0.0, parts[1]) + pipelined(again, BACKWARD * busiest, keys, parts[1]),
    }
    if refused:
        return Choice("gathered", refused, {**seconds, "ulysses": float("inf")})
    if not_gathered:
        return Choice("ulysses", not_gathered, {**seconds, "gathered": float("inf")})
    name = "ulysses" if seconds["ulysses"] <= seconds["gathered"] else "gathered"
    share = max(pairs) * ranks / max(sum(pairs), 1)
    why = (
        f"estimated {1e3 * seconds[name]:.3g} ms against {1e3 * max(seconds.values()):.3g} ms: with gathered keys the busiest "
        f"rank has {share:.2f} times the mean work and receives {received} of {others} rows of keys"
    )
    return Choice(name, why, seconds)


def _not_gathered(documents: PackedMetadata | torch.Tensor, causal: bool, window_size: tuple[int, int]) -> str:
    """Why gathered_attention cannot serve these; empty where it can."""
    if isinstance(documents, PackedMetadata) and documents.visible_end is not None:
        return "documents: expected no visible_end for gathered keys"
    if not causal and tuple(window_size) != (-1, -1):
        return "window_size: expected (-1, -1) without a causal mask for gathered keys"
    return ""


def varlen_attention_over(
    group: Group | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: PackedMetadata | torch.Tensor,
    *,
    scheme: str = "contiguous",
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    explain: bool = False,
    **options: Any,
) -> Any:
    """ulysses_attention or gathered_attention, as choose_attention picks; kept with the documents for all layers. In a CUDA
    graph, whose replays may have other documents: ulysses_attention, where it takes the heads.

    Args:
        group, q, k, v, documents, scheme, causal, window_size: as ulysses_attention.
        explain: return also why.
        options: softmax_scale, softcap, sinks, return_lse.

    Returns:
        As ulysses_attention, and with ``explain`` (that, Choice).

    Example:
        >>> out, choice = varlen_attention_over(group, q, k, v, documents, explain=True)  # needs processes # doctest: +SKIP

    Raises:
        ValueError: as the one that it picks.
    """
    group = process_group(group)
    documents = check_rows(q, k, v, documents)
    mask: dict[str, Any] = {"scheme": check_scheme(scheme), "causal": causal, "window_size": check_window(window_size)}
    if group.size() > 1:  # else ranks could choose differently
        told = {"attention": "varlen_attention_over", **mask}
        check_agreement(q, k, v, documents, group, told, options.get("sinks"))
    cu_seqlens = whole_row(documents, q.shape[0], group.size())
    shape = {"rows": q.shape[0], "num_heads": q.shape[1], "num_kv_heads": k.shape[1], "head_dim": q.shape[2]}
    given: dict[str, Any] = {"ranks": group.size(), **shape, **mask, "element_size": q.element_size()}

    def make() -> Choice:
        return choose_attention(documents, **given)

    cache = documents._cache if isinstance(documents, PackedMetadata) else None
    if is_captured(q):
        refused = head_refusal(q.shape[1], k.shape[1], group.size())
        choice = Choice(
            "gathered" if refused else "ulysses", refused or "a CUDA graph, in which lengths are not read", {}
        )
    else:
        choice = kept_with((cu_seqlens,), ("choice", *given.values()), make, cache=cache)
    attention = ulysses_attention if choice.name == "ulysses" else gathered_attention
    out = attention(q, k, v, documents, group, **mask, **options)
    return (out, choice) if explain else out


def _work_of_ranks(spans: RowSpans, causal: bool, left: int) -> tuple[list[float], list[int]]:
    """With gathered keys: the pairs of query and key, and the rows that come from other ranks, of each rank."""
    first, last, _ = spans.queries()
    if not causal:
        pairs = (last - first) * spans.lengths
    elif left < 0:
        pairs = (last * (last + 1) - first * (first + 1)) // 2
    else:  # min(position, left) + 1 keys for each query
        pairs = _keys_before(last, left) - _keys_before(first, left)
    keys = spans.keys(causal, left)
    slots = gathered_slots(spans)
    needed = needed_rows(spans, *keys, slots).view(spans.ranks, spans.ranks, spans.rows).sum(2)
    moved = needed.sum(1) - needed.diagonal()
    both = torch.cat([pairs.sum((1, 2)), moved]).tolist()
    return both[: spans.ranks], both[spans.ranks :]


def _keys_before(queries: torch.Tensor, left: int) -> torch.Tensor:
    """Pairs of the first so many queries of a document under a window of ``left`` keys before its own."""
    grown = queries.clamp(max=left + 1)
    return grown * (grown + 1) // 2 + (queries - grown) * (left + 1)
