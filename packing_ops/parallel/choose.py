"""Which attention over a group: Ulysses where the ranks divide the heads, else gathered keys."""

from typing import Any, NamedTuple

import torch

from packing_ops.metadata import PackedMetadata
from packing_ops.parallel.agreement import check_agreement
from packing_ops.parallel.collectives import Group, process_group
from packing_ops.parallel.gathered import gathered_attention
from packing_ops.parallel.sharding import check_rows, check_scheme, check_window
from packing_ops.parallel.ulysses import head_refusal, ulysses_attention


class Choice(NamedTuple):
    """What choose_attention picks.

    name: ``"ulysses"`` or ``"gathered"``.
    why: in words.
    seconds: empty. It goes with 0.3.
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
    """Ulysses attention where the ranks divide the heads, else gathered attention; and why.

    Ulysses has the bits of one GPU and equal work on all ranks. Gathered attention takes any number of heads, and moves less
    where documents are shorter than a rank's rows: call gathered_attention itself there.

    Args:
        documents: PackedMetadata of the whole row, or its cu_seqlens. Lengths are not read.
        ranks: of the group.
        num_heads, num_kv_heads: of q and of k.
        causal, window_size: as ulysses_attention.
        scheme: as ulysses_attention; checked, the choice does not depend on it.
        rows, head_dim, element_size: not used.

    Returns:
        Choice. No synchronisation.

    Example:
        >>> documents = PackedMetadata.from_lengths([65_536])
        >>> choose_attention(documents, ranks=4, rows=16_384, num_heads=32, num_kv_heads=8).name
        'ulysses'
        >>> name, why, _ = choose_attention(documents, ranks=4, rows=16_384, num_heads=30, num_kv_heads=10)
        >>> print(name, "because", why)
        gathered because num_q_heads: expected a multiple of the 4 ranks, got 30

    Raises:
        ValueError: an unknown scheme; heads and a mask that neither can serve.
    """
    check_scheme(scheme)
    refused = head_refusal(num_heads, num_kv_heads, ranks)
    not_gathered = _not_gathered(documents, causal, window_size)
    if refused and not_gathered:
        raise ValueError(f"{refused}, and {not_gathered}")
    if refused:
        return Choice("gathered", refused, {})
    return Choice("ulysses", not_gathered or f"the {ranks} ranks divide {num_heads} and {num_kv_heads} heads", {})


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
    """ulysses_attention or gathered_attention, as choose_attention picks.

    Args:
        group, q, k, v, documents, scheme, causal, window_size: as ulysses_attention.
        explain: also return why.
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
    if group.size() > 1:  # ranks whose heads or masks differ would choose differently
        called = {"attention": "varlen_attention_over", **mask}
        check_agreement(q, k, v, documents, group, called, options.get("sinks"))
    choice = choose_attention(
        documents, ranks=group.size(), rows=q.shape[0], num_heads=q.shape[1], num_kv_heads=k.shape[1], **mask
    )
    attention = ulysses_attention if choice.name == "ulysses" else gathered_attention
    out = attention(q, k, v, documents, group, **mask, **options)
    return (out, choice) if explain else out
