"""visible_end of varlen_attention, from what models and data sets know: blocks of an image, prefixes, whole documents.

Each is int32 ``[total]``. Where a token only sees back, its entry is its position plus 1. ``torch.maximum(a, b)`` of
two of them lets a token see what either shows it. Entries in the padding after the last document do not count.
"""

import torch
import torch.nn.functional as F

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import check_real, check_tensor, described, is_set, one_row
from packing_ops.metadata import PackedMetadata, cu_seqlens_of


def visible_end_from_blocks(block_ids: torch.Tensor, cu_seqlens: PackedMetadata | torch.Tensor) -> torch.Tensor:
    """Return visible_end of causal rows with blocks whose tokens see each other: the images of token_type_ids, say.

    Args:
        block_ids: integer or bool ``[total]`` or ``[1, total]``. A token with 0 only sees back. Neighbours of one
            document with the same other number are a block. Each of them sees the whole block and what is before it.
        cu_seqlens: int32 ``[num_documents + 1]``, or the PackedMetadata of the row.

    Returns:
        int32 ``[total]``.

    Example:
        >>> cu_seqlens = torch.tensor([0, 5, 7], dtype=torch.int32)
        >>> visible_end_from_blocks(torch.tensor([0, 1, 1, 0, 1, 1, 1]), cu_seqlens)
        tensor([1, 3, 3, 4, 5, 2, 2], dtype=torch.int32)

    Raises:
        ValueError: block_ids that are floating, of another shape, or of another total than a PackedMetadata.

    Determinism: the same integers in every call.
    Synchronises: never.
    Memory: some integers per slot.
    Gradients: none: integers.
    """
    check_real(block_ids, "block_ids")
    if block_ids.is_floating_point():
        raise ValueError(f"block_ids: expected integer or bool [total], got {described(block_ids)}")
    ids = one_row(block_ids, "block_ids")
    total = ids.shape[0]
    positions, _, _ = _slots(cu_seqlens, total, like="block_ids")
    # A block goes on where the next slot has its number and is no document's first.
    goes_on = F.pad((ids[1:] == ids[:-1]) & (ids[1:] != 0) & (positions[1:] != 0), (0, 1))
    slots = torch.arange(total, device=ids.device)
    last = slots.masked_fill(goes_on, total).flip(0).cummin(0).values.flip(0)  # of the slot's block
    return (positions + (last - slots) + 1).int()


def visible_end_from_prefix_lengths(
    prefix_lengths: torch.Tensor, cu_seqlens: PackedMetadata | torch.Tensor, total: int | None = None
) -> torch.Tensor:
    """Return visible_end of prefix language models: the first tokens of a document see each other, the others see back.

    Args:
        prefix_lengths: int32 or int64 ``[num_documents]``; 0 or less is a causal document, and a longer prefix than its
            document is all of it.
        cu_seqlens: int32 ``[num_documents + 1]``, or the PackedMetadata of the row.
        total: slots of the row, needed with a tensor.

    Returns:
        int32 ``[total]``.

    Example:
        >>> cu_seqlens = torch.tensor([0, 4, 6], dtype=torch.int32)
        >>> visible_end_from_prefix_lengths(torch.tensor([3, 0]), cu_seqlens, 6)
        tensor([3, 3, 3, 4, 1, 2], dtype=torch.int32)

    Raises:
        ValueError: prefix_lengths of another dtype or shape.
        TypeError: a tensor of cu_seqlens without ``total``.

    Determinism: the same integers in every call.
    Synchronises: never.
    Memory: some integers per slot.
    Gradients: none: integers.
    """
    check_tensor(prefix_lengths, "prefix_lengths")
    positions, document, lengths = _slots(cu_seqlens, total)
    documents = lengths.shape[0] - 1
    if prefix_lengths.shape != (documents,) or prefix_lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"prefix_lengths: expected int32 or int64 [num_documents={documents}], got {described(prefix_lengths)}"
        )
    prefix = torch.minimum(F.pad(prefix_lengths, (0, 1)), lengths)
    return torch.maximum(positions + 1, prefix[document]).int()


def visible_end_from_causal(
    causal: torch.Tensor, cu_seqlens: PackedMetadata | torch.Tensor, total: int | None = None
) -> torch.Tensor:
    """Return visible_end of causal documents next to documents whose tokens all see each other: of decoders and of
    encoders, say.

    Args:
        causal: bool ``[num_documents]``; False: every token sees the whole document.
        cu_seqlens: int32 ``[num_documents + 1]``, or the PackedMetadata of the row.
        total: slots of the row, needed with a tensor.

    Returns:
        int32 ``[total]``.

    Example:
        >>> cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)
        >>> visible_end_from_causal(torch.tensor([True, False]), cu_seqlens, 5)
        tensor([1, 2, 3, 2, 2], dtype=torch.int32)

    Raises:
        ValueError: causal of another shape.
        TypeError: a tensor of cu_seqlens without ``total``.

    Determinism: the same integers in every call.
    Synchronises: never.
    Memory: some integers per slot.
    Gradients: none: integers.
    """
    check_tensor(causal, "causal")
    positions, document, lengths = _slots(cu_seqlens, total)
    documents = lengths.shape[0] - 1
    if causal.shape != (documents,):
        raise ValueError(f"causal: expected bool [num_documents={documents}], got {described(causal)}")
    sees_back = F.pad(is_set(causal, "causal"), (0, 1), value=True)[document]
    return torch.where(sees_back, positions + 1, lengths[document]).int()


def _slots(
    documents: PackedMetadata | torch.Tensor, total: int | None = None, like: str = "total"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each slot's position and document, int64 ``[total]``; and the documents' lengths, the padding's last."""
    if total is None:
        if not isinstance(documents, PackedMetadata):
            raise TypeError("total: expected the slots of the row beside a tensor of cu_seqlens, got None")
        total = documents.total
    cu_seqlens = cu_seqlens_of(documents, total, like)
    positions = gate.position_ids_from_cu_seqlens(cu_seqlens, total)
    document = gate.seq_idx_from_cu_seqlens(cu_seqlens, total)
    lengths = torch.cat([cu_seqlens.diff(), total - cu_seqlens[-1:]]).long()
    return positions, document.long(), lengths
