"""Mini-batches of whole prompts: dealt to the ranks, and their advantages scaled so that a summed loss is a mean.

A mini-batch is a (start, end) pair of rows, from compute_prompt_mini_batch_boundaries: so many prompts, however many
rows their samples and turns are. The number of optimizer steps depends on the prompts alone.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from packing_ops._args import check_real, check_tensor, described, int64_tensor, integer, plain
from packing_ops.boundaries import seq_idx_from_cu_seqlens
from packing_ops.data.batches import num_rows, pad_batch_to_multiple, slice_batch
from packing_ops.segments import segment_sum

Boundaries = torch.Tensor | Sequence[tuple[int, int]]

REDUCTIONS = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")


def stage_chunks(
    batch: Mapping[str, Any],
    boundaries: Boundaries,
    dp_size: int,
    put: Callable[[dict], Any] | None = None,
) -> list[list[Any]]:
    """Every rank's part of every mini-batch, made before the first step: ``chunks[mini_batch][rank]``.

    Each mini-batch is padded to a multiple of ``dp_size`` on its own, as pad_batch_to_multiple does it (copies of its
    first row with ``loss_mask`` 0), and cut into ``dp_size`` runs of rows. Groups of equal size that the ranks divide
    need no padding, and give the slices of a fixed mini-batch size.

    Args:
        batch: rows are dim 0 of its tensors and the length of its lists.
        boundaries: (start, end) rows of each mini-batch, a list or int64 ``[num_mini_batches, 2]``, one after the
            other and together all rows.
        dp_size: data-parallel ranks.
        put: what becomes of a chunk, for example ``ray.put``; called once per chunk, mini-batch by mini-batch. Its
            chunks hold memory of their own, so that no pickle of one carries the whole batch. Without it chunks are
            the dicts, views of ``batch`` where nothing was padded.

    Returns:
        ``num_mini_batches`` lists of ``dp_size`` chunks. All chunks of a mini-batch have the same number of rows.

    Example:
        >>> batch = {"input_ids": torch.arange(7)[:, None], "loss_mask": torch.ones(7, 1)}
        >>> chunks = stage_chunks(batch, [(0, 3), (3, 7)], dp_size=2)
        >>> [[chunk["input_ids"].flatten().tolist() for chunk in ranks] for ranks in chunks]
        [[[0, 1], [2, 0]], [[3, 4], [5, 6]]]
        >>> chunks[0][1]["loss_mask"].flatten().tolist()
        [1.0, 0.0]

    Raises:
        ValueError: dp_size < 1; boundaries that leave rows out, overlap or are empty; what pad_batch_to_multiple
            raises.

    Copies the rows of padded mini-batches, all rows with ``put``. The scheme is that of SkyRL's MeshDispatch.
    """
    if integer(dp_size, "dp_size") < 1:
        raise ValueError(f"dp_size: expected at least 1 rank, got {dp_size}")
    staged = []
    for start, end in pairwise(_row_ends("boundaries", boundaries, num_rows(batch))):
        mini_batch = pad_batch_to_multiple(slice_batch(batch, start, end), dp_size)
        size = num_rows(mini_batch) // dp_size
        chunks = [slice_batch(mini_batch, rank * size, (rank + 1) * size) for rank in range(dp_size)]
        staged.append(chunks if put is None else [put(_with_own_memory(chunk)) for chunk in chunks])
    return staged


def normalize_advantages(
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    boundaries: Boundaries,
    reduction: str,
    *,
    prompt_boundaries: Boundaries | None = None,
    max_seq_len: int | None = None,
    zscore: bool = False,
) -> torch.Tensor:
    """Advantages scaled so that the sum of ``scaled * loss_mask`` over a mini-batch is its reduction.

    A policy loss that is linear in the advantages can then be summed over any micro-batches and ranks, and its
    gradient is that of the reduction over the whole mini-batch. Where the gradients of ranks are averaged instead of
    summed, as DistributedDataParallel and FSDP do it, multiply the loss by the number of ranks.

    With a row's loss tokens t and their mask values m_t (1 as a rule):
        ``"token_mean"``: the mean over all loss tokens of the mini-batch, sum(a * m) / sum(m).
        ``"sequence_mean"``: the mean over rows of each row's token mean.
        ``"seq_mean_token_sum_norm"``: the mean over rows of sum(a * m) / max_seq_len (Dr. GRPO).
        ``"prompt_mean"``: the mean over prompts of the token mean over all rows of the prompt.
    A row without loss tokens, and a prompt of such rows, is in no sum, count or mean: padding, and samples that are
    masked altogether.

    Args:
        advantages: floating ``[rows, seqlen]``.
        loss_mask: ``[rows, seqlen]``, floating, integer or bool; a token counts where it is over 0.
        boundaries: (start, end) rows of each mini-batch, one after the other and together all rows.
        reduction: one of the four names.
        prompt_boundaries: (start, end) rows of each prompt, as compute_prompt_boundaries gives them; needed for
            ``"prompt_mean"``, every prompt whole in one mini-batch.
        max_seq_len: tokens; needed for ``"seq_mean_token_sum_norm"``.
        zscore: first subtract the mean over the loss tokens of all mini-batches and divide by their standard
            deviation (of the population; all 0 where that is 0).

    Returns:
        A new tensor like ``advantages``, 0 where the mask is.

    Example:
        >>> advantages = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        >>> mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
        >>> scaled = normalize_advantages(advantages, mask, [(0, 2)], "token_mean")
        >>> round((scaled * mask).sum().item(), 4)  # (1 + 2 + 4 + 5 + 6) / 5
        3.6
        >>> scaled = normalize_advantages(advantages, mask, [(0, 2)], "sequence_mean")
        >>> round((scaled * mask).sum().item(), 4)  # (1.5 + 5) / 2
        3.25

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, an unknown reduction, what a reduction needs and did not
            get, boundaries that leave rows out or overlap, a prompt that is in two mini-batches.

    Statistics in float64, the product in float32 at least. No synchronisation. The reductions are SkyRL's; there, rows
    without loss tokens count as rows.
    """
    check_tensor(advantages, "advantages")
    if not advantages.is_floating_point() or advantages.dim() != 2:
        raise ValueError(f"advantages: expected floating [rows, seqlen], got {described(advantages)}")
    check_real(loss_mask, "loss_mask")
    if loss_mask.shape != advantages.shape or loss_mask.device != advantages.device:
        raise ValueError(
            f"loss_mask: expected {list(advantages.shape)} on {advantages.device} like advantages, "
            f"got {list(loss_mask.shape)} on {loss_mask.device}"
        )
    rows = advantages.shape[0]
    ends = _row_ends("boundaries", boundaries, rows)
    dtype = torch.promote_types(torch.promote_types(advantages.dtype, loss_mask.dtype), torch.float32)
    weights = _weights(loss_mask.to(dtype))
    tokens = _by_rows(lambda w: w.sum(dim=1, dtype=torch.float64), weights)
    has_tokens = (tokens > 0).double()

    if reduction == "token_mean":
        denominator = _sum_over(tokens, ends)
    elif reduction == "sequence_mean":
        denominator = _sum_over(has_tokens, ends) * tokens
    elif reduction == "seq_mean_token_sum_norm":
        if max_seq_len is None or max_seq_len < 1:
            raise ValueError(f"max_seq_len: expected at least 1 token for {reduction!r}, got {max_seq_len}")
        denominator = _sum_over(has_tokens, ends) * max_seq_len
    elif reduction == "prompt_mean":
        if prompt_boundaries is None:
            raise ValueError(f"prompt_boundaries: expected the rows of each prompt for {reduction!r}, got None")
        prompt_ends = _row_ends("prompt_boundaries", prompt_boundaries, rows)
        if cuts := {*ends} - {*prompt_ends}:
            raise ValueError(
                f"boundaries: expected whole prompts, got a mini-batch that ends inside one, at row {min(cuts)}"
            )
        prompt_tokens = _sum_over(tokens, prompt_ends)
        first_rows = torch.zeros_like(tokens).index_fill_(0, _cu_seqlens(prompt_ends, tokens.device)[:-1].long(), 1)
        denominator = _sum_over(first_rows * (prompt_tokens > 0), ends) * prompt_tokens
    else:
        raise ValueError(f"reduction: expected one of {', '.join(REDUCTIONS)}, got {reduction!r}")

    scaled = _where_weighted(advantages.to(dtype), weights)
    if zscore:
        scaled = _where_weighted(_zscored(scaled, weights, tokens.sum()), weights)
    scale = torch.where(tokens > 0, denominator.reciprocal(), 0)
    return scaled.mul_(scale[:, None].to(dtype)).to(advantages.dtype)


def _weights(loss_mask: torch.Tensor) -> torch.Tensor:
    """The mask, 0 where it is negative or no number."""
    # Where a look costs no synchronisation it saves two passes.
    if loss_mask.is_cpu and loss_mask.numel() and loss_mask.amin() >= 0:
        return loss_mask
    return loss_mask.nan_to_num(0.0, posinf=torch.inf).clamp_min_(0)


def _where_weighted(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``torch.where(weights > 0, values, 0)``, infinities and NaN left out too, in one pass a third as long."""
    return torch.ops.aten.threshold_backward(values, weights, 0)


def _zscored(values: torch.Tensor, weights: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    mean = _by_rows(lambda v, w: (v.double() * w).sum(dim=1), values, weights).sum() / total
    squares = _by_rows(lambda v, w: (v.double() - mean).square_().mul_(w).sum(dim=1), values, weights).sum()
    deviation = squares.div(total).sqrt()
    # What rounding leaves of equal values is no spread.
    deviation = torch.where(deviation > 1e-14 * mean.abs(), deviation, torch.inf)
    return _by_rows(lambda v: (v.double() - mean).div_(deviation).to(v.dtype), values)


def _by_rows(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """``function`` of the rows; on a CPU of a few at a time, so that the float64 in between stays in its cache."""
    rows, seqlen = tensors[0].shape
    size = max(1, 2**16 // max(1, seqlen) if tensors[0].is_cpu else rows)
    return torch.cat([function(*part) for part in zip(*(tensor.split(size) for tensor in tensors), strict=True)])


def _sum_over(values: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """For every row the sum over all rows of its own segment, ``ends[i] : ends[i + 1]``."""
    cu_seqlens = _cu_seqlens(ends, values.device)
    return segment_sum(values, cu_seqlens)[seq_idx_from_cu_seqlens(cu_seqlens, values.shape[0])]


def _cu_seqlens(ends: list[int], device: torch.device) -> torch.Tensor:
    return int64_tensor(ends).int().to(device, non_blocking=True)  # a list as an index would wait for the GPU


def _row_ends(name: str, boundaries: Boundaries, rows: int) -> list[int]:
    """[0, end, end, ..., rows] of pairs that follow on each other."""
    pairs = [(integer(start, name), integer(end, name)) for start, end in plain(boundaries)]
    ends = [0, *(end for _, end in pairs)]
    if ends[-1] != rows or any(
        start != before or end <= start for before, (start, end) in zip(ends, pairs, strict=False)
    ):
        raise ValueError(
            f"{name}: expected (start, end) pairs of at least one row, one after the other from 0 to {rows}, got {pairs}"
        )
    return ends


def _with_own_memory(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_own_memory(inner) for name, inner in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value
