"""Which slot of a padded batch each slot of the packed row is copied from."""

from collections.abc import Sequence
from itertools import accumulate

import torch

import packing_ops as po
from packing_ops._runtime import gate
from packing_ops._runtime.arguments import int64_tensor, integer


def document_lengths(attention_mask: torch.Tensor | None, sub_seq_lengths: Sequence[Sequence[int]] | None) -> list[int]:
    """Return the tokens of every document: one a row, counted in the mask (a synchronisation on CUDA), or as listed."""
    if sub_seq_lengths is None:
        return (attention_mask != 0).sum(1).tolist()
    return [integer(length, "sub_seq_lengths") for lengths in sub_seq_lengths for length in lengths]


def source_of_slots(
    cu_seqlens: torch.Tensor, total: int, attention_mask: torch.Tensor, sub_seq_lengths: Sequence[Sequence[int]] | None
) -> torch.Tensor:
    """Return int64 ``[total]``: for every slot of the packed row its slot in the flattened batch, -1 for padding.

    Args:
        cu_seqlens: int32 ``[num_documents + 1]``, where the documents' slots begin in the packed row.
        total: slots of the packed row.
        attention_mask, sub_seq_lengths: of preprocess_packed_seqs. No synchronisation.
    """
    document = po.seq_idx_from_cu_seqlens(cu_seqlens, total)
    position = po.position_ids_from_cu_seqlens(cu_seqlens, total)
    if sub_seq_lengths is None:
        indices, ends, _, _ = gate.unpad_layout(attention_mask, None, False)
        lengths = ends.diff()
        fits = _fits("attention_mask", lengths, cu_seqlens)[document]
        real = position < lengths[document]
        slot_in_batch = indices[(ends[document] + position).where(real, 0)]
        return torch.where(real, slot_in_batch.where(fits, attention_mask.numel()), -1)
    return _source_by_lengths(cu_seqlens, document, position, attention_mask, sub_seq_lengths)


def _source_by_lengths(cu_seqlens, document, position, attention_mask, sub_seq_lengths):
    """Return source_of_slots where rows hold several documents, each at the next multiple of the alignment."""
    batch, seqlen = attention_mask.shape
    if len(sub_seq_lengths) != batch:
        raise ValueError(f"sub_seq_lengths: expected one list per row = {batch}, got {len(sub_seq_lengths)}")
    # Lengths, rows and first documents on the device
    counts = [len(lengths) for lengths in sub_seq_lengths]
    tokens = document_lengths(None, sub_seq_lengths)
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    lengths, row, first = (
        int64_tensor(values).to(cu_seqlens.device, non_blocking=True)
        for values in (tokens, rows, [0, *accumulate(counts)])
    )
    fits = _fits("sub_seq_lengths", lengths, cu_seqlens)
    # A row's documents follow each other in the packed row as they do in theirs.
    column = cu_seqlens[:-1] - cu_seqlens[first[row]]
    slot_in_batch = (row * seqlen + column)[document] + position
    real = position < lengths[document]
    right = (fits & (column + lengths <= seqlen))[document]
    right = right & (attention_mask.reshape(-1)[slot_in_batch.where(real & right, 0)] != 0)
    # On the CPU say what is wrong
    marked = (attention_mask != 0).sum()
    if right.is_cpu and not right[real].all():
        wrong = int(document[real & ~right][0])
        raise ValueError(
            f"sub_seq_lengths: expected documents that begin at multiples of the alignment in rows of {seqlen}, where "
            f"attention_mask is 1, got {int(lengths[wrong])} tokens from column {int(column[wrong])} of row "
            f"{int(row[wrong])}"
        )
    if marked.is_cpu and marked != sum(tokens):
        raise ValueError(
            f"sub_seq_lengths: expected the {int(marked)} tokens that attention_mask marks, got {sum(tokens)}"
        )
    # What does not agree on a GPU becomes a slot past the batch, which the gather and the scatter report.
    return torch.where(real, slot_in_batch.where(right & (marked == sum(tokens)), batch * seqlen), -1)


def _fits(name: str, lengths: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return bool ``[num_documents]``: the document has enough slots. Raises on the CPU; on a GPU the gather does."""
    if len(lengths) != len(cu_seqlens) - 1:
        raise ValueError(
            f"{name}: expected the {len(cu_seqlens) - 1} documents of packed_seq_params, got {len(lengths)}"
        )
    fits = lengths <= cu_seqlens.diff()
    if fits.is_cpu and not fits.all():
        wrong = int((~fits).nonzero()[0])
        raise ValueError(
            f"{name}: expected at most the {int(cu_seqlens.diff()[wrong])} slots of document {wrong} of "
            f"packed_seq_params, got {int(lengths[wrong])} tokens"
        )
    return fits
