"""Losses that do not depend on how a batch is split: padded or packed, in any micro-batches, on any number of ranks.

Two rules make that so. Sums are per document, so that neighbours in a row do not mix. And the denominator is counted
once, over the whole batch of the optimizer step, before the split; never over one micro-batch.
"""

from typing import Literal

import torch
import torch.nn.functional as F

from packing_ops._runtime.arguments import at_least, check_real, described, is_set, one_number, one_of, sum_dtype
from packing_ops._runtime.batch_cache import cu_seqlens_of_rows
from packing_ops.boundaries import shift_labels
from packing_ops.metadata import PackedMetadata, cu_seqlens_of
from packing_ops.segments import segment_sum


def sequence_logps(
    logits: torch.Tensor,
    labels: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    average: bool = False,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Sum the labels' log-probabilities of each document, for DPO and similar losses. Differentiable.

    Args:
        logits: ``[batch, seqlen, vocab]``, or packed ``[1, total, vocab]`` or ``[total, vocab]``; floating.
        labels: int64 or int32, the shape of logits without vocab, not shifted: label t is the token at t, which slot t
            - 1 predicts. ``ignore_index`` for the prompt and for padding. The first label of a document is always
            ignored.
        cu_seqlens: int32 ``[num_documents + 1]`` or PackedMetadata: the documents of a packed row. Without it each row
            of ``[batch, seqlen]`` is one document.
        attention_mask: ``[batch, seqlen]``, nonzero for tokens; needed with left padding, where the slot before the
            first token is padding.
        average: mean over the labels that are not ignored, instead of the sum; 0 without any.

    Returns:
        ``[num_documents]``, float64 for float64 logits, else float32.

    Example:
        >>> logits = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.125, 0.875]]).log()
        >>> sequence_logps(logits, torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3], dtype=torch.int32)).exp()
        tensor([0.7500, 1.0000])

    Raises:
        ValueError: labels or attention_mask of another shape, cu_seqlens and attention_mask together, cu_seqlens past
            the end of labels.

    Determinism: the same bits in every call.
    Synchronises: never.
    Memory: logits in float32, ``4 * vocab`` bytes per slot, if they are of a half type; their log-softmax.
    Gradients: of logits, of any order; forward mode too.
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
    cu_seqlens = _documents_of(labels, "labels", cu_seqlens)
    targets = shift_labels(labels.flatten(), cu_seqlens, ignore_index=ignore_index).long()
    logits = logits.to(sum_dtype(logits.dtype)).flatten(0, -2)
    logps = -F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="none")
    return segment_sum(logps, cu_seqlens, targets != ignore_index, average)


def masked_loss(
    losses: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    num_items_in_batch: float | torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor | None = None,
    reduction: Literal["token_mean", "sequence_mean"] = "token_mean",
    dp_size: int = 1,
) -> torch.Tensor:
    """Return this micro-batch's share of the loss of the whole batch. Shares add up to that loss, and so do their
    gradients.

    Args:
        losses: one per slot, floating ``[batch, seqlen]``, or packed ``[1, total]`` or ``[total]``: cross-entropy with
            ``reduction="none"``, a policy loss, a KL term. Values where the mask is 0 do not matter.
        loss_mask: bool, integer or floating weights of the same shape, slot by slot. Where losses are at the slot
            that predicts, shift the mask there too (see shift_values).
        num_items_in_batch: the denominator, over all micro-batches of all ranks of this optimizer step. "token_mean":
            the sum of their loss masks (count_target_tokens). "sequence_mean": the number of sequences with loss
            tokens, or of all sequences if fully masked ones should count (count_masked_rows of normalize_advantages). 1
            for a mask that is already divided by it, such as PackedCollator's. A tensor causes no synchronisation. 0
            gives a loss of 0.
        cu_seqlens: int32 ``[num_documents + 1]`` or PackedMetadata: the documents of a packed row. Slots after the last
            document do not count. Without cu_seqlens each row is one document.
        reduction: ``"token_mean"``: every token weighs the same. ``"sequence_mean"``: every sequence does, the mean
            over sequences of each one's token mean.
        dp_size: number of ranks whose gradients are averaged afterwards, as by DistributedDataParallel and FSDP: the
            loss is multiplied by it. 1 where gradients are summed.

    Returns:
        A scalar, float64 for float64 losses, else float32.

    Example:
        >>> losses, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> masked_loss(losses, mask, num_items_in_batch=5)
        tensor(3.6000)
        >>> sum(masked_loss(losses[i : i + 1], mask[i : i + 1], num_items_in_batch=5) for i in range(2))
        tensor(3.6000)
        >>> masked_loss(losses, mask, num_items_in_batch=2, reduction="sequence_mean")
        tensor(3.2500)

    Raises:
        ValueError: a mask of another shape, an unknown reduction, num_items_in_batch below 0 or with several elements,
            dp_size below 1, cu_seqlens past the end of losses.

    Determinism: the same bits in every call.
    Synchronises: never.
    Memory: losses and weights in float64.
    Gradients: of losses, of any order; forward mode too.
    """
    _check_floating(losses, "losses")
    check_real(loss_mask, "loss_mask")
    if loss_mask.shape != losses.shape:
        raise ValueError(f"loss_mask: expected {list(losses.shape)} like losses, got {list(loss_mask.shape)}")
    one_of(reduction, ("token_mean", "sequence_mean"), "reduction")
    at_least(dp_size, "dp_size", 1, "rank")
    if not isinstance(num_items_in_batch, torch.Tensor) and not num_items_in_batch >= 0:
        raise ValueError(f"num_items_in_batch: expected at least 0, got {num_items_in_batch}")
    cu_seqlens = _documents_of(losses, "losses", cu_seqlens)
    # float64: 1 / (sum of weights) is finite for every sum that float32 can hold.
    weights = loss_mask.double().flatten()
    sums = segment_sum(losses.double().flatten() * weights, cu_seqlens, loss_mask.flatten())
    if reduction == "sequence_mean":
        totals = segment_sum(weights, cu_seqlens)
        sums = sums / totals.masked_fill(totals == 0, 1)
    if isinstance(num_items_in_batch, torch.Tensor):
        count = one_number(num_items_in_batch, "num_items_in_batch").to(sums, non_blocking=True)
    else:
        count = sums.new_full((), num_items_in_batch)
    share = sums.sum() * torch.where(count > 0, dp_size / count, count * 0)  # count * 0: NaN stays NaN
    return share.to(sum_dtype(losses.dtype))


def _check_floating(tensor: torch.Tensor, name: str) -> None:
    check_real(tensor, name)
    if not tensor.is_floating_point():
        raise ValueError(f"{name}: expected a floating dtype, got {described(tensor)}")


def _documents_of(slots: torch.Tensor, name: str, cu_seqlens: PackedMetadata | torch.Tensor | None) -> torch.Tensor:
    """Return the cu_seqlens of these slots; without any given each row is a document."""
    if cu_seqlens is None:
        cu_seqlens = cu_seqlens_of_rows(slots.shape[:-1].numel(), slots.shape[-1], slots.device)
    return cu_seqlens_of(cu_seqlens, slots.numel(), like=name)
