"""A packed row over the ranks of a group, and back: every rank gets equally many slots, whatever the documents'
lengths.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from packing_ops._runtime.arguments import (
    at_least,
    check_cu_seqlens,
    check_tensor,
    described,
    int32_cu_seqlens,
    integer,
    old_name,
    one_of,
    place_in,
    window_sides,
    wrong_type,
)
from packing_ops._runtime.batch_cache import kept_with
from packing_ops.boundaries import shift_labels
from packing_ops.data.context_parallel import SCHEMES, chunks_of_ranks, slots_of_chunks
from packing_ops.data.losses import masked_loss
from packing_ops.metadata import PackedMetadata, cu_seqlens_of, metadata_of_segments
from packing_ops.parallel.collectives import (
    Group,
    check_process,
    no_second_derivative,
    process_group,
    start_all_gather,
    start_sum_of_parts,
)

_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k")
# Never cut: there may be as many documents as slots.
_OF_DOCUMENTS = {
    *_DOCUMENTS, "max_length_q", "max_length_k", "packed_seq_lengths", "segment_parents", "num_items_in_batch",
}  # fmt: skip
_SAY_TOTAL = ("input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids")
_PER_SLOT = (*_SAY_TOTAL, "seq_idx", "attention_mask", "loss_mask")


def shard_packed(
    batch: Mapping[str, Any],
    group: Group | None = None,
    *,
    scheme: str = "contiguous",
    pad_token_id: int = 0,
    ignore_index: int = -100,
) -> dict[str, Any]:
    """Return this rank's slots of a packed row. Every rank of the group calls it with the same batch; nothing is sent.

    The row is padded at its end to a multiple of the ranks, by at most ``ranks - 1`` slots; documents are not padded.
    Labels are shifted before the split, so that no target is lost where ranks meet.

    Args:
        batch: tensors of one packed row, ``[total]``, ``[1, total]`` or ``[1, total, ...]``, and where its documents
            are: a PackedMetadata under any name, or ``cu_seq_lens_q`` as in transformers (or ``cu_seqlens``), or
            ``position_ids`` that restart with each document (which synchronises on CUDA). Of a prefix tree
            (PackedMetadata, or ``segment_parents`` with ``cu_seq_lens_q``) without labels: unshard gives
            prefix_token_logps the whole row.
        group: a process group, a DeviceMesh of one dimension, or None for all processes.
        scheme: ``"contiguous"``: rank r holds the r-th part of the row; for ulysses_attention, and for documents
            shorter than a part. ``"zigzag"``: two chunks of every document, one from either end; for gathered_attention
            under a causal mask over long documents, whose work it spreads evenly.
        pad_token_id, ignore_index: of input_ids and labels in the slots that pad the row.

    Returns:
        The batch with each tensor of the row cut to ``[rows]``, ``[1, rows]`` or ``[1, rows, ...]``, where ``rows`` is
        ``ceil(total / ranks)``. ``labels`` become next-token targets, also under ``shift_labels``, so that models of
        transformers do not shift them again; a batch with ``shift_labels`` keeps those. ``position_ids`` are made where
        they are missing: counted from the document's start. The arguments that say where documents are stay as they are
        for the whole row: PackedMetadata under its name with the padded total, or under ``metadata``; ``cu_seq_lens_q``
        and the like. Everything else is passed on.

    Example:
        The second of two ranks; the row's fifth slot is padding.

        >>> metadata = PackedMetadata.from_lengths([2, 3])
        >>> batch = {"input_ids": torch.tensor([5, 6, 7, 8, 9]), "metadata": metadata}
        >>> batch["labels"] = batch["input_ids"]
        >>> shard_of(batch, ranks=2, rank=1)["shift_labels"]
        tensor([   9, -100, -100])

    Raises:
        ValueError: no documents; labels of a prefix tree; input_ids, inputs_embeds, labels, shift_labels, position_ids,
            seq_idx, attention_mask or loss_mask of another shape; an unknown scheme.

    Determinism: the same slots in every call.
    Synchronises: once on CUDA if the documents are found by position_ids; else never. Nothing is sent.
    Memory: this rank's slots of each tensor.
    Gradients: of floating tensors, by torch's indexing.
    """
    group = process_group(group)
    return shard_of(
        batch,
        ranks=group.size(),
        rank=group.rank(),
        scheme=scheme,
        pad_token_id=pad_token_id,
        ignore_index=ignore_index,
    )


def shard_of(
    batch: Mapping[str, Any],
    *,
    ranks: int,
    rank: int,
    scheme: str = "contiguous",
    pad_token_id: int = 0,
    ignore_index: int = -100,
) -> dict[str, Any]:
    """Return what shard_packed returns on rank ``rank``, without a process group.

    Example:
        >>> batch = {"input_ids": torch.arange(6), "metadata": PackedMetadata.from_lengths([6])}
        >>> [shard_of(batch, ranks=3, rank=r, scheme="zigzag")["input_ids"].tolist() for r in range(3)]
        [[0, 5], [1, 4], [2, 3]]

    Raises:
        ValueError: as shard_packed; a rank outside of ``ranks``.

    Determinism: the same slots in every call.
    Synchronises: as shard_packed.
    Memory: as shard_packed.
    Gradients: of floating tensors, by torch's indexing.
    """
    one_of(scheme, SCHEMES, "scheme")
    if not 0 <= rank < at_least(ranks, "ranks", 1):
        raise ValueError(f"rank: expected 0 to ranks - 1 = {ranks - 1}, got {rank}")
    total = _total_of(batch)
    documents = _documents_of(batch, total)
    # The same documents in a row that the ranks divide
    padded, visible_end, paths = -(-total // ranks) * ranks, documents.visible_end, documents.paths
    visible_end = None if visible_end is None else F.pad(visible_end, (0, padded - documents.total))
    paths = None if paths is None else paths.padded(padded)
    whole = dataclasses.replace(documents, total=padded, indices=None, visible_end=visible_end, paths=paths)
    own = shard_indices(whole, ranks, rank, scheme=scheme)
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    row = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in _OF_DOCUMENTS and (tensor.shape == (total,) or tensor.shape[:2] == (1, total))
    }
    if misfit := next((name for name in _PER_SLOT if name in tensors and name not in row), None):
        raise ValueError(
            f"{misfit}: expected [total={total}] or [1, total] of the row, got {described(tensors[misfit])}"
        )
    of_labels = [name for name in ("labels", "shift_labels") if name in row]
    if documents.paths is not None and of_labels:
        raise ValueError(
            f"{of_labels[0]}: expected none in the row of a prefix tree, whose rows predict several tokens "
            f"(prefix_token_logps takes the whole row: unshard), got {described(row[of_labels[0]])}"
        )
    if "labels" in row and "shift_labels" not in row:
        row["shift_labels"] = shift_labels(row["labels"], documents.cu_seqlens, ignore_index=ignore_index)
    if "shift_labels" in row:
        row["labels"] = row["shift_labels"]
    fill = {
        "input_ids": pad_token_id,
        "labels": ignore_index,
        "shift_labels": ignore_index,
        "seq_idx": documents.num_documents,
        "routed_experts": -1,  # of no token
    }
    shard = dict(batch)
    for name, value in row.items():
        dim = 0 if value.dim() == 1 else 1
        if padded > total:
            beside = (0, 0) * (value.dim() - 1 - dim)
            value = F.pad(value, (*beside, 0, padded - total), value=fill.get(name, 0))
        shard[name] = value.index_select(dim, own.to(value.device))
    if "position_ids" not in row:
        flat = all(value.dim() == 1 for value in row.values())
        shard["position_ids"] = whole.position_ids[own] if flat else whole.position_ids[own][None]
    named = [name for name, value in batch.items() if isinstance(value, PackedMetadata)]
    for name in named or ([] if _named_documents(batch) else ["metadata"]):
        shard[name] = whole
    return shard


@old_name("documents")
def shard_indices(
    cu_seqlens: PackedMetadata | torch.Tensor,
    ranks: int,
    rank: int,
    *,
    scheme: str = "contiguous",
    total: int | None = None,
) -> torch.Tensor:
    """Return the slots of the whole row that one rank holds, in its order.

    Args:
        cu_seqlens: PackedMetadata of the row, or its cu_seqlens, int32 ``[num_documents + 1]``.
        ranks, rank: of the group.
        scheme: as shard_packed.
        total: slots of the row, a multiple of ``ranks``; by default the PackedMetadata's.

    Returns:
        int64 ``[total / ranks]``, on the device of the documents.

    Example:
        >>> metadata = PackedMetadata.from_lengths([5, 1])
        >>> [shard_indices(metadata, 2, rank, scheme="zigzag").tolist() for rank in range(2)]
        [[0, 1, 4], [2, 3, 5]]

    Raises:
        ValueError: a total that the ranks do not divide, a rank that is not one of them, an unknown scheme.

    Determinism: the same integers in every call.
    Synchronises: never.
    Memory: the result and some integers per slot.
    Gradients: none: integers.
    """
    one_of(scheme, SCHEMES, "scheme")
    ranks = at_least(ranks, "ranks", 1)
    rank = place_in(rank, "rank", ranks, "ranks")
    if total is None:
        if not isinstance(cu_seqlens, PackedMetadata):
            raise ValueError("total: expected the slots of the row beside cu_seqlens, got None")
        total = cu_seqlens.total
    if total % ranks:
        raise ValueError(f"total: expected a multiple of the {ranks} ranks, got {total}")
    cu_seqlens = cu_seqlens_of(cu_seqlens, total, like="total", tree=True)
    check_cu_seqlens(cu_seqlens)
    rows = total // ranks
    if scheme == "contiguous":
        return torch.arange(rank * rows, (rank + 1) * rows, device=cu_seqlens.device)
    starts = F.pad(cu_seqlens, (0, 1), value=total).long()
    begin, end = chunks_of_ranks(starts, rows, ranks, scheme)
    return slots_of_chunks(starts, begin[rank], end[rank], rows)[0]


@old_name("documents")
def unshard(
    rows: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor,
    group: Group | None = None,
    *,
    scheme: str = "contiguous",
    total: int | None = None,
) -> torch.Tensor:
    """Gather the whole row from the slots of each rank. Every rank of the group calls it. Differentiable.

    Args:
        rows: ``[rows, ...]`` of this rank, any dtype; ``[1, rows, ...]`` must be given without its first dimension.
        cu_seqlens: the PackedMetadata that shard_packed returned, or cu_seqlens.
        group, scheme: as shard_packed.
        total: slots of the row that are kept; without it all, the padding included.

    Returns:
        ``[total, ...]``, the same on every rank. Gradients of all ranks are summed, in their order.

    Example:
        >>> logits = unshard(logits, metadata, group)  # needs several processes # doctest: +SKIP

    Raises:
        ValueError: documents of another row, a total above it.

    Determinism: the same bits in every call, on the same ranks: gradients are summed in their order.
    Synchronises: never the host; one all-gather, in backward its transpose.
    Memory: the whole row.
    Gradients: of rows. No second derivative.
    """
    group = process_group(group)
    check_tensor(rows, "rows")
    if not rows.dim():
        raise ValueError(f"rows: expected [rows, ...], got {described(rows)}")
    ranks, slots = group.size(), group.size() * rows.shape[0]
    if total is not None and not 0 <= integer(total, "total") <= slots:
        raise ValueError(f"total: expected 0 to the {slots} rows of {ranks} ranks, got {total}")
    cu_seqlens = whole_row(cu_seqlens, rows.shape[0], ranks)
    indices = [shard_indices(cu_seqlens, ranks, rank, scheme=scheme, total=slots) for rank in range(ranks)]
    row_of = torch.cat(indices).to(rows.device)
    gathered = _Gather.apply(rows, group)
    whole = gathered[torch.empty_like(row_of).scatter_(0, row_of, torch.arange(slots, device=rows.device))]
    return whole if total is None else whole[:total]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return start_all_gather(rows, group)()

    @staticmethod
    @no_second_derivative("unshard")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return start_sum_of_parts(gradient, ctx.group)(), None


# --- the loss ---


def count_targets(shift_labels: torch.Tensor, group: Group | None = None, *, ignore_index: int = -100) -> torch.Tensor:
    """Count the targets of all ranks of the group: the divisor of the loss. Every rank of the group calls it.

    Args:
        shift_labels: any shape, of this rank: next-token targets, ``ignore_index`` for no target.
        group: those that hold other rows: the ranks of all sequence groups, or of this one.

    Returns:
        int64 scalar on the device of ``shift_labels``.

    Example:
        >>> count_targets(batch["shift_labels"], group)  # needs several processes # doctest: +SKIP

    Determinism: exact, the same integer on every rank.
    Synchronises: never the host; the ranks meet in one all-reduce.
    Memory: one number.
    Gradients: none: an integer.
    """
    group = process_group(group)
    check_process(group)
    count = (shift_labels != ignore_index).sum()
    dist.all_reduce(count, group=group)
    return count


def sharded_loss(
    losses: torch.Tensor,
    shift_labels: torch.Tensor,
    group: Group | None = None,
    *,
    num_items_in_batch: float | torch.Tensor | None = None,
    dp_size: int = 1,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return this rank's share of the loss: its sum over its targets, divided by the targets of all ranks.

    Args:
        losses: one per slot of this rank, floating: cross-entropy with ``reduction="none"``, -log p.
        shift_labels: of the same shape, as shard_packed gives them; slots with ``ignore_index`` do not count.
        group: the ranks whose targets are counted, by an all-reduce.
        num_items_in_batch: the targets of all micro-batches of all ranks, where they were counted before; then nothing
            is sent.
        dp_size: ranks whose gradients are averaged afterwards, as DistributedDataParallel and FSDP do, those of the
            sequence groups included: the loss is multiplied by it. 1 where gradients are summed.

    Returns:
        A scalar as masked_loss gives it. The shares of all ranks add up to the loss of the whole row, times dp_size.

    Example:
        >>> losses, targets = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([5, 6, -100])
        >>> sharded_loss(losses, targets, num_items_in_batch=4)
        tensor(0.7500)

    Raises:
        ValueError: as masked_loss.

    Determinism: the same bits in every call, on the same ranks.
    Synchronises: never the host; one all-reduce without ``num_items_in_batch``.
    Memory: losses in float64.
    Gradients: of losses, of any order.
    """
    if num_items_in_batch is None:
        num_items_in_batch = count_targets(shift_labels, group, ignore_index=ignore_index)
    mask = shift_labels != ignore_index
    return masked_loss(losses, mask, num_items_in_batch=num_items_in_batch, dp_size=dp_size)


# --- what every attention over a group is given ---


def check_window(window_size: tuple[int, int]) -> tuple[int, int]:
    """Check the window before ranks compare it."""
    left, right = window_sides(window_size)
    return integer(left, "window_size[0]"), integer(right, "window_size[1]")


def check_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: PackedMetadata | torch.Tensor
) -> PackedMetadata | torch.Tensor:
    """Return the documents. Raises ValueError for tensors that no rank could describe to the others."""
    for tensor, name in ((q, "q"), (k, "k"), (v, "v")):
        check_tensor(tensor, name)
        if tensor.dim() != 3 or tensor.shape[0] != q.shape[0]:
            rows = "rows" if tensor is q else f"rows={q.shape[0]}"
            raise ValueError(f"{name}: expected [{rows}, num_heads, head_dim], got {described(tensor)}")
    if not isinstance(documents, PackedMetadata):
        check_cu_seqlens(cu_seqlens_of(documents, len(q), like="q"))
    return documents


def whole_row(documents: PackedMetadata | torch.Tensor, rows: int, ranks: int) -> torch.Tensor:
    """Return int32 cu_seqlens of a row, from the number of slots of each rank."""
    cu_seqlens = cu_seqlens_of(documents, ranks * rows, like=f"the rows of {ranks} ranks", tree=True)
    check_cu_seqlens(cu_seqlens)
    if cu_seqlens.dtype == torch.int32:
        return cu_seqlens
    # The same tensor in every layer: what is made of it is kept with it.
    return kept_with((cu_seqlens,), ("int32",), lambda: int32_cu_seqlens(cu_seqlens))


# --- parts of shard_of ---


def _total_of(batch: Mapping[str, Any]) -> int:
    for name in _SAY_TOTAL:
        value = batch.get(name)
        if isinstance(value, torch.Tensor):
            if value.dim() > 1 and value.shape[0] != 1:
                raise ValueError(f"{name}: expected one packed row [total] or [1, total], got {described(value)}")
            return value.shape[0] if value.dim() == 1 else value.shape[1]
    raise ValueError(f"batch: expected input_ids, inputs_embeds, labels or position_ids, got {sorted(map(str, batch))}")


def _named_documents(batch: Mapping[str, Any]) -> list[str]:
    return [name for name in _DOCUMENTS if batch.get(name) is not None]


def _documents_of(batch: Mapping[str, Any], total: int) -> PackedMetadata:
    for name, value in batch.items():
        if isinstance(value, PackedMetadata):
            cu_seqlens_of(value, total, like="the row", name=str(name), tree=True)
            return value
    for name in _named_documents(batch):
        if not isinstance(batch[name], torch.Tensor):
            raise wrong_type(name, "an int32 tensor [num_documents + 1]", batch[name])
        if batch.get("segment_parents") is not None:
            return metadata_of_segments(batch[name], batch["segment_parents"], total)
        longest = batch.get("max_length_q")
        return PackedMetadata.from_cu_seqlens(batch[name], total=total, max_seqlen=longest)
    positions = batch.get("position_ids")
    if positions is None:
        raise ValueError("batch: expected a PackedMetadata, cu_seq_lens_q or position_ids, got none of them")
    return PackedMetadata.from_position_ids(positions)
