"""Rows of a padded batch as one thd row of megatron-core, and the model's outputs back in those rows.

Every document is padded at its end to a multiple of the alignment, so that tensor, sequence and context parallelism can
divide it: lengths 5 and 3 aligned to 4 take 8 and 4 slots, cu_seqlens ``[0, 8, 12]``. Which slots are real is read from
the attention mask, or from the lengths of the documents that a row holds (``sub_seq_lengths``): these begin at
multiples of the alignment in their row too, as packed collators arrange them.
"""

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

import packing_ops as po
from packing_ops._runtime import gate
from packing_ops._runtime.arguments import int64_tensor, integer
from packing_ops.data.context_parallel import aligned, packed_alignment, thd_inverse_indices, thd_partition_indices
from packing_ops.integrations.megatron.varlen_call import spans_of

_NEEDED = ("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")


def packed_seq_params(metadata: po.PackedMetadata) -> PackedSeqParams:
    """Describe a packed row as megatron-core does, for ``model(..., packed_seq_params=...)``.

    Example:
        >>> from packing_ops import PackedMetadata
        >>> params = packed_seq_params(PackedMetadata.from_lengths([2, 1, 3]))
        >>> params.qkv_format, params.cu_seqlens_q.tolist(), params.max_seqlen_q
        ('thd', [0, 2, 3, 6], 3)

    Raises:
        ImportError: a megatron-core whose PackedSeqParams lacks a field that is needed; names it.

    Determinism: the same fields in every call.
    Synchronises: never.
    Memory: cu_seqlens; PackedMetadata's where they fit.
    Gradients: none: integers.
    """
    fields = metadata.to_megatron()
    parents = fields.pop("segment_parents", None)
    params = _params(**fields, total_tokens=metadata.total)
    if parents is not None:
        params.segment_parents = parents  # no field of megatron-core's
    if fields["cu_seqlens_q"] is not metadata.cu_seqlens:  # the padding is its last document, see patch_router
        params.num_tokens = metadata._num_tokens()
    if metadata.document_tokens is not None:
        params.document_lengths = metadata._tokens(whole=fields["cu_seqlens_q"] is metadata.cu_seqlens)["num_tokens"]
    return params


def preprocess_packed_seqs(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    sub_seq_lengths: Sequence[Sequence[int]] | None = None,
    tp_size: int = 1,
    cp_size: int = 1,
    cp_rank: int = 0,
    fp8: bool = False,
) -> tuple[torch.Tensor, PackedSeqParams]:
    """Pack a padded batch, and return this context-parallel rank's part of the row.

    Args:
        input_ids: ``[batch, seqlen, ...]``, any dtype.
        attention_mask: ``[batch, seqlen]``, any dtype, 0 at padding (left, right, holes).
        sub_seq_lengths: for rows of several documents, the tokens of each, row by row; each begins at the next multiple
            of the alignment. Without it a row is one document.
        tp_size, cp_size, cp_rank: of the model's parallel groups.
        fp8: align for fp8 too.

    Returns:
        ids ``[1, total / cp_size, ...]`` with 0 in padded slots, and PackedSeqParams whose ``cu_seqlens_*``, padded or
        not, are the cumulated aligned lengths of all documents (not only this rank's part), and ``max_seqlen_*`` the
        longest aligned. Padding is thus the end of its document, to which no token attends under a causal mask; without
        one give ``cu_seqlens_q`` and ``cu_seqlens_kv`` the real lengths. On CUDA one synchronisation, zero with
        sub_seq_lengths.

    Example:
        >>> ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]])
        >>> packed, params = preprocess_packed_seqs(ids, ids != 0, tp_size=4)
        >>> packed.tolist(), params.cu_seqlens_q.tolist(), params.max_seqlen_q
        ([[1, 2, 3, 4, 5, 0, 0, 0, 6, 7, 8, 0]], [0, 8, 12], 8)

    Raises:
        ValueError: shapes or devices that do not agree; documents that do not fit their row, or are where the mask says
            padding; cp_rank outside cp_size.
        ImportError: as packed_seq_params.

    Source:
        The contract of SkyRL's function of this name.

    Determinism: the same slots in every call.
    Synchronises: once on CUDA; with ``sub_seq_lengths`` never.
    Memory: this rank's part of the row and some integers per slot.
    Gradients: of floating tensors, by torch's indexing.
    """
    _check_padded("input_ids", input_ids, attention_mask)
    alignment = packed_alignment(tp_size, cp_size, fp8)
    lengths = document_lengths(attention_mask, sub_seq_lengths)
    slots = [aligned(length, alignment) for length in lengths]
    metadata = po.PackedMetadata.from_lengths(slots, device=input_ids.device)
    source = source_of_slots(metadata.cu_seqlens, metadata.total, attention_mask, sub_seq_lengths)
    source = _part(source, metadata.cu_seqlens, cp_size, cp_rank)
    fields = metadata.to_megatron()
    for side in ("q", "kv"):
        fields[f"cu_seqlens_{side}_padded"] = metadata.cu_seqlens
    params = _params(**fields, total_tokens=metadata.total)
    if lengths != slots:  # no field of megatron-core's, see patch_router
        params.document_lengths = torch.tensor(lengths, device=input_ids.device)
    return gate.gather_rows(input_ids, source, source.numel())[None], params


def next_token_targets(
    labels: torch.Tensor,
    packed_seq_params: PackedSeqParams,
    attention_mask: torch.Tensor,
    *,
    sub_seq_lengths: Sequence[Sequence[int]] | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    total: int | None = None,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return targets and loss mask for the slots that preprocess_packed_seqs gave this rank; no target crosses a
    document.

    The target of the last slot of a chunk is on another context-parallel rank: targets are shifted before the split.

    Args:
        labels: raw (unshifted) labels int64 or int32 ``[batch, seqlen]``, ``ignore_index`` where nothing is learnt.
        packed_seq_params, attention_mask, sub_seq_lengths, cp_size, cp_rank: of preprocess_packed_seqs.
        total: slots of the whole row, ``cp_size * ids.shape[1]``; without it one synchronisation on CUDA.

    Returns:
        targets ``[1, total / cp_size]`` in the dtype of labels, 0 without a target (a token that every loss can look
        up), and loss_mask float32, 1 for a target.

    Example:
        >>> ids = torch.tensor([[1, 2, 3], [6, 7, 0]])
        >>> _, params = preprocess_packed_seqs(ids, ids != 0, tp_size=2)
        >>> targets, loss_mask = next_token_targets(ids, params, ids != 0)
        >>> targets.tolist(), loss_mask.tolist()
        ([[2, 3, 0, 0, 7, 0]], [[1.0, 1.0, 0.0, 0.0, 1.0, 0.0]])

    Raises:
        ValueError: as preprocess_packed_seqs; packed_seq_params without cu_seqlens, or of other documents.

    Determinism: the same integers in every call.
    Synchronises: once on CUDA without ``total``; with it never.
    Memory: the results and some integers per slot.
    Gradients: none: integers.
    """
    _check_padded("labels", labels, attention_mask)
    cu_seqlens = spans_of(packed_seq_params).q_slots
    total = int(cu_seqlens[-1]) if total is None else total
    if cu_seqlens.is_cpu and total != cu_seqlens[-1]:
        raise ValueError(f"total: expected {int(cu_seqlens[-1])} slots as packed, got {total}")
    source = source_of_slots(cu_seqlens, total, attention_mask, sub_seq_lengths)
    packed = gate.gather_rows(labels, source, total).masked_fill(source < 0, ignore_index)
    targets = _part(po.shift_labels(packed, cu_seqlens, ignore_index=ignore_index), cu_seqlens, cp_size, cp_rank)[None]
    none = targets == ignore_index
    return targets.masked_fill(none, 0), (~none).float()


def postprocess_packed_seqs(
    values: torch.Tensor,
    packed_seq_params: PackedSeqParams,
    attention_mask: torch.Tensor,
    *,
    sub_seq_lengths: Sequence[Sequence[int]] | None = None,
    cp_group: torch.distributed.ProcessGroup | None = None,
) -> torch.Tensor:
    """Put the model's outputs at packed slots (log-probs, logits, hidden states) back into the rows of the batch.

    Args:
        values: ``[1, total / cp_size, ...]``.
        packed_seq_params, attention_mask, sub_seq_lengths: of preprocess_packed_seqs.
        cp_group: the context-parallel group; its ranks' parts are gathered.

    Returns:
        ``[batch, seqlen, ...]``, 0 at padding. A log-prob of the next token is at its query's slot: column s has the
        log-prob of token s + 1.

    Example:
        >>> ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]])
        >>> packed, params = preprocess_packed_seqs(ids, ids != 0, tp_size=4)
        >>> torch.equal(postprocess_packed_seqs(packed, params, ids != 0), ids)
        True

    Raises:
        ValueError: values of another shape than preprocess_packed_seqs gave; packed_seq_params without cu_seqlens, or
            of other documents.

    Source:
        The contract of SkyRL's function of this name.

    Determinism: the same bits in every call.
    Synchronises: never the host; with context parallelism the ranks meet in one all-gather.
    Memory: the whole row and the padded batch.
    Gradients: each rank's is its part's, so that ranks with the same loss add up to it once.
    """
    cp_size = 1 if cp_group is None else cp_group.size()
    if values.dim() < 2 or values.shape[0] != 1:
        raise ValueError(f"values: expected [1, total / cp_size, ...], got {list(values.shape)}")
    cu_seqlens, total = spans_of(packed_seq_params).q_slots, values.shape[1] * cp_size
    if cu_seqlens.is_cpu and total != cu_seqlens[-1]:
        raise ValueError(
            f"values: expected [1, {int(cu_seqlens[-1]) // cp_size}, ...] as packed, got {list(values.shape)}"
        )
    packed = values[0]
    if cp_size > 1:
        packed = _Gathered.apply(packed, cp_group)[thd_inverse_indices(cu_seqlens, cp_size, total=total)]
    source = source_of_slots(cu_seqlens, total, attention_mask, sub_seq_lengths)
    return gate.scatter_rows(packed, source, *attention_mask.shape)


class _Gathered(torch.autograd.Function):
    """The ranks' parts end to end; the gradient of this rank's part."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        ctx.rank, ctx.rows = group.rank(), local.shape[0]
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size())]
        torch.distributed.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.narrow(0, ctx.rank * ctx.rows, ctx.rows), None


def _params(total_tokens: int, **fields: Any) -> PackedSeqParams:
    """Return PackedSeqParams of those fields that the installed megatron-core has."""
    known = {field.name for field in dataclasses.fields(PackedSeqParams)}
    missing = [name for name in _NEEDED if name not in known]
    if missing:
        raise ImportError(f"megatron-core: expected PackedSeqParams with {_NEEDED}, the installed one lacks {missing}")
    params = PackedSeqParams(**{name: value for name, value in fields.items() if name in known})
    if "total_tokens" in known:  # later: given at once it makes seq_idx by a synchronisation
        params.total_tokens = total_tokens
    if "seq_idx" in known:  # what a newer MambaMixer tells documents by
        cu_seqlens = fields.get("cu_seqlens_q_padded", fields["cu_seqlens_q"])
        params.seq_idx = gate.seq_idx_from_cu_seqlens(cu_seqlens, total_tokens)[None]
    return params


def _part(row: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    if (cp_size, cp_rank) == (1, 0):
        return row
    return row[thd_partition_indices(cu_seqlens, cp_size, cp_rank, total=row.shape[0])]


def _check_padded(name: str, tensor: torch.Tensor, attention_mask: torch.Tensor) -> None:
    if tensor.dim() < 2 or tensor.shape[:2] != attention_mask.shape:
        raise ValueError(
            f"{name}: expected [batch, seqlen, ...] = {list(attention_mask.shape)} like attention_mask, "
            f"got {list(tensor.shape)}"
        )
    if tensor.device != attention_mask.device:
        raise ValueError(f"{name}: expected on {attention_mask.device} like attention_mask, got {tensor.device}")


# --- which slot of the padded batch each slot of the row is copied from ---


def document_lengths(attention_mask: Any, sub_seq_lengths: Sequence[Sequence[int]] | None) -> list[int]:
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
    # Rows of several documents, each at the next multiple of the alignment
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
