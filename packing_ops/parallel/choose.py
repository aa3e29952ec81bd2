"""Attention over a group: Ulysses, gathered keys, and the rule that picks one. Inside, options travel in
AttentionOptions.
"""

import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from packing_ops._runtime.arguments import at_least, check_cu_seqlens, check_cumulated, old_name, one_of
from packing_ops._runtime.batch_cache import is_real, kept_with
from packing_ops._runtime.flops import visible_pairs
from packing_ops.invariance import mode
from packing_ops.metadata import PackedMetadata
from packing_ops.parallel.agreement import check_agreement
from packing_ops.parallel.collectives import Group, process_group
from packing_ops.parallel.gathered import attend_to_gathered
from packing_ops.parallel.sharding import SCHEMES, check_rows, check_window
from packing_ops.parallel.ulysses import attend_by_heads, head_refusal
from packing_ops.varlen.options import AttentionOptions, checked_options


@old_name("documents")
def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor,
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
    """Compute varlen_attention over documents whose rows are spread over ``group``, each rank with a part of the heads.

    Every rank of the group calls it, forward and backward, in the same order. Differentiable as varlen_attention.

    Args:
        q: ``[rows, num_q_heads, head_dim]``, this rank's slots of the row, equally many on all ranks; num_q_heads is a
            multiple of the ranks. Any dtype and strides of varlen_attention.
        k, v: ``[rows, num_kv_heads, head_dim]``, of the same slots. num_kv_heads is a multiple of the ranks, or the
            ranks are one of it: then each key head goes to several ranks, and its gradients are summed in their order,
            in float32 and rounded once.
        cu_seqlens: PackedMetadata of the whole row (``total`` is ``ranks * rows``), also of a prefix tree, or its
            cu_seqlens, on this device.
        group: a process group, a DeviceMesh of one dimension, or None for all processes.
        scheme: how the row was split, as in shard_packed. "contiguous" saves a copy of each tensor.
        causal, softmax_scale, window_size, softcap, sinks, return_lse: as varlen_attention; sinks of all heads.

    Returns:
        out ``[rows, num_q_heads, head_dim]``, and with ``return_lse`` lse ``[num_q_heads, rows]``. With num_kv_heads of
        at least the ranks they have the bits of varlen_attention over the whole row, and so have the gradients. The
        gradient of sinks is of this rank's heads over all rows, 0 for the others: its sum over the ranks is the whole
        one.

    Example:
        Under ``torchrun --nproc-per-node 2``: one document of 8 tokens, 4 of them on each rank.

        >>> metadata = PackedMetadata.from_lengths([8])
        >>> out = ulysses_attention(q, k, v, metadata, group)  # needs two processes # doctest: +SKIP

    Raises:
        NotImplementedError: a second derivative.
        ValueError: heads that the ranks do not divide, documents of another row, and as varlen_attention. Under
            PACKING_OPS_CHECK also ranks that disagree on options, heads, dtypes, rows or documents.

    Determinism: the same bits in every call; those of one GPU if num_kv_heads is at least the ranks.
    Synchronises: never the host; the ranks meet in all-to-alls, forward and backward.
    Memory: the heads of this rank for the whole row, of q, k, v and out.
    Gradients: of q, k, v and sinks, through lse too. No second derivative, no forward mode.
    """
    group = process_group(group)
    one_of(scheme, SCHEMES, "scheme")
    options = checked_options(causal, softmax_scale, check_window(window_size), softcap, sinks)
    out, lse = attend_by_heads(q, k, v, cu_seqlens, group, scheme, options, return_lse=return_lse)
    return out if lse is None else (out, lse)


@old_name("documents")
def gathered_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor,
    group: Group | None = None,
    *,
    scheme: str = "contiguous",
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    keep_keys: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute varlen_attention over documents whose rows are spread over ``group``, each rank with its queries.

    Only the keys that a rank's documents need are moved to it. Every rank of the group calls it, forward and backward,
    in the same order. Differentiable as varlen_attention.

    Args:
        q: ``[rows, num_q_heads, head_dim]``, this rank's slots of the row, equally many on all ranks.
        k, v: ``[rows, num_kv_heads, head_dim]``, of the same slots; any number of heads that varlen_attention takes.
        cu_seqlens: PackedMetadata of the whole row (``total`` is ``ranks * rows``), or its cu_seqlens, on this device.
        group: a process group, a DeviceMesh of one dimension, or None for all processes.
        scheme: how the row was split, as in shard_packed. "zigzag" gives all ranks equal work under a causal mask over
            long documents; "contiguous" moves the fewest keys of short ones.
        causal, softmax_scale, softcap, sinks, return_lse: as varlen_attention; sinks of all heads.
        window_size: as varlen_attention; one that looks ahead, or has no causal mask, is refused.
        keep_keys: whether what was received is kept for backward, which receives it again otherwise. Without it: where
            it takes no more memory than q and out do. Under gradient checkpointing it costs the memory of one layer.

    Returns:
        out ``[rows, num_q_heads, head_dim]``, and with ``return_lse`` lse ``[num_q_heads, rows]``; slots of no document
        have 0 and -inf. The gradient of sinks is of this rank's queries only, as for any parameter.

    Example:
        One document of 8 tokens on 2 ranks, zigzag: rank 0 holds tokens 0, 1, 6, 7 and its query documents attend to
        keys 0..1 and 0..7; rank 1 holds 2, 3, 4, 5, which attend to 0..3 and 0..5.

        >>> metadata = PackedMetadata.from_lengths([8])
        >>> out = gathered_attention(q, k, v, metadata, group, scheme="zigzag")  # needs two processes # doctest: +SKIP

    Raises:
        NotImplementedError: a window without causal, documents with a visible_end, a prefix tree; a second derivative.
        ValueError: documents of another row, and as varlen_attention. Under PACKING_OPS_CHECK also ranks that disagree
            on options, heads, dtypes, rows or documents.

    torch.compile does not trace it: a graph breaks here. In a CUDA graph all keys are gathered.

    Method: Llama Team, The Llama 3 Herd of Models (2024): gathered keys and values, 2 * ranks chunks.

    Determinism: the same bits in every call, on the same ranks; not those of one GPU in low precision, since keys are
        summed over rank after rank, in float32.
    Synchronises: the host once per batch on a GPU, in the first layer; never in a CUDA graph.
    Memory: the keys and values that this rank's documents need; with ``keep_keys`` until backward.
    Gradients: of q, k, v and sinks, through lse too. No second derivative, no forward mode.
    """
    group = process_group(group)
    one_of(scheme, SCHEMES, "scheme")
    options = checked_options(causal, softmax_scale, check_window(window_size), softcap, sinks)
    out, lse = attend_to_gathered(q, k, v, cu_seqlens, group, scheme, options, keep_keys=keep_keys)
    return (out, lse) if return_lse else out


class Choice(NamedTuple):
    """What choose_attention picks.

    name: ``"ulysses"`` or ``"gathered"``.
    why: in words.
    """

    name: str
    why: str


@old_name("documents")
def choose_attention(
    cu_seqlens: PackedMetadata | torch.Tensor,
    *,
    ranks: int,
    num_heads: int,
    num_kv_heads: int,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    scheme: str = "contiguous",
) -> Choice:
    """Choose Ulysses attention or gathered attention for a row, by its lengths, and return it with the reason.

    Ulysses has the bits of one GPU and equal work on all ranks, but sends every slot. Gathered attention sends only the
    keys of documents that cross ranks. So it is chosen for short documents in a contiguous row, unless the work of the
    ranks differs by more than it saves, and for heads that the ranks do not divide.

    Args:
        cu_seqlens: PackedMetadata of the whole row, or its cu_seqlens.
        ranks: of the group.
        num_heads, num_kv_heads: of q and of k.
        causal, window_size, scheme: as ulysses_attention.

    Returns:
        Choice. Lengths are not read with ``"zigzag"``, in a graph that is traced or captured, and while invariant() is
        on: then it is Ulysses wherever Ulysses can be.

    Example:
        >>> heads = {"ranks": 4, "num_heads": 32, "num_kv_heads": 8}
        >>> choose_attention(PackedMetadata.from_lengths([65_536]), **heads).name
        'ulysses'
        >>> choose_attention(PackedMetadata.from_lengths([4096] * 16), **heads).name
        'gathered'
        >>> name, why = choose_attention(PackedMetadata.from_lengths([65_536]), ranks=4, num_heads=30, num_kv_heads=10)
        >>> print(name, "because", why)
        gathered because num_q_heads: expected a multiple of the 4 ranks, got 30

    Raises:
        ValueError: heads and a mask that neither can serve, cu_seqlens that decrease or do not start at 0, no rank.
        TypeError: counts and sides of the window that are not integers.

    Determinism: the same choice in every call and on every rank.
    Synchronises: once for each row on CUDA, whose lengths are read.
    Memory: nothing.
    Gradients: none: a name.
    """
    counts = (ranks, "ranks", 1), (num_heads, "num_heads", 0), (num_kv_heads, "num_kv_heads", 0)
    ranks, num_heads, num_kv_heads = (at_least(*each) for each in counts)
    one_of(scheme, SCHEMES, "scheme")
    window_size = check_window(window_size)
    metadata = cu_seqlens if isinstance(cu_seqlens, PackedMetadata) else None
    edges: Any = cu_seqlens if metadata is None else metadata.cu_seqlens
    check_cu_seqlens(edges)
    refused = head_refusal(num_heads, num_kv_heads, ranks)
    of_gathered = {
        "cu_seqlens: expected no visible_end": metadata is not None and metadata.visible_end is not None,
        "cu_seqlens: expected no prefix tree": metadata is not None and metadata.paths is not None,
        "window_size: expected (-1, -1) without a causal mask": not causal and tuple(window_size) != (-1, -1),
    }
    not_gathered = next((f"{wanted} for gathered keys" for wanted, missed in of_gathered.items() if missed), "")
    if refused and not_gathered:
        raise ValueError(f"{refused}, and {not_gathered}")
    if refused:
        return Choice("gathered", refused)
    can_be_either = ranks > 1 and scheme == "contiguous" and not not_gathered
    if can_be_either and is_real(edges) and not mode.active():
        total, left, cache = (
            0 if metadata is None else metadata.total,
            window_size[0],
            getattr(metadata, "_cache", None),
        )

        def make() -> tuple[float, float]:
            on_host = edges.cpu()
            check_cumulated(on_host)
            return _costs(on_host.tolist(), total, ranks, num_heads, num_kv_heads, causal, left)

        key = ("costs over ranks", total, ranks, num_heads, num_kv_heads, causal, left)
        by_ulysses, by_gathered = kept_with((edges,), key, make, cache=cache)
        if by_gathered < by_ulysses:
            share = by_gathered / by_ulysses
            return Choice("gathered", f"documents are short: {share:.2f} times the work and transfers of ulysses")
    return Choice("ulysses", not_gathered or f"the {ranks} ranks divide {num_heads} and {num_kv_heads} heads")


# Forward and backward, the transfer of a slot of one head of k and v, or of q and out, takes as long as attention of a
# query to so many keys: by results/parallel_cuda.csv, two H200 with NVLink. Slower links favour gathered attention.
_KEYS_OF_A_TRANSFER = 940


def _costs(
    edges: list[int],
    total: int,
    ranks: int,
    num_heads: int,
    num_kv_heads: int,
    causal: bool,
    left: int,
) -> tuple[float, float]:
    """Return the costs of Ulysses and of gathered attention for the slowest rank of a contiguous row, in keys that one
    head's queries are multiplied with. total: slots of the row, padding too, where known; else 0.

    Example:
        >>> _costs([0, 2, 4], 4, 2, 4, 2, True, -1)  # 3 keys a head and rank; Ulysses moves 2 slots of 4 + 2 heads
        (11292.0, 12.0)
    """
    rows, work, received = max(-(-max(total, edges[-1]) // ranks), 1), [0] * ranks, [0] * ranks
    for start, end in itertools.pairwise(edges):
        for rank in range(start // rows, -(-end // rows)):
            first, last = max(start, rank * rows) - start, min(end, (rank + 1) * rows) - start
            keys = last if causal else end - start
            work[rank] += visible_pairs(last - first, keys, left, 0 if causal else -1)
            received[rank] += min(first, left) if left >= 0 else keys - (last - first)
    transfer = _KEYS_OF_A_TRANSFER
    by_ulysses = num_heads * sum(work) / ranks + transfer * (num_heads + num_kv_heads) * rows
    by_gathered = max(
        num_heads * mine + transfer * num_kv_heads * sent for mine, sent in zip(work, received, strict=True)
    )
    return by_ulysses, float(by_gathered)


@old_name("documents")
def varlen_attention_over(
    group: Group | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor,
    *,
    scheme: str = "contiguous",
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    explain: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute ulysses_attention or gathered_attention, as choose_attention picks.

    Args:
        group, q, k, v, cu_seqlens: as ulysses_attention.
        scheme, causal, window_size, softmax_scale, softcap, sinks, return_lse: as ulysses_attention.
        explain: also return why.

    Returns:
        As ulysses_attention, and with ``explain`` (that, Choice).

    Example:
        >>> _, why = varlen_attention_over(group, q, k, v, documents, explain=True)  # needs processes # doctest: +SKIP

    Raises:
        ValueError: as the one that it picks.

    Determinism: as the one that it picks.
    Synchronises: as the one that it picks.
    Memory: as the one that it picks.
    Gradients: as the one that it picks.
    """
    group = process_group(group)
    one_of(scheme, SCHEMES, "scheme")
    options = checked_options(causal, softmax_scale, check_window(window_size), softcap, sinks)
    out, lse, choice = attend_over(q, k, v, cu_seqlens, group, scheme, options, return_lse=return_lse)
    found = (out, lse) if return_lse else out
    return (found, choice) if explain else found


def attend_over(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: PackedMetadata | torch.Tensor,
    group: dist.ProcessGroup,
    scheme: str,
    options: AttentionOptions,
    *,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, Choice]:
    """Compute varlen_attention_over of checked options; return (out, lse if asked for, choice)."""
    documents = check_rows(q, k, v, documents)
    if group.size() > 1:  # ranks whose heads or masks differ would choose differently
        check_agreement("varlen_attention_over", scheme, q, k, v, documents, group, options)
    choice = choose_attention(
        documents,
        ranks=group.size(),
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        causal=options.causal,
        window_size=options.window_size,
        scheme=scheme,
    )
    lse: torch.Tensor | None
    if choice.name == "ulysses":
        out, lse = attend_by_heads(q, k, v, documents, group, scheme, options, return_lse=return_lse)
    else:
        out, lse = attend_to_gathered(q, k, v, documents, group, scheme, options)
    return out, lse, choice
