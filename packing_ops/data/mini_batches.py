"""Mini-batches of RL: a rollout's rows cut by whole prompts, dealt to the ranks, their advantages scaled.

For PPO, GRPO and their like, where one rollout takes several optimizer steps. SFT does not need it: it has
micro-batches (token_budget_microbatches) and masked_loss.

A mini-batch is a (start, end) pair of rows from compute_prompt_mini_batch_boundaries, and the rows of one optimizer
step. It holds a fixed number of prompts. How many rows these have depends on their samples and turns. Rows after the
last pair are padding, in no chunk, sum or mean.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import torch

from packing_ops._runtime.arguments import (
    at_least,
    check_real,
    check_tensor,
    described,
    int64_tensor,
    integer,
    plain,
    wrong_type,
)
from packing_ops.boundaries import seq_idx_from_cu_seqlens
from packing_ops.data._batch_fields import Fields, with_own_memory
from packing_ops.data.rows import Fill, pad_batch_to_multiple, slice_batch
from packing_ops.segments import segment_sum

Boundaries = torch.Tensor | Sequence[tuple[int, int]]

Reduction = Literal["token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"]
REDUCTIONS = get_args(Reduction)


def validate_batch_sizes(
    train_batch_size: int,
    mini_batch_size: int,
    *,
    n_samples_per_prompt: int = 1,
    dp_size: int = 1,
    micro_batch_size: int = 1,
    reduction: Reduction = "token_mean",
    is_stepwise: bool = False,
) -> int:
    """Return the number of mini-batches of a rollout, where the sizes fit each other: before the first rollout is made.

    Args:
        train_batch_size: prompts of a rollout, a multiple of ``mini_batch_size``.
        mini_batch_size: prompts of an optimizer step.
        n_samples_per_prompt: rows of each prompt.
        dp_size: data-parallel ranks; they divide the rows of a mini-batch.
        micro_batch_size: rows of a forward, which divide those of a rank's mini-batch.
        reduction: as normalize_advantages takes it.
        is_stepwise: a prompt has any number of rows. Dummy rows then fill what ranks and micro-batches leave, and
            ``"token_mean_legacy"``, a mean over micro-batches, would depend on how many.

    Example:
        >>> validate_batch_sizes(256, 64, n_samples_per_prompt=5, dp_size=8, micro_batch_size=4)
        4
        >>> validate_batch_sizes(256, 64, n_samples_per_prompt=5, dp_size=7)
        Traceback (most recent call last):
        ValueError: mini_batch_size: expected rows that dp_size=7 divides, got 64 prompts of 5 rows, 320 in all

    Raises:
        ValueError: a size below 1 or one that does not divide what it must; an unknown reduction, or
            ``"token_mean_legacy"`` with ``is_stepwise``.
        TypeError: a size that is no integer.
    """
    prompts = at_least(train_batch_size, "train_batch_size", 1, "prompt")
    mini = at_least(mini_batch_size, "mini_batch_size", 1, "prompt")
    samples = at_least(n_samples_per_prompt, "n_samples_per_prompt", 1, "row")
    ranks, micro = at_least(dp_size, "dp_size", 1, "rank"), at_least(micro_batch_size, "micro_batch_size", 1, "row")
    if prompts % mini:
        raise ValueError(f"train_batch_size: expected a multiple of mini_batch_size={mini}, got {prompts}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if is_stepwise:
        if reduction == "token_mean_legacy":
            raise ValueError(
                f"reduction: with is_stepwise expected one that dummy rows do not change, got {reduction!r}"
            )
        return prompts // mini
    rows = mini * samples
    got = f"got {mini} prompts of {samples} rows, {rows} in all"
    if rows % ranks:
        raise ValueError(f"mini_batch_size: expected rows that dp_size={ranks} divides, {got}")
    if rows // ranks % micro:
        raise ValueError(f"micro_batch_size: expected a divisor of a rank's {rows // ranks} rows, got {micro}")
    return prompts // mini


def stage_chunks(
    batch: Mapping[str, Any],
    boundaries: Boundaries,
    dp_size: int,
    put: Callable[[Mapping[str, Any]], Any] | None = None,
    *,
    fill: Fill | None = None,
    row_keys: Sequence[str] = (),
    batch_keys: Sequence[str] = (),
) -> list[list[Any]]:
    """Make every rank's part of every mini-batch before the first step: ``chunks[mini_batch][rank]``.

    Each mini-batch is padded to a multiple of ``dp_size`` by pad_batch_to_multiple (copies of its first row with
    ``loss_mask`` 0 and ``labels`` -100), and cut into ``dp_size`` chunks of neighbouring rows. A mini-batch whose rows
    ``dp_size`` divides is not padded.

    Args:
        batch: see the docstring of packing_ops.data.rows. Chunks are of its class; its metadata is cut with the rows.
        boundaries: (start, end) rows of each mini-batch, a list or int64 ``[num_mini_batches, 2]``, contiguous from row
            0 on. Rows after the last one are padding and in no chunk.
        dp_size: number of data-parallel ranks.
        put: called with each chunk, mini-batch by mini-batch, for example ``ray.put``; its results are returned in
            place of the chunks. Chunks then have memory that they do not share, so that pickling one does not serialise
            the whole batch. Without it the chunks are returned; they are views of ``batch`` where nothing was padded.
        fill: what dummy rows hold instead of copies, as in pad_batch_to_multiple.
        row_keys, batch_keys: see the docstring of packing_ops.data.rows. Each chunk gets the fields in batch_keys
            whole.

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
        ValueError: dp_size < 1; boundaries with gaps, overlaps or an empty pair, or no boundaries for a batch with
            rows; as pad_batch_to_multiple.

    Copies the rows of padded mini-batches; with ``put`` all rows. The same chunks as SkyRL's MeshDispatch.stage_chunks.

    Determinism: the same chunks in every call.
    Synchronises: once for boundaries on CUDA.
    Memory: copies of padded mini-batches; with ``put`` of all rows.
    Gradients: of floating tensors, through views and copies.
    """
    at_least(dp_size, "dp_size", 1, "rank")
    fields = Fields(batch, row_keys, batch_keys)
    staged, ends = [], _row_ends("boundaries", boundaries, fields.count())
    keys: dict[str, Any] = fields.decided()
    for start, end in pairwise(ends):
        mini_batch = pad_batch_to_multiple(slice_batch(batch, start, end, **keys), dp_size, fill=fill, **keys)
        size = -(-(end - start) // dp_size)
        chunks = [slice_batch(mini_batch, rank * size, (rank + 1) * size, **keys) for rank in range(dp_size)]
        staged.append(chunks if put is None else [put(with_own_memory("batch", chunk)) for chunk in chunks])
    return staged


def normalize_advantages(
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    boundaries: Boundaries,
    reduction: Reduction,
    *,
    prompt_boundaries: Boundaries | None = None,
    max_seq_len: int | None = None,
    micro_batch_size: int | None = None,
    count_masked_rows: bool = False,
    zscore: bool = False,
) -> torch.Tensor:
    """Return advantages scaled so that the sum of ``scaled * loss_mask`` over a mini-batch is its reduction.

    A policy loss that is linear in the advantages can then be summed over any micro-batches and ranks. Its gradient is
    the gradient of the reduction over the whole mini-batch. DistributedDataParallel and FSDP average the gradients of
    the ranks instead of summing them: multiply the loss by the number of ranks there.

    The reductions, with a = the advantages and m = loss_mask (usually 1) of the loss tokens:
        ``"token_mean"``: the mean over all loss tokens of the mini-batch, sum(a * m) / sum(m).
        ``"sequence_mean"``: the mean over rows of each row's token mean.
        ``"seq_mean_token_sum_norm"``: the mean over rows of sum(a * m) / max_seq_len (Dr. GRPO).
        ``"prompt_mean"``: the mean over prompts of the token mean over all rows of the prompt.
        ``"token_mean_legacy"``: the mean over micro-batches, each ``micro_batch_size`` rows of the mini-batch, of the
            token mean over all rows of the micro-batch: what a mean per micro-batch and gradient accumulation give.
    Rows without loss tokens do not count, nor do prompts or micro-batches that have only such rows. So dummy rows,
    whose number depends on the number of ranks, change nothing. ``count_masked_rows=True`` counts them.

    Args:
        advantages: floating ``[rows, seqlen]``.
        loss_mask: ``[rows, seqlen]``, floating, integer or bool; a token counts where it is over 0.
        boundaries: (start, end) rows of each mini-batch, contiguous from row 0 on. Rows after the last one are padding:
            in no statistic, whatever their mask is.
        reduction: one of the five names.
        prompt_boundaries: (start, end) rows of each prompt, from compute_prompt_boundaries; needed for
            ``"prompt_mean"``. They must reach at least as far as boundaries, with no prompt in two mini-batches.
        max_seq_len: tokens; needed for ``"seq_mean_token_sum_norm"``.
        micro_batch_size: rows; needed for ``"token_mean_legacy"``. It must divide the rows of each mini-batch.
        count_masked_rows: count rows, prompts and micro-batches without loss tokens in the denominators, as SkyRL does:
            a fully masked sample then lowers the weight of the others. It also counts dummy rows inside a mini-batch.
        zscore: first subtract the mean over the loss tokens of all mini-batches, and divide by their standard deviation
            (of the population, ``correction=0``; where that is 0, all advantages become 0).

    Returns:
        A new tensor like ``advantages``; 0 where the mask is 0, and in rows after the last boundary.

    Example:
        >>> advantages = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        >>> mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
        >>> scaled = normalize_advantages(advantages, mask, [(0, 2)], "token_mean")
        >>> round((scaled * mask).sum().item(), 4)  # (1 + 2 + 4 + 5 + 6) / 5
        3.6
        >>> scaled = normalize_advantages(advantages, mask, [(0, 2)], "sequence_mean")
        >>> round((scaled * mask).sum().item(), 4)  # (1.5 + 5) / 2
        3.25
        >>> masked = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
        >>> for count in (False, True):  # 1.5 / 1, 1.5 / 2
        ...     scaled = normalize_advantages(advantages, masked, [(0, 2)], "sequence_mean", count_masked_rows=count)
        ...     print((scaled * masked).sum().item())
        1.5
        0.75

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; an unknown reduction, or a missing argument that it
            needs; boundaries with gaps or overlaps, or no boundaries for a batch with rows; a prompt in two
            mini-batches; rows of a mini-batch that are in no prompt, or that micro_batch_size does not divide.

    Statistics are computed in float64, the product in float32 or more. The reductions are SkyRL's.

    Determinism: the same bits in every call.
    Synchronises: never for boundaries on the CPU.
    Memory: the result; on the CPU float64 copies of a few rows at a time.
    Gradients: of advantages, of any order; forward mode too.
    """
    # Check, and leave out the padding rows
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
    advantages, loss_mask = advantages[: ends[-1]], loss_mask[: ends[-1]]
    # Count the loss tokens of each row
    dtype = torch.promote_types(torch.promote_types(advantages.dtype, loss_mask.dtype), torch.float32)
    weights = loss_mask.to(dtype)
    # 0 for negative values and NaN. On the CPU reading the minimum does not synchronise, and saves two passes.
    if not (weights.is_cpu and weights.numel() and weights.amin() >= 0):
        weights = weights.nan_to_num(0.0, posinf=torch.inf).clamp_min_(0)
    tokens = _by_rows(lambda w: w.sum(dim=1, dtype=torch.float64), weights)

    counted = torch.ones_like(tokens) if count_masked_rows else (tokens > 0).double()

    def mean_over(groups: list[int]) -> torch.Tensor:
        """Return ``[rows]``, the divisor of each row's advantages: for a mean, over the groups ``groups[i] :
        groups[i + 1]`` of rows, of the groups' token means.
        """
        group_tokens = _sum_over(tokens, groups)
        first_rows = torch.zeros_like(tokens).index_fill_(0, _cu_seqlens(groups, tokens.device)[:-1].long(), 1)
        return _sum_over(first_rows if count_masked_rows else first_rows * (group_tokens > 0), ends) * group_tokens

    # What each row's advantages are divided by
    if reduction == "token_mean":
        denominator = _sum_over(tokens, ends)
    elif reduction == "token_mean_legacy":
        denominator = mean_over(_micro_ends(ends, micro_batch_size))
    elif reduction == "sequence_mean":
        denominator = _sum_over(counted, ends) * tokens
    elif reduction == "seq_mean_token_sum_norm":
        if max_seq_len is None or max_seq_len < 1:
            raise ValueError(f"max_seq_len: expected at least 1 token for {reduction!r}, got {max_seq_len}")
        denominator = _sum_over(counted, ends) * max_seq_len
    elif reduction == "prompt_mean":
        if prompt_boundaries is None:
            raise ValueError(f"prompt_boundaries: expected the rows of each prompt for {reduction!r}, got None")
        prompt_ends = _row_ends("prompt_boundaries", prompt_boundaries, rows, least=ends[-1])
        if cuts := {*ends} - {*prompt_ends}:
            raise ValueError(
                f"boundaries: expected whole prompts, got a mini-batch that ends inside one, at row {min(cuts)}"
            )
        denominator = mean_over([end for end in prompt_ends if end <= ends[-1]])
    else:
        raise ValueError(f"reduction: expected one of {', '.join(REDUCTIONS)}, got {reduction!r}")

    # Normalise, divide, put the padding rows back
    scaled = _where_weighted(advantages.to(dtype), weights)
    if zscore:
        total = tokens.sum()
        mean = _by_rows(lambda v, w: (v.double() * w).sum(dim=1), scaled, weights).sum() / total
        squares = _by_rows(lambda v, w: (v.double() - mean).square_().mul_(w).sum(dim=1), scaled, weights).sum()
        deviation = squares.div(total).sqrt()
        # Equal values may have a deviation that is only rounding error: treated as 0, as inf makes every z-score 0.
        deviation = torch.where(deviation > 1e-14 * mean.abs(), deviation, torch.inf)
        scaled = _where_weighted(_by_rows(lambda v: (v.double() - mean).div_(deviation).to(v.dtype), scaled), weights)
    scale = torch.where(tokens > 0, denominator.reciprocal(), 0)
    scaled = scaled.mul_(scale[:, None].to(dtype)).to(advantages.dtype)
    return torch.nn.functional.pad(scaled, (0, 0, 0, rows - ends[-1])) if ends[-1] < rows else scaled


def _where_weighted(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return ``torch.where(weights > 0, values, 0)`` in one pass, a third of the time. Masked infinities and NaN
    become 0 too.
    """
    return torch.ops.aten.threshold_backward(values, weights, 0)


def _by_rows(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Return ``function`` of the rows; on the CPU of a few rows at a time, so that the float64 temporaries fit the
    cache.
    """
    rows, seqlen = tensors[0].shape
    size = max(1, 2**16 // max(1, seqlen) if tensors[0].is_cpu else rows)
    return torch.cat([function(*part) for part in zip(*(tensor.split(size) for tensor in tensors), strict=True)])


def _sum_over(values: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Return ``[rows]``: for each row the sum over its segment ``ends[i] : ends[i + 1]``.

    Example:
        >>> _sum_over(torch.tensor([1.0, 2.0, 4.0]), [0, 1, 3]).tolist()
        [1.0, 6.0, 6.0]
    """
    cu_seqlens = _cu_seqlens(ends, values.device)
    return segment_sum(values, cu_seqlens)[seq_idx_from_cu_seqlens(cu_seqlens, values.shape[0])]


def _cu_seqlens(ends: list[int], device: torch.device) -> torch.Tensor:
    return int64_tensor(ends).int().to(device, non_blocking=True)  # a list as an index would wait for the GPU


def _row_ends(name: str, boundaries: Boundaries, rows: int, least: int | None = None) -> list[int]:
    """Return [0, end of pair 0, end of pair 1, ...], checked: contiguous pairs that reach row ``least`` (1 if there
    are rows).
    """
    try:
        pairs = [(start, end) for start, end in plain(boundaries)]
    except (TypeError, ValueError):
        raise wrong_type(name, "(start, end) pairs", boundaries) from None
    pairs = [(integer(start, name), integer(end, name)) for start, end in pairs]
    ends = [0, *(end for _, end in pairs)]
    least = min(1, rows) if least is None else least
    if not least <= ends[-1] <= rows or any(
        start != before or end <= start for before, (start, end) in zip(ends, pairs, strict=False)
    ):
        up_to = f"at least {least}, the end of boundaries" if least > 1 else f"at most {rows}"
        raise ValueError(
            f"{name}: expected (start, end) pairs of at least one row, one after the other from 0 to {up_to}, got "
            f"{pairs}"
        )
    return ends


def _micro_ends(ends: list[int], micro_batch_size: int | None) -> list[int]:
    """Return [0, end of micro-batch 0, ...], checked: micro_batch_size divides the rows of each mini-batch.

    Example:
        >>> _micro_ends([0, 4, 6], 2)
        [0, 2, 4, 6]
    """
    if micro_batch_size is None or integer(micro_batch_size, "micro_batch_size") < 1:
        raise ValueError(f"micro_batch_size: expected at least 1 row for 'token_mean_legacy', got {micro_batch_size}")
    for start, end in pairwise(ends):
        if (end - start) % micro_batch_size:
            raise ValueError(
                f"micro_batch_size: expected to divide the rows of every mini-batch, got {micro_batch_size} for the "
                f"{end - start} rows {start} to {end}"
            )
    return [*range(0, ends[-1], micro_batch_size), ends[-1]]
