"""Which attention over a group: Ulysses where the ranks divide the heads, else gathered keys."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from packing_ops.attention import AttentionOptions, checked_options
from packing_ops.metadata import PackedMetadata
from packing_ops.parallel.agreement import check_agreement
from packing_ops.parallel.collectives import Group, process_group
from packing_ops.parallel.gathered import attend_to_gathered
from packing_ops.parallel.sharding import check_rows, check_scheme, check_window
from packing_ops.parallel.ulysses import attend_by_heads, head_refusal


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
    if isinstance(documents, PackedMetadata) and documents.paths is not None:
        return "documents: expected no prefix tree for gathered keys"
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
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """ulysses_attention or gathered_attention, as choose_attention picks.

    Args:
        group, q, k, v, documents: as ulysses_attention.
        scheme, causal, window_size, softmax_scale, softcap, sinks, return_lse: as ulysses_attention.
        explain: also return why.

    Returns:
        As ulysses_attention, and with ``explain`` (that, Choice).

    Example:
        >>> out, choice = varlen_attention_over(group, q, k, v, documents, explain=True)  # needs processes # doctest: +SKIP

    Raises:
        ValueError: as the one that it picks.
    """
    group, scheme = process_group(group), check_scheme(scheme)
    options = checked_options(causal, softmax_scale, check_window(window_size), softcap, sinks)
    out, lse, choice = attend_over(q, k, v, documents, group, scheme, options, return_lse=return_lse)
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
    """varlen_attention_over of checked options: (out, lse if asked for, choice)."""
    documents = check_rows(q, k, v, documents)
    if group.size() > 1:  # ranks whose heads or masks differ would choose differently
        check_agreement("varlen_attention_over", scheme, q, k, v, documents, group, options)
    choice = choose_attention(
        documents,
        ranks=group.size(),
        rows=q.shape[0],
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        causal=options.causal,
        window_size=options.window_size,
    )
    lse: torch.Tensor | None
    if choice.name == "ulysses":
        out, lse = attend_by_heads(q, k, v, documents, group, scheme, options, return_lse=return_lse)
    else:
        out, lse = attend_to_gathered(q, k, v, documents, group, scheme, options)
    return out, lse, choice
