"""Micro-batches by a budget of tokens: the same number for every rank, of near-equal cost."""

import re
from collections.abc import Sequence

import torch

from packing_ops._args import described, index_tensor, integer
from packing_ops.packing import cost_coefficients, pack_sequences


def token_budget_microbatches(
    lengths: torch.Tensor | Sequence[int],
    max_tokens: int,
    *,
    dp_size: int,
    cost: str | tuple[str, float, float] = "tokens",
) -> list[list[list[int]]]:
    """Which sequences every rank runs in each of its micro-batches, none of which holds more than ``max_tokens``.

    About as few micro-batches as the budget allows, rounded up to a multiple of ``dp_size``. They are made equal in
    cost, then sorted from costly to cheap and dealt ``dp_size`` at a time: micro-batch ``step`` is the next-costliest
    on every rank at once, and within a step the costliest goes to the rank that has had the least so far. So ranks that
    wait for each other at every micro-batch (FSDP, expert parallel) wait little, ranks that wait at the optimizer step
    less, and the largest batch comes first, where lack of memory shows at once.

    Args:
        lengths: int32 or int64 ``[num_sequences]``, tokens per sequence, or a Python sequence.
        max_tokens: of one micro-batch, a hard cap. Tokens without padding: micro-batches are meant to be packed.
        dp_size: data-parallel ranks.
        cost: what is made equal: ``"tokens"``, ``"flops"`` or ``("flops", a, b)``, which costs a * L + b * L**2 for a
            sequence of L tokens (a = 12 * hidden_size, b = 1 for a dense causal decoder; "flops" takes hidden_size
            4096).

    Returns:
        ``result[rank][step]``, indices into ``lengths``, longest first; each index once, the same number of steps for
        every rank. Where sequences are too few for that, each is a micro-batch of its own and the last step is the
        empty list for some ranks: they still have to run it, since the others wait for them, with what
        empty_like_batch gives, or any row whose loss_mask is 0. No lengths: no steps.

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

    Deterministic, on the CPU (a CUDA tensor is copied, which synchronises). Longest first, each to the cheapest
    micro-batch with room, then swaps of two sequences between a costly and a cheap one (see pack_sequences,
    "balanced"): where the cap leaves room, within 1 part in 5,000 as equal as the largest differencing of Karmarkar and
    Karp 1982 makes them, and as a rule more.
    """
    max_tokens, dp_size = integer(max_tokens, "max_tokens"), integer(dp_size, "dp_size")
    if max_tokens < 1:
        raise ValueError(f"max_tokens: expected at least 1, got {max_tokens}")
    if dp_size < 1:
        raise ValueError(f"dp_size: expected at least 1 rank, got {dp_size}")
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
    # Sequences of no tokens, so that there is one for every micro-batch; whoever has only such ones has none.
    lengths = torch.cat([lengths, lengths.new_zeros(dp_size - 1)])
    try:
        packing = pack_sequences(lengths, max_tokens, strategy="balanced", balance=balance, bins_multiple_of=dp_size)
    except ValueError as error:
        raise ValueError(re.sub("^balance:", "cost:", str(error))) from None
    bins = [[index for index in bin if index < num_sequences] for bin in packing.bins]
    return [bins[rank::dp_size] for rank in range(dp_size)]
