"""Oracle of packing_ops.packing: every strategy as its definition says it, in plain Python, quadratic where it is."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


# --- rows of even costs, and rows for ranks ---


COSTS = {None: (1.0, 0.0), "tokens": (1.0, 0.0), "flops": (12.0 * 4096, 1.0)}
STEPS = 65536  # costs are compared to one part in STEPS of the costliest bin's cost


@dataclass
class Bin:
    room: int
    pieces: list[Piece] = field(default_factory=list)
    cost: float = 0.0
    level: int = 0
    stamp: int = 0


def pack_sequences(
    lengths: Sequence[int | list[int]],
    capacity: int,
    *,
    strategy: str = "ffd",
    alignment: int = 1,
    max_sequences_per_bin: int | None = None,
    min_bins: int = 1,
    bins_multiple_of: int = 1,
    overlong: str = "error",
    balance: str | tuple[str, float, float] | None = None,
    ties: str = "first",
    seed: int | None = None,
) -> list[list[tuple[int, int, int | list[int]]]]:
    """Return bins of (item, start, length)."""
    # Cut into pieces, sort
    most_units, most_pieces = capacity // alignment, max_sequences_per_bin or len(lengths) + 1
    a, b = balance[1:] if isinstance(balance, tuple) else COSTS[balance]

    def cost(units: int) -> float:
        return (a + b * float(units * alignment)) * float(units * alignment)

    arrivals = make_pieces(lengths, most_units, alignment, overlong, shuffled(len(lengths), seed))
    if not arrivals and min_bins == 1:
        return []
    by_length = sorted(arrivals if ties == "first" else arrivals[::-1], key=lambda piece: -piece.units)

    # Put the pieces into bins
    if strategy in ("ffd", "first_fit"):
        bins = fit(arrivals if strategy == "first_fit" else by_length, most_units, most_pieces, lambda fitting: 0)
    elif strategy == "bfd":
        bins = fit(
            by_length, most_units, most_pieces, lambda fitting: min(range(len(fitting)), key=lambda i: fitting[i].room)
        )
    elif strategy == "next_fit":
        bins = next_fit(arrivals, most_units, most_pieces)
    else:
        count = lower_bound(by_length, most_units, most_pieces)
        for _ in range(3):
            count = wanted_bins(count, min_bins, bins_multiple_of, len(arrivals))
            bins = balanced(by_length, count, most_units, most_pieces, cost)
            if len(bins) <= count:
                break
            count = len(bins)

    # Add missing bins, even the costs, deal to ranks
    rows = [bin.pieces for bin in bins]
    wanted = wanted_bins(len(rows), min_bins, bins_multiple_of, len(arrivals))
    # The row with the most pieces (the later of equals) gives its last ones until it has one left.
    givers = sorted(range(len(rows)), key=lambda i: (len(rows[i]), i))
    while len(rows) < wanted:
        giver = givers.pop()
        while len(rows) < wanted and len(rows[giver]) > 1:
            rows.append([rows[giver].pop()])
    if strategy == "balanced" and len(arrivals) <= MOST_SWAPPED:
        even(rows, most_units, cost)
    if balance is not None or strategy == "balanced":
        rows = deal(rows, bins_multiple_of, lambda row: sum(cost(units) for piece in row for units in piece.sides))
    return [[(piece.item, piece.start, piece.length) for piece in row] for row in rows]


def shuffled(count: int, seed: int | None) -> list[int]:
    """Shuffle by Fisher-Yates with splitmix64."""
    order, state, mask = list(range(count)), seed or 0, 2**64 - 1
    for i in range(count, 1, -1) if seed is not None else ():
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        j = ((z ^ (z >> 31)) * i) >> 64
        order[i - 1], order[j] = order[j], order[i - 1]
    return order


def make_pieces(
    lengths: Sequence[int | list[int]], most_units: int, alignment: int, overlong: str, order: Sequence[int]
) -> list[Piece]:
    pieces, most_tokens = [], most_units * alignment
    for i in order:
        length = lengths[i]
        if isinstance(length, list):
            sides = tuple(-(-tokens // alignment) for tokens in length)
            if max(sides) <= most_units or overlong == "own":
                pieces.append(Piece(i, 0, length, max(sides), sides))
            continue
        parts = [(0, length)]
        if length > most_tokens:
            parts = {
                "own": [(0, length)],
                "split": [(s, min(most_tokens, length - s)) for s in range(0, length, most_tokens or length)],
                "truncate": [(0, most_tokens)],
                "drop": [],
            }[overlong]
        units = [-(-tokens // alignment) for _, tokens in parts]
        pieces += [Piece(i, *part, own, (own,)) for part, own in zip(parts, units, strict=True)]
    return pieces


def fit(pieces: list[Piece], most_units: int, most_pieces: int, choose: Callable[[list[Bin]], int]) -> list[Bin]:
    """Put each piece into the bin that ``choose`` picks among those with room, in the order in which they were
    opened.
    """
    bins: list[Bin] = []
    for piece in pieces:
        fitting = [bin for bin in bins if has_room(bin, piece, most_units) and len(bin.pieces) < most_pieces]
        if piece.units > most_units or not fitting:
            bins.append(Bin(most_units))
            fitting = [bins[-1]]
        put(piece, fitting[choose(fitting)])
    return bins


def has_room(bin: Bin, piece: Piece, most_units: int) -> bool:
    if len(piece.sides) == 1:
        return bin.room >= piece.units
    return all(sum(used) <= most_units for used in zip(piece.sides, *(own.sides for own in bin.pieces), strict=True))


def put(piece: Piece, bin: Bin) -> None:
    bin.pieces.append(piece)
    bin.room -= piece.units


def next_fit(pieces: list[Piece], most_units: int, most_pieces: int) -> list[Bin]:
    bins: list[Bin] = []
    for piece in pieces:
        if not bins or not has_room(bins[-1], piece, most_units) or len(bins[-1].pieces) >= most_pieces:
            bins.append(Bin(most_units))
        put(piece, bins[-1])
    return bins


def balanced(
    by_length: list[Piece], count: int, most_units: int, most_pieces: int, cost: Callable[[int], float]
) -> list[Bin]:
    """Put each piece into the cheapest bin; of equal ones the one that reached that cost last.

    A bin without room for it is set aside until lengths have shrunk to its room, and then counts as just arrived.
    """
    bins = [Bin(-1, [piece]) for piece in by_length if piece.units > most_units]
    each = [cost(piece.units) for piece in by_length[len(bins) :]]
    total = [0.0, *itertools.accumulate(each)][-1]
    most = min(cost(most_units), total / max(count - len(bins), 1) + max(each, default=0.0))
    open_bins = [Bin(most_units, stamp=-i) for i in range(count - len(bins))]
    aside: list[Bin] = []
    clock = 1
    bins += open_bins
    for piece in by_length[sum(piece.units > most_units for piece in by_length) :]:
        # Bins that were too full for longer pieces return
        returning = [bin for bin in aside if bin.room >= piece.units]
        for bin in sorted(returning, key=lambda bin: (bin.room, bins.index(bin)), reverse=True):
            aside.remove(bin)
            open_bins.append(bin)
            bin.stamp, clock = clock, clock + 1
        # The cheapest bin with room
        chosen = None
        while chosen is None:
            if not open_bins:
                open_bins.append(Bin(most_units))
                bins.append(open_bins[-1])
            first = min(open_bins, key=lambda bin: (bin.level, -bin.stamp))
            if first.room < piece.units:
                open_bins.remove(first)
                aside.append(first)
            else:
                chosen = first
        # Put the piece, update the bin's cost
        put(piece, chosen)
        chosen.cost += cost(piece.units)
        chosen.level = 1 + (int(chosen.cost / most * STEPS) if chosen.cost < most else STEPS if most else 0)
        chosen.stamp, clock = clock, clock + 1
        if len(chosen.pieces) >= most_pieces:
            open_bins.remove(chosen)
    return bins


def lower_bound(pieces: list[Piece], most_units: int, most_pieces: int) -> int:
    shared = [piece.sides for piece in pieces if piece.units <= most_units]
    fewest = -(-len(shared) // most_pieces)
    for side in zip(*shared, strict=True):
        by_tokens = -(-sum(side) // most_units) if most_units else 0
        fewest = max(fewest, by_tokens, sum(2 * units > most_units for units in side))
    return len(pieces) - len(shared) + fewest


def wanted_bins(count: int, min_bins: int, multiple: int, most: int) -> int:
    wanted = -(-max(count, min_bins) // multiple) * multiple
    if wanted > most:
        raise ValueError(f"{wanted} bins for {most} sequences")
    return wanted
