"""Losses that do not depend on how a batch was cut: padded or packed, in any micro-batches, on any number of ranks.

Two rules make that so. Sums are per document, so that no token counts for a neighbour; and what the sum is divided by
is counted once over the whole batch of the optimizer step, before it is cut, never over the part at hand.
"""

import torch
import torch.nn.functional as F

from packing_ops._args import check_real, described, integer, is_set, one_number
from packing_ops.boundaries import shift_labels
from packing_ops.segments import segment_sum


def sequence_logps(
    logits: torch.Tensor,
    labels: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    average: bool = False,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Log-probability that the model gives to the labels of each document, for DPO and the like. Differentiable.

    Args:
        logits: ``[batch, seqlen, vocab]``, or packed ``[1, total, vocab]`` or ``[total, vocab]``; floating.
        labels: logits' shape without vocab, int64 or int32, not shifted: label t is the token at t, predicted at t - 1.
            ``ignore_index`` where nothing counts (prompt, padding). The first of a document never counts.
        cu_seqlens: int32 ``[num_documents + 1]``: the documents of a packed row. Without it each row of
            ``[batch, seqlen]`` is one document.
        attention_mask: ``[batch, seqlen]``, not zero = real; needed where padding is on the left, since the first real
            token then has a slot before it.
        average: mean over the labels that count instead of their sum (0 where there are none).

    Returns:
        ``[num_documents]``, float64 for float64, else float32. No synchronisation. Half precision is raised to float32
        first: ``4 * vocab`` bytes per slot.

    Example:
        >>> logits = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.125, 0.875]]).log()
        >>> sequence_logps(logits, torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3], dtype=torch.int32)).exp()
        tensor([0.7500, 1.0000])

    Raises:
        ValueError: labels or attention_mask of another shape, cu_seqlens and attention_mask together, cu_seqlens past
            the labels.
    """
    _check_floating(logits, "logits")
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels: expected {list(logits.shape[:-1])} like logits, got {list(labels.shape)}")
    if attention_mask is not None:
        if cu_seqlens is not None:
            raise ValueError("attention_mask: expected None beside cu_seqlens (packed rows), got both")
        if attention_mask.shape != labels.shape:
            raise ValueError(
                f"attention_mask: expected {list(labels.shape)} like labels, got {list(attention_mask.shape)}"
            )
        real = is_set(attention_mask, "attention_mask")
        labels = labels.masked_fill(~(real & F.pad(real[:, :-1], (1, 0))), ignore_index)
    if cu_seqlens is None:
        cu_seqlens = _one_document_per_row(labels)
    targets = shift_labels(labels.flatten(), cu_seqlens, ignore_index=ignore_index).long()
    logits = _at_least_float32(logits).flatten(0, -2)
    logps = -F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="none")
    return segment_sum(logps, cu_seqlens, targets != ignore_index, average)


def masked_loss(
    losses: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    num_items_in_batch: float | torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    reduction: str = "token_mean",
    dp_size: int = 1,
) -> torch.Tensor:
    """This micro-batch's share of the loss of the whole batch: shares add up to it, and their gradients to its own.

    Args:
        losses: one per slot, floating: ``[batch, seqlen]``, or packed ``[1, total]`` or ``[total]``; cross-entropy
            with ``reduction="none"``, a policy loss, a KL term. What stands where the mask is 0 does not matter.
        loss_mask: the same shape, bool, integer or floating weights. The slots must be those of ``losses``: where
            losses belong to the slot that predicts, so does the mask (see shift_labels).
        num_items_in_batch: of all micro-batches of all ranks of this optimizer step: the sum of their loss masks
            (count_target_tokens) for "token_mean", the sequences with loss tokens for "sequence_mean", or all of them
            where those that are masked altogether shall count (normalize_advantages has count_masked_rows for it). 1 for
            a mask that is already divided by it, as PackedCollator's is. A tensor is not read. 0 gives 0.
        cu_seqlens: int32 ``[num_documents + 1]``: the documents of a packed row, slots after them do not count.
            Without it each row is one document. Only "sequence_mean" depends on it.
        reduction: ``"token_mean"``, every token counts the same; ``"sequence_mean"``, every sequence: the mean of each
            sequence's own mean.
        dp_size: ranks whose gradients are averaged afterwards, as DistributedDataParallel and FSDP do it: the share is
            multiplied by it. 1 where gradients are summed.

    Returns:
        A scalar, float64 for float64, else float32. No synchronisation.

    Example:
        >>> losses, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> masked_loss(losses, mask, num_items_in_batch=5)
        tensor(3.6000)
        >>> masked_loss(losses[:1], mask[:1], num_items_in_batch=5) + masked_loss(losses[1:], mask[1:], num_items_in_batch=5)
        tensor(3.6000)
        >>> masked_loss(losses, mask, num_items_in_batch=2, reduction="sequence_mean")
        tensor(3.2500)

    Raises:
        ValueError: a mask of another shape, an unknown reduction, num_items_in_batch below 0 or of several numbers,
            dp_size below 1, cu_seqlens past the slots.
    """
    _check_floating(losses, "losses")
    check_real(loss_mask, "loss_mask")
    if loss_mask.shape != losses.shape:
        raise ValueError(f"loss_mask: expected {list(losses.shape)} like losses, got {list(loss_mask.shape)}")
    if reduction not in ("token_mean", "sequence_mean"):
        raise ValueError(f"reduction: expected 'token_mean' or 'sequence_mean', got {reduction!r}")
    if integer(dp_size, "dp_size") < 1:
        raise ValueError(f"dp_size: expected at least 1 rank, got {dp_size}")
    if not isinstance(num_items_in_batch, torch.Tensor) and not num_items_in_batch >= 0:
        raise ValueError(f"num_items_in_batch: expected at least 0, got {num_items_in_batch}")
    if cu_seqlens is None:
        cu_seqlens = _one_document_per_row(losses)
    dtype = torch.float64 if losses.dtype == torch.float64 else torch.float32
    # In float64, so that 1 / (the sum of weights) is a number for all that float32 holds.
    weights = loss_mask.double().flatten()
    sums = segment_sum(losses.double().flatten() * weights, cu_seqlens, loss_mask.flatten())
    if reduction == "sequence_mean":
        totals = segment_sum(weights, cu_seqlens)
        sums = sums / totals.masked_fill(totals == 0, 1)
    if isinstance(num_items_in_batch, torch.Tensor):
        count = one_number(num_items_in_batch, "num_items_in_batch").to(sums, non_blocking=True)
    else:
        count = sums.new_full((), num_items_in_batch)
    share = sums.sum() * torch.where(count > 0, dp_size / count, count * 0)  # NaN stays NaN
    return share.to(dtype)


def _check_floating(tensor: torch.Tensor, name: str) -> None:
    check_real(tensor, name)
    if not tensor.is_floating_point():
        raise ValueError(f"{name}: expected a floating dtype, got {described(tensor)}")


def _at_least_float32(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _one_document_per_row(slots: torch.Tensor) -> torch.Tensor:
    seqlen = slots.shape[-1]
    return torch.arange(slots.shape[:-1].numel() + 1, dtype=torch.int32, device=slots.device) * seqlen
