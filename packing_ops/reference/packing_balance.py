"""Oracle of packing_ops.packing, the part that evens rows and deals them to ranks."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Row = TypeVar("Row")

PARTNERS = 16  # cheap rows that a costly one tries to swap with
MOST_SWAPPED = 65536  # sequences, from which on nothing is swapped
MOST_WORK = 1 << 18  # pieces looked at in search of swaps, SEARCH more for each search
SEARCH = 16


@dataclass
class Piece:
    item: int
    start: int
    length: int | list[int]  # a list where sequences take of several budgets
    units: int  # of `alignment` tokens, of the longest side
    sides: tuple[int, ...]  # units of each side


def even(rows: list[list[Piece]], most_units: int, cost: Callable[[int], float]) -> None:
    """Even the costs pass after pass: from the costliest row down, each swaps with a cheap one the two pieces that
    even them most.
    """
    costs = [list(itertools.accumulate(cost(piece.units) for piece in row))[-1] for row in rows]
    room = [most_units - sum(piece.units for piece in row) for row in rows]
    swapped, work = True, 0
    while swapped and work < MOST_WORK:
        swapped = False
        by_cost = sorted((costs[r], r) for r in range(len(rows)) if room[r] >= 0)
        while len(by_cost) > 1 and work < MOST_WORK:
            _, costly = by_cost.pop()
            for place, (_, cheap) in enumerate(by_cost[:PARTNERS]):
                # The two pieces whose swap is nearest to half the difference
                half = (costs[costly] - costs[cheap]) / 2
                work += SEARCH + len(rows[costly]) + len(rows[cheap])
                swaps = [
                    (abs(cost(x.units) - cost(y.units) - half), i, j)
                    for i, x in enumerate(rows[costly])
                    for j, y in enumerate(rows[cheap])
                    if x.units - y.units <= room[cheap]
                ]
                distance, i, j = min(swaps, default=(half, 0, 0))
                if distance >= half:
                    continue
                # Swap them
                long, short = rows[costly].pop(i), rows[cheap].pop(j)
                gain = cost(long.units) - cost(short.units)
                for row, piece, sign in ((costly, short, -1), (cheap, long, 1)):
                    rows[row] = sorted([*rows[row], piece], key=lambda piece: -piece.units)
                    costs[row] += sign * gain
                    room[row] -= sign * (long.units - short.units)
                by_cost.pop(place)
                by_cost = sorted([*by_cost, (costs[costly], costly), (costs[cheap], cheap)])
                swapped = True
                break


def deal(rows: list[Row], ranks: int, cost: Callable[[Row], float]) -> list[Row]:
    """Distribute bins, costly to cheap, ``ranks`` at a time, the costliest to the rank with the least so far."""
    rows = sorted(rows, key=lambda row: -cost(row))
    totals = [0.0] * ranks
    dealt: list[Row] = []
    for first in range(0, len(rows), ranks):
        group: dict[int, Row] = {}
        for row, rank in zip(rows[first : first + ranks], sorted(range(ranks), key=totals.__getitem__), strict=True):
            group[rank] = row
        totals = [total + cost(group[rank]) for rank, total in enumerate(totals)]
        dealt += [group[rank] for rank in range(ranks)]
    return dealt
