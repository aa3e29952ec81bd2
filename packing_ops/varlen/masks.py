"""Masks of packed documents, for attention that takes one: quadratic in the row, which varlen_attention avoids."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import at_least, integer
from packing_ops.metadata import PackedMetadata, check_causal


def block_causal_mask(
    cu_seqlens: PackedMetadata | torch.Tensor,
    total: int | None = None,
    *,
    dtype: torch.dtype = torch.bool,
    window: int | None = None,
) -> torch.Tensor:
    """Make a causal attention mask inside each document, for scaled_dot_product_attention.

    Args:
        cu_seqlens: int32 ``[num_documents + 1]``, or the PackedMetadata of the row.
        total: slots of the row, needed with a tensor; padding after the last document is a separate segment.
        dtype: bool (True = visible) or a floating dtype (0 = visible, -inf = hidden).
        window: visible keys including the query itself; None for all.

    Returns:
        ``[total, total]``: total**2 elements, which is what varlen_attention avoids.

    Example:
        >>> block_causal_mask(torch.tensor([0, 1, 3], dtype=torch.int32), 3).int().tolist()
        [[1, 0, 0], [0, 1, 0], [0, 1, 1]]

    Raises:
        ValueError: a window below 1, cu_seqlens past ``total``, a dtype that is neither bool nor floating, a
            PackedMetadata with a visible_end.

    Determinism: the same mask in every call.
    Synchronises: never.
    Memory: ``total ** 2`` elements.
    Gradients: none.
    """
    if window is not None:
        at_least(window, "window", 1, "visible key (the query itself)")
    if isinstance(cu_seqlens, PackedMetadata):
        check_causal(cu_seqlens)
        total = cu_seqlens.total if total is None else total
        cu_seqlens = cu_seqlens.cu_seqlens
    elif total is None:
        raise TypeError("total: expected the slots of the row beside a tensor of cu_seqlens, got None")
    return gate.block_causal_mask(cu_seqlens, total, dtype, window or 0)


def xformers_bias(lengths: Sequence[int], *, window: int | None = None) -> Any:
    """Make an xformers attention bias with the visibility of block_causal_mask (xformers must be installed).

    Args:
        lengths: tokens per document, Python ints.
        window: visible keys including the query itself; None for all.

    Returns:
        ``BlockDiagonalCausalMask``, or its local form with ``window``; it stores the lengths, no matrix.

    Example:
        >>> xformers.ops.memory_efficient_attention(q, k, v, xformers_bias([3, 5]))  # needs a GPU # doctest: +SKIP

    Raises:
        ImportError: xformers is not installed.

    Determinism: the same bias in every call.
    Synchronises: never.
    Memory: the lengths.
    Gradients: none.
    """
    try:
        from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask
    except ImportError as error:
        raise ImportError("xformers_bias needs xformers: pip install xformers") from error
    bias = BlockDiagonalCausalMask.from_seqlens([integer(length, "lengths") for length in lengths])
    return bias if window is None else bias.make_local_attention(window)


def visible_keys(
    document_q: torch.Tensor,
    document_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Return bool ``[total_q, total_k]``, True where query i attends to key j in varlen_attention. document_q and
    document_k: each row's document, as seq_idx_from_cu_seqlens has it.

    Example:
        >>> cu_seqlens, documents = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([0, 1, 1])
        >>> visible_keys(documents, documents, cu_seqlens, cu_seqlens, True, (-1, -1)).int().tolist()
        [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    """
    slot_q, slot_k = (
        torch.arange(len(each), device=each.device, dtype=torch.int32) for each in (document_q, document_k)
    )
    # Bottom-right aligned: the last query of a document is at the position of its last key.
    ends_q, ends_k = (F.pad(cu[1:], (0, 1)) for cu in (cu_seqlens_q, cu_seqlens_k))
    key_pos = slot_q + (ends_k - ends_q)[document_q]
    document_q = document_q.masked_fill(document_q == cu_seqlens_q.numel() - 1, -1)
    return visible_mask(document_q[:, None], document_k[None], key_pos[:, None], slot_k[None], causal, window_size)


def visible_mask(
    document_q: torch.Tensor,
    document_k: torch.Tensor,
    key_pos_q: torch.Tensor,
    key_pos_k: torch.Tensor,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Return bool, True where a query attends to a key: of one document (-1 is no document) and inside the window.
    Broadcasts.
    """
    visible = (document_q == document_k) & (document_q >= 0)
    left, right = (window_size[0], 0) if causal else window_size
    if left >= 0:
        visible = visible & (key_pos_k >= key_pos_q - left)
    if right >= 0:
        visible = visible & (key_pos_k <= key_pos_q + right)
    return visible
