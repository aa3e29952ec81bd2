"""Micro-batches by a budget of tokens: the same number for every rank, of near-equal cost."""

import re
from collections.abc import Sequence

import torch

from packing_ops._arguments import at_least, described, index_tensor
from packing_ops.packing import cost_coefficients, pack_sequences


def token_budget_microbatches(
    lengths: torch.Tensor | Sequence[int],
    max_tokens: int,
    *,
    dp_size: int,
    cost: str | tuple[str, float, float] = "tokens",
) -> list[list[list[int]]]:
    """Which sequences each rank runs in each of its micro-batches, none of which has more than ``max_tokens``.

    The number of micro-batches is about the fewest that the budget allows, rounded up to a multiple of ``dp_size``. They
    are balanced in cost, sorted from costly to cheap, and assigned ``dp_size`` at a time: a step gets the next-costliest
    ones, and the costliest of them goes to the rank with the lowest total so far. So the ranks finish each micro-batch at
    about the same time (FSDP, expert parallel), and the whole step even more so. The largest micro-batch is in step 0, so
    that one too large for the memory fails at once.

    Args:
        lengths: int32 or int64 ``[num_sequences]``, tokens per sequence, or a Python sequence.
        max_tokens: per micro-batch, a hard cap. Padding is not counted: micro-batches are meant to be packed.
        dp_size: number of data-parallel ranks.
        cost: what is balanced: ``"tokens"``, ``"flops"`` or ``("flops", a, b)``: a * L + b * L**2 for a sequence of L
            tokens (a = 12 * hidden_size, b = 1 for a dense causal decoder; "flops" assumes hidden_size 4096).

    Returns:
        ``result[rank][step]``, a list of indices into ``lengths``, longest first. Each index occurs once; all ranks have
        the same number of steps. With too few sequences for that, each one is a micro-batch of its own, and some ranks
        have an empty list in the last step. They must run that step too, since the other ranks wait for them: with
        empty_like_batch, or with any row whose loss_mask is 0. Without lengths there are no steps.

    Example:
        >>> token_budget_microbatches([820, 410, 520, 110, 250, 700, 50], 1024, dp_size=2)
        [[[0], [1, 4]], [[5], [2, 3, 6]]]
        >>> token_budget_microbatches([600, 500, 400], 1024, dp_size=2)
        [[[1, 2]], [[0]]]
        >>> token_budget_microbatches([600], 1024, dp_size=2)
        [[[0]], [[]]]

    Raises:
        ValueError: a length that is negative or over max_tokens (it is named), max_tokens or dp_size below 1, an
            unknown cost, costs whose sum is past a double.
        TypeError: lengths that are not integers.

    Deterministic; runs on the CPU (a CUDA tensor is copied, which synchronises). The algorithm is that of pack_sequences
    with "balanced": longest first, each into the cheapest micro-batch with room, then swaps of two sequences between a
    costly and a cheap one. Where the cap leaves room, the balance is within 1 part in 5,000 of that of the largest
    differencing method (Karmarkar and Karp 1982), and usually better.
    """
    max_tokens, dp_size = at_least(max_tokens, "max_tokens", 1), at_least(dp_size, "dp_size", 1, "rank")
    balance = ("flops", *cost_coefficients(cost, "cost"))
    lengths = index_tensor(lengths, "lengths").cpu()
    if lengths.dim() != 1 or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"lengths: expected int32 or int64 [num_sequences], got {described(lengths)}")
    num_sequences = lengths.numel()
    if not num_sequences:
        return [[] for _ in range(dp_size)]
    longest = int(lengths.argmax())
    if lengths[longest] > max_tokens:
        raise ValueError(
            f"lengths: expected at most max_tokens={max_tokens}, got {int(lengths[longest])} at index {longest}"
        )
    # Empty sequences: with them there are enough for a multiple of dp_size. They are removed from the result.
    lengths = torch.cat([lengths, lengths.new_zeros(dp_size - 1)])
    try:
        packing = pack_sequences(lengths, max_tokens, strategy="balanced", balance=balance, bins_multiple_of=dp_size)
    except ValueError as error:
        raise ValueError(re.sub("^balance:", "cost:", str(error))) from None
    bins = [[index for index in bin if index < num_sequences] for bin in packing.bins]
    return [bins[rank::dp_size] for rank in range(dp_size)]
