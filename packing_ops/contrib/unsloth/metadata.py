"""Unsloth's packed_seq_lengths as PackedMetadata, and its attention masks."""

from collections.abc import Mapping
from typing import Any

import torch

from packing_ops import PackedMetadata, block_causal_mask, xformers_bias
from packing_ops.integrations.adapters import check_causal, kept_with, sides_of_keys


def packed_metadata(kwargs: Mapping[str, Any], device: torch.device | str | None = None) -> PackedMetadata | None:
    """Return the layout that ``packed_seq_lengths`` describes: the same object for every layer that asks with that
    tensor.

    Args:
        kwargs: keyword arguments of a forward, or a batch. ``packed_seq_lengths``: int32 or int64
            ``[num_documents]`` or a sequence of ints. ``input_ids`` or ``position_ids`` ``[..., total]`` with it
            say how long the row is; slots after the last document are padding.
        device: where the layout is needed; by default the device of packed_seq_lengths.

    Returns:
        PackedMetadata, or None without packed_seq_lengths. Lengths on the CPU cost no synchronisation, CUDA lengths
        one, at the first call. ``metadata.to_unsloth()`` is the way back.

    Example:
        >>> packed_metadata({"packed_seq_lengths": torch.tensor([2, 3], dtype=torch.int32)}).cu_seqlens
        tensor([0, 2, 5], dtype=torch.int32)

    Raises:
        ValueError: a negative length, or more tokens than the row has.

    Determinism: the same layout for the same tensor.
    Synchronises: never for lengths on the CPU; once for lengths on CUDA.
    Memory: the layout, kept with the tensor.
    Gradients: none: integers.
    """
    lengths = kwargs.get("packed_seq_lengths")
    if lengths is None:
        return None
    row = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("position_ids")
    total = None if row is None else row.numel()
    if not isinstance(lengths, torch.Tensor):
        return PackedMetadata.from_lengths(lengths, total=total, device=device)
    return _metadata_of(lengths.reshape(-1) if lengths.dim() != 1 else lengths, total, device)


def _metadata_of(lengths: torch.Tensor, total: int | None, device: torch.device | str | None) -> PackedMetadata:
    device = torch.device(device or lengths.device)

    def make() -> PackedMetadata:
        there = lengths.to(device) if lengths.is_cuda else lengths
        return PackedMetadata.from_lengths(there, total=total, device=device)

    return kept_with([lengths], ("unsloth", total, device), make)


def sdpa_mask(
    metadata: PackedMetadata, *, dtype: torch.dtype = torch.bool, sliding_window: int | None = None
) -> torch.Tensor:
    """Return a mask for scaled_dot_product_attention: causal inside each document.

    Args:
        metadata: of the packed row.
        dtype: bool (True = visible) or a floating dtype (0 = visible, -inf = hidden), which is Unsloth's.
        sliding_window: visible keys including the query itself; None, 0 and less for all.

    Returns:
        ``[1, 1, total, total]`` on the device of cu_seqlens: total**2 elements.

    Example:
        >>> sdpa_mask(PackedMetadata.from_lengths([1, 2])).int().tolist()
        [[[[1, 0, 0], [0, 1, 0], [0, 1, 1]]]]

    Raises:
        ValueError: there is a visible_end.

    Determinism: the same mask in every call.
    Synchronises: never.
    Memory: ``total ** 2`` elements.
    Gradients: none.
    """
    return block_causal_mask(metadata, dtype=dtype, window=_window(sliding_window))[None, None]


def xformers_mask(metadata: PackedMetadata, *, sliding_window: int | None = None) -> Any:
    """Return the same visibility as sdpa_mask, as an xformers bias that holds lengths instead of a matrix.

    Returns:
        ``BlockDiagonalCausalMask`` (its local form with ``sliding_window``), or None where xformers is not
        installed. One synchronisation for cu_seqlens on CUDA.

    Example:
        >>> xformers.ops.memory_efficient_attention(q, k, v, xformers_mask(metadata))  # needs a GPU # doctest: +SKIP

    Raises:
        ValueError: there is a visible_end.

    Determinism: the same bias in every call.
    Synchronises: once for cu_seqlens on CUDA.
    Memory: the lengths.
    Gradients: none.
    """
    check_causal(metadata)
    lengths = metadata.lengths.tolist()
    lengths.append(metadata.total - sum(lengths))  # padding is one more segment
    try:
        return xformers_bias([length for length in lengths if length], window=_window(sliding_window))
    except ImportError:
        return None


def _window(sliding_window: int | None) -> int | None:
    left, _ = sides_of_keys(sliding_window)
    return None if left < 0 else left + 1
