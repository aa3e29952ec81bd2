"""Micro-batches by a budget of tokens: the same number for every rank, of near-equal cost. Which examples of a batch a
padding-free row of a budget keeps, cuts, drops or carries over.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any, Literal, NamedTuple, overload

import torch

from packing_ops._runtime.arguments import at_least, described, index_tensor, integer, old_name
from packing_ops.data._examples import check_examples, sequences
from packing_ops.packing import Cost, cost_coefficients, pack_sequences, whole_rows


@dataclass(frozen=True)
class BatchSelection:
    """Which examples a batch keeps, as lists of indices, and how many tokens that is, chosen and rejected together.

    Attributes:
        kept: in the batch, whole or cut.
        truncated: those of ``kept`` that are cut.
        own: those of ``kept`` that are longer than capacity (at most one, in a row without others).
        dropped: lost.
        carried: not in this batch, for the caller to put into the next one.
        num_tokens: tokens in the batch.
        lost_tokens: tokens that were dropped or cut off.
        carried_tokens: tokens of ``carried``.
    """

    kept: list[int]
    truncated: list[int]
    own: list[int]
    dropped: list[int]
    carried: list[int]
    num_tokens: int
    lost_tokens: int
    carried_tokens: int

    @classmethod
    def of(
        cls, lengths: list[tuple[int, ...]], kept: list[tuple[int, ...]], overlong: str, limit: int | None
    ) -> "BatchSelection":
        """Make a selection from the number of tokens that each example has, and that are kept of it, per side."""
        index = range(len(lengths))
        left_out = [i for i in index if not any(kept[i])]
        num_tokens = sum(map(sum, kept))
        rest, carries = sum(map(sum, lengths)) - num_tokens, overlong in ("carry", "own")
        return cls(
            kept=[i for i in index if any(kept[i])],
            truncated=[i for i in index if any(kept[i]) and kept[i] != lengths[i]],
            own=[i for i in index if limit is not None and max(kept[i]) > limit],
            dropped=[] if carries else left_out,
            carried=left_out if carries else [],
            num_tokens=num_tokens,
            lost_tokens=0 if carries else rest,
            carried_tokens=rest if carries else 0,
        )


def num_fitting(lengths: list[tuple[int, ...]], limit: float) -> int:
    """Count how many of the first examples fit together, on each side."""
    totals = zip(*map(accumulate, zip(*lengths, strict=True)), strict=True)
    return sum(1 for _ in takewhile(lambda total: max(total) <= limit, totals))


class MicrobatchStatistics(NamedTuple):
    """Of token_budget_microbatches, in units of its ``cost``: tokens or operations, proportional to time.

    shared_steps: how many steps, the first ones, are run by whole sequence groups, whose ranks have the same list.
    cost_per_rank: what each rank runs, a shared micro-batch divided by the ranks of its group.
    cost_of_steps: the slowest rank of each step, which the others wait for where they synchronise in every step (FSDP).
    balance: mean of cost_per_rank over their largest; 1 is even.
    """

    shared_steps: int
    cost_per_rank: list[float]
    cost_of_steps: list[float]
    balance: float


@overload
def token_budget_microbatches(
    lengths: torch.Tensor | Sequence[int], capacity: int, *, dp_size: int, cost: Cost = "tokens", sp_size: int = 1,
    document_multiple: int = 1, row_multiple: int = 1, return_statistics: Literal[False] = False,
) -> list[list[list[int]]]: ...  # fmt: skip
@overload
def token_budget_microbatches(
    lengths: torch.Tensor | Sequence[int], capacity: int, *, dp_size: int, cost: Cost = "tokens", sp_size: int = 1,
    document_multiple: int = 1, row_multiple: int = 1, return_statistics: Literal[True],
) -> tuple[list[list[list[int]]], MicrobatchStatistics]: ...  # fmt: skip
@old_name("max_tokens", "capacity")
def token_budget_microbatches(
    lengths: torch.Tensor | Sequence[int],
    capacity: int,
    *,
    dp_size: int,
    cost: Cost = "tokens",
    sp_size: int = 1,
    document_multiple: int = 1,
    row_multiple: int = 1,
    return_statistics: bool = False,
) -> list[list[list[int]]] | tuple[list[list[list[int]]], MicrobatchStatistics]:
    """Choose which sequences each rank runs in each of its micro-batches, each of at most ``capacity`` tokens.

    The number of micro-batches is about the fewest that the budget allows, rounded up to a multiple of ``dp_size``.
    They are balanced in cost, sorted from costly to cheap, and assigned ``dp_size`` at a time: a step gets the
    next-costliest ones, and the costliest of them goes to the rank with the lowest total so far. So the ranks finish
    each micro-batch at about the same time (FSDP, expert parallel), and the whole step even more so. The largest
    micro-batch is in step 0, so that one too large for the memory fails at once.

    Args:
        lengths: int32 or int64 ``[num_sequences]``, tokens per sequence, or a Python sequence.
        capacity: per micro-batch, a hard cap. Padding is not counted: micro-batches are meant to be packed.
        document_multiple, row_multiple: as pack_sequences: a sequence counts with its length rounded up to the first,
            in ``cost`` too, a micro-batch with its sum rounded up to the second, only in the cap.
        dp_size: number of data-parallel ranks; with ``sp_size`` the number of sequence groups.
        cost: what is balanced: ``"tokens"``, ``"flops"`` or ``("flops", a, b)``: a * L + b * L**2 for a sequence of L
            tokens (a = 12 * hidden_size, b = 1 for a dense causal decoder; "flops" assumes hidden_size 4096).
        sp_size: ranks of a sequence group (packing_ops.parallel). Sequences over ``capacity``, up to ``sp_size *
            capacity``, go to a group: its ranks run such a micro-batch together. The others go to single ranks, which
            run them without the group's collectives.
        return_statistics: return also MicrobatchStatistics.

    Returns:
        ``result[rank][step]``, a list of indices into ``lengths``, longest first. Each index occurs once; all ranks
        have the same number of steps. With too few sequences, each one is a micro-batch, and some ranks have
        an empty list in the last step. They must run that step too, since the other ranks wait for them: with
        empty_like_batch, or with any row whose loss_mask is 0. Without lengths there are no steps. With ``sp_size``
        there are ``dp_size * sp_size`` ranks. Group g has ``sp_size`` of them, from rank ``g * sp_size`` on. Shared
        steps are first. With ``return_statistics`` (that, MicrobatchStatistics).

    Example:
        >>> token_budget_microbatches([820, 410, 520, 110, 250, 700, 50], 1024, dp_size=2)
        [[[0], [1, 4]], [[5], [2, 3, 6]]]
        >>> token_budget_microbatches([600, 500, 400], 1024, dp_size=2)
        [[[1, 2]], [[0]]]
        >>> token_budget_microbatches([600], 1024, dp_size=2)
        [[[0]], [[]]]

        Two groups of two ranks; the document of 1900 tokens is shared by the first, the one of 1500 by the second.

        >>> ranks, statistics = token_budget_microbatches(
        ...     [1900, 410, 520, 1500, 900, 700], 1024, dp_size=2, sp_size=2, return_statistics=True
        ... )
        >>> ranks
        [[[0], [1]], [[0], [2]], [[3], [5]], [[3], [4]]]
        >>> statistics.shared_steps, statistics.cost_per_rank
        (1, [1360.0, 1470.0, 1450.0, 1650.0])

    Raises:
        ValueError: a length that is negative or over ``sp_size * capacity`` (it is named), a size below 1, an
            unknown cost, costs whose sum is past a double.
        TypeError: lengths that are not integers.

    The algorithm is pack_sequences' "balanced": the longest first, each into the cheapest micro-batch with room, then
    swaps of two sequences between a costly and a cheap one. Where the cap leaves room, the balance is within 1 part in
    5,000 of the largest differencing method (Karmarkar and Karp 1982), and usually better.

    Determinism: the same micro-batches in every call and on every rank.
    Synchronises: once for a CUDA tensor, which is copied.
    Memory: grows with the number of sequences, on the CPU.
    Gradients: none: integers.
    """
    # Check
    capacity, dp_size = at_least(capacity, "capacity", 1), at_least(dp_size, "dp_size", 1, "rank")
    sp_size = at_least(sp_size, "sp_size", 1, "rank")
    document_multiple = at_least(document_multiple, "document_multiple", 1)
    capacity = whole_rows(capacity, row_multiple, "capacity")
    per_token, per_pair = cost_coefficients(cost, "cost")
    lengths = index_tensor(lengths, "lengths").cpu()
    if lengths.dim() != 1 or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"lengths: expected int32 or int64 [num_sequences], got {described(lengths)}")
    if document_multiple > 1:
        lengths = (lengths.long() + document_multiple - 1) // document_multiple * document_multiple
    if lengths.numel() and int(lengths.max()) > sp_size * capacity:
        longest, most = int(lengths.argmax()), f"capacity={capacity}"
        most = most if sp_size == 1 else f"sp_size * capacity = {sp_size * capacity}"
        raise ValueError(f"lengths: expected at most {most}, got {int(lengths[longest])} at index {longest}")
    # Deal long sequences to groups, the others to single ranks
    balance = ("flops", per_token, per_pair)
    long = lengths > capacity
    of_groups = _dealt(lengths, long.nonzero()[:, 0], sp_size * capacity, dp_size, balance)
    of_ranks = _dealt(lengths, (~long).nonzero()[:, 0], capacity, dp_size * sp_size, balance)
    costs, shared = (per_token * lengths.double() + per_pair * lengths.double() ** 2).tolist(), len(of_groups[0])
    if shared:  # the costliest to those whose group has the cheapest together
        by_cost = sorted(range(len(of_ranks)), key=lambda rank: -_cost(costs, of_groups[rank // sp_size]))
        cheapest = dict(zip(by_cost, sorted(of_ranks, key=lambda steps: _cost(costs, steps)), strict=True))
        of_ranks = [cheapest[rank] for rank in range(len(of_ranks))]
    # Shared steps are first
    result = [of_groups[rank // sp_size] + of_ranks[rank] for rank in range(dp_size * sp_size)]
    if not return_statistics:
        return result
    # Statistics: the cost of each rank's step
    of_steps = [
        [sum(costs[i] for i in step) / (sp_size if number < shared else 1) for number, step in enumerate(steps)]
        for steps in result
    ]
    per_rank = [sum(steps) for steps in of_steps]
    mean, most = sum(per_rank) / len(per_rank), max(per_rank)
    even = min(mean / most, 1.0) if most else 1.0  # a mean of equal costs may round up
    return result, MicrobatchStatistics(shared, per_rank, [max(step) for step in zip(*of_steps, strict=True)], even)


def _cost(costs: list[float], steps: list[list[int]]) -> float:
    return sum(costs[index] for step in steps for index in step)


def _dealt(
    lengths: torch.Tensor, indices: torch.Tensor, capacity: int, ranks: int, balance: tuple[str, float, float]
) -> list[list[list[int]]]:
    """Return the sequences at these indices as micro-batches of each rank."""
    if not indices.numel():
        return [[] for _ in range(ranks)]
    # Empty sequences: with them there are enough for a multiple of the ranks. They are removed from the result.
    lengths = torch.cat([lengths[indices], lengths.new_zeros(ranks - 1)])
    try:
        packing = pack_sequences(lengths, capacity, strategy="balanced", balance=balance, bins_multiple_of=ranks)
    except ValueError as error:
        raise ValueError(re.sub("^balance:", "cost:", str(error))) from None
    index_of = indices.tolist()
    bins = [[index_of[index] for index in bin if index < len(index_of)] for bin in packing.bins]
    return [bins[rank::ranks] for rank in range(ranks)]


def count_within_token_budget(
    features: Sequence[Mapping[str, Any]], capacity: int | None, *, max_sequences_per_bin: int | None = None
) -> int:
    """Count how many of the first examples fit into a row of ``capacity`` tokens, by the rule of ``overlong="own"``.

    Args:
        features: dicts with ``input_ids``, or a preference pair with ``chosen_input_ids`` and ``rejected_input_ids``.
        capacity: tokens of a row, for each side; None for no limit.
        max_sequences_per_bin: maximum number of examples in a row; None for no limit.

    Returns:
        The number of examples before the first with which a side would exceed ``capacity``; at least 1 if there is an
        example. Collate ``features[:count]`` and carry the others over to the next batch.

    Example:
        >>> pairs = [{"chosen_input_ids": [1] * c, "rejected_input_ids": [2] * r} for c, r in ((3, 4), (2, 3), (1, 1))]
        >>> tuple(count_within_token_budget(pairs, capacity) for capacity in (6, 7, 2))
        (1, 2, 1)

    Raises:
        ValueError: an example without input_ids, or without one of the first example's; a capacity or
            max_sequences_per_bin below 1.
        TypeError: features that are no list of dicts.

    Determinism: the same number in every call.
    Synchronises: never for lists and CPU tensors.
    Memory: the examples' lengths.
    Gradients: none: an integer.
    """
    check_examples(features, "features")
    most = len(features) if max_sequences_per_bin is None else integer(max_sequences_per_bin, "max_sequences_per_bin")
    if most < 1 and features:
        raise ValueError(f"max_sequences_per_bin: expected at least 1 example or None, got {most}")
    if capacity is not None:
        at_least(capacity, "capacity", 1, "token or None")
    if capacity is None or not features:
        return min(most, len(features))
    names = [prefix + "input_ids" for prefix in ("chosen_", "rejected_")]
    if not any(name in features[0] for name in names):
        names = ["input_ids"]
    lengths = list(zip(*(sequences(features, name)[1] for name in names), strict=True))
    return max(1, min(num_fitting(lengths, capacity), most))
