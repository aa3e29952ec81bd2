"""A step of long and short documents over ranks: each long one over as many ranks as it pays, short ones on single
ranks.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from packing_ops._runtime.arguments import at_least
from packing_ops.data.token_budget import token_budget_microbatches
from packing_ops.packing import Cost, cost_coefficients, lengths_tensor
from packing_ops.parallel import collectives

ROW = 2048  # tokens that a row costs in addition: collectives of the parameters, launches, short products
SENT = 0.07  # of the cost by tokens: what a token costs more on several ranks, by Ulysses attention in a model of 8B


class Share(NamedTuple):
    """What a rank runs in one step of a plan.

    documents: indices into lengths, those of one packed row; empty if the rank runs an empty row while the others run
        theirs.
    first, size: of the group that shares the row, ranks ``first`` to ``first + size - 1``.
    """

    documents: tuple[int, ...]
    first: int
    size: int


@dataclass(frozen=True)
class StepPlan:
    """What each rank runs, from plan_step.

    Attributes:
        steps: ``steps[step][rank]``, a Share. All ranks have as many steps.
        cost: of all steps one after another, in each the costliest rank. In units of the cost that was asked for.
        ideal: the same, were all documents spread evenly, sent for nothing and in one row.
    """

    steps: tuple[tuple[Share, ...], ...]
    cost: float
    ideal: float

    def of_rank(self, rank: int | None = None) -> list[Share]:
        """Return the shares of a rank, one for each step; without ``rank`` those of this process."""
        rank = dist.get_rank() if rank is None else rank
        return [shares[rank] for shares in self.steps]

    @contextlib.contextmanager
    def group_for(self, step: int) -> Iterator[dist.ProcessGroup]:
        """Give the group that shares this rank's row in ``step``, a group of one rank where nobody does.

        Inside, shard_packed, unshard, attention over a group and models with a ``sequence_group`` take this group in
        place of theirs. Forward and backward belong inside. Groups are made in the first call, by all ranks together.

        Raises:
            ValueError: a plan for another number of ranks than there are processes.
        """
        ranks = len(self.steps[step])
        if dist.get_world_size() != ranks:
            raise ValueError(f"plan: expected one for {dist.get_world_size()} ranks, got one for {ranks}")
        group = _groups(dist.group.WORLD)[self.steps[step][dist.get_rank()].size]
        collectives.planned.append(group)
        try:
            yield group
        finally:
            collectives.planned.pop()


@functools.lru_cache(maxsize=1)
def _groups(world: dist.ProcessGroup) -> dict[int, dist.ProcessGroup]:
    """Make {size: this rank's group}: every rank makes all of them, in one order."""
    ranks, found, size = dist.get_world_size(world), {}, 1
    while size <= ranks:
        for first in range(0, ranks, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= dist.get_rank() < first + size:
                found[size] = group
        size *= 2
    return found


def plan_step(
    lengths: torch.Tensor | Sequence[int],
    ranks: int,
    capacity: int,
    *,
    cost: Cost = "flops",
    max_size: int | None = None,
) -> StepPlan:
    """Return which documents each rank runs in a step, and over which ranks each longer document than ``capacity``
    goes.

    Groups have a power of two of neighbouring ranks, at least as many as hold the document. With a long document other
    groups run others, and single ranks rows of short ones. Larger groups leave fewer ranks waiting, smaller ones send
    less and have longer rows: of both the plan takes what costs least.

    Args:
        lengths: int32 or int64 ``[num_documents]``, or a Python sequence.
        ranks: a power of two.
        capacity: of a rank's part of a row.
        cost: of a document, as token_budget_microbatches takes it. A row also costs what 2,048 tokens do, and tokens
            that are shared cost 7% more.

    Example:
        >>> plan = plan_step([26_000, 16_000, 15_000, 1_000], ranks=4, capacity=16_384)
        >>> for shares in plan.steps:
        ...     print([(list(share.documents), share.size) for share in shares])
        [([0], 2), ([0], 2), ([1], 1), ([2, 3], 1)]

        In each process, with a model of ``apply_packing_ops(model, sequence_group=group)``:

        >>> for step, share in enumerate(plan.of_rank()):  # needs several processes  # doctest: +SKIP
        ...     with plan.group_for(step) as group:
        ...         shard = shard_packed(collate(share.documents), group)
        ...         model(**shard, num_items_in_batch=targets).loss.backward()

    Raises:
        ValueError: ranks or a max_size that are no powers of two; a document of more than ``max_size * capacity``
            tokens, by its index; negative lengths; an unknown cost.
        TypeError: lengths that are no integers.

    Determinism: the same plan in every call and on every rank.
    Synchronises: once for a CUDA tensor, which is copied.
    Memory: grows with the number of documents, on the CPU.
    Gradients: none: integers.
    """
    ranks, capacity = at_least(ranks, "ranks", 1), at_least(capacity, "capacity", 1)
    most = ranks if max_size is None else min(ranks, at_least(max_size, "max_size", 1))
    for name, value in (("ranks", ranks), ("max_size", most)):
        if value & (value - 1):
            raise ValueError(f"{name}: expected a power of two, whose halves are groups, got {value}")
    found = lengths_tensor(lengths).tolist()
    for i, length in enumerate(found):
        if not 0 <= length <= most * capacity:
            raise ValueError(f"lengths: expected 0 to {most} ranks * {capacity} tokens, got {length} at index {i}")
    costs = _Costs(found, capacity, cost, *cost_coefficients(cost, "cost"))
    needed = [1 << max(0, (-(-length // capacity) - 1).bit_length()) for length in found]  # powers of two
    powers = [1 << i for i in range(most.bit_length())]
    # Sizes of groups: times what a document needs, except short ones, and the least size
    tried = {tuple(min(most, max(n * times if n > 1 else 1, least)) for n in needed): least
             for times in powers for least in powers}  # fmt: skip
    layouts = [_laid_out(costs, sizes, least, ranks, more) for sizes, least in tried.items() for more in (1.0, 1.25)]
    steps = min(layouts, key=costs.of_steps)
    return StepPlan(steps, costs.of_steps(steps), sum(costs.of((i,), 1) - costs.row for i in range(len(found))) / ranks)


@dataclass(frozen=True)
class _Costs:
    lengths: list[int]
    capacity: int
    cost: Cost
    per_token: float
    per_square: float

    @property
    def row(self) -> float:
        return self.per_token * ROW

    def of(self, documents: Sequence[int], size: int) -> float:
        """Return the cost of a row on each of its ranks."""
        per_token = self.per_token * (1 + SENT if size > 1 else 1)
        lengths = [self.lengths[i] for i in documents]
        return (per_token * sum(lengths) + self.per_square * sum(each * each for each in lengths)) / size + self.row

    def of_steps(self, steps: "Steps") -> float:
        return sum(max(self.of(share.documents, share.size) for share in shares) for shares in steps)

    def rows(self, documents: list[int], size: int, ranks: int) -> list["_Row"]:
        """Return rows of groups of ``size``, as many as groups or a multiple, balanced, the costliest first."""
        lengths = [self.lengths[i] for i in documents]
        found = token_budget_microbatches(lengths, self.capacity * size, dp_size=ranks // size, cost=self.cost)
        rows = [_Row([documents[i] for i in row], size) for of_rank in found for row in of_rank if row]
        return sorted(rows, key=lambda row: -self.of(row.documents, size))

    def filled(self, documents: list[int], size: int, most: float) -> "_Row":
        """Return a row that costs at most a limit, of documents that it takes out of these, the longest first."""
        row, room = _Row([], size), self.capacity * size
        left = (most - self.row) * size
        for i in list(documents):
            cost = (self.of((i,), size) - self.row) * size
            if self.lengths[i] <= room and cost <= left:
                row.documents.append(i)
                documents.remove(i)
                room -= self.lengths[i]
                left -= cost
        return row


Steps = tuple[tuple[Share, ...], ...]


class _Row(NamedTuple):
    documents: list[int]
    size: int


def _laid_out(costs: _Costs, sizes: Sequence[int], least: int, ranks: int, more: float) -> Steps:
    """Lay out documents on groups of these sizes: the costliest rows first, and with them short ones that cost up to
    a multiple of it.
    """
    by_size: dict[int, list[int]] = {}
    for i in sorted(range(len(sizes)), key=lambda i: (-costs.lengths[i], i)):
        by_size.setdefault(sizes[i], []).append(i)
    short = by_size.pop(least, [])
    rows = [row for size, documents in by_size.items() for row in costs.rows(documents, size, ranks)]
    rows.sort(key=lambda row: -costs.of(row.documents, row.size))
    steps = []
    while rows:
        most, beside, free = more * costs.of(rows[0].documents, rows[0].size), [], ranks
        for row in list(rows):
            if row.size <= free:
                beside.append(row)
                rows.remove(row)
                free -= row.size
        beside += [costs.filled(short, least, most) for _ in range(free // least)]
        steps.append(beside)
    rest = costs.rows(short, least, ranks) if short else []
    steps += [rest[first : first + ranks // least] for first in range(0, len(rest), ranks // least)]
    return tuple(_shares(rows, ranks) for rows in steps)


def _shares(rows: list[_Row], ranks: int) -> tuple[Share, ...]:
    """Return the shares by rank. The largest groups are first, so that each starts at a multiple of its size."""
    shares: list[Share] = []
    for documents, size in sorted(rows, key=lambda row: -row.size):
        shares += [Share(tuple(documents), len(shares), size)] * size
    return (*shares, *(Share((), rank, 1) for rank in range(len(shares), ranks)))
