"""Examples of a stream that wait for a row, and the rows that are made of them."""

import random
import sys
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Waiting(NamedTuple):
    """An example that waits.

    number: how many examples of the stream precede it.
    sizes: what it takes of each budget; the first are slots of tokens.
    tokens: without those that align it.
    """

    number: int
    sizes: tuple[int, ...]
    tokens: int
    example: Mapping[str, Any]


class WaitingExamples:
    """Those that were read and are in no row yet, in order of arrival and sorted by slots.

    Example:
        >>> waiting = WaitingExamples((10,))
        >>> for number, tokens in enumerate([4, 3, 9, 2, 1]):
        ...     waiting.add(Waiting(number, (tokens,), tokens, {}))
        >>> [taken.tokens for taken in waiting.row()], len(waiting)
        ([4, 3, 2, 1], 1)
    """

    def __init__(self, budgets: tuple[int, ...]) -> None:
        self.budgets = budgets
        self._arrived: OrderedDict[int, Waiting] = OrderedDict()  # by number
        self._sorted: list[tuple[int, int]] = []  # (slots, number)

    def __len__(self) -> int:
        return len(self._arrived)

    def in_order(self) -> list[Waiting]:
        return list(self._arrived.values())

    def add(self, item: Waiting) -> None:
        self._arrived[item.number] = item
        insort(self._sorted, (item.sizes[0], item.number))

    def row(self, draws: random.Random | None = None) -> list[Waiting]:
        """Return the next row: examples in order, or as ``draws`` says, up to the first without room; then the largest
        that fit.

        One over a budget is the only one in its row.
        """
        room, row = list(self.budgets), list[Waiting]()
        while self._arrived:
            first = next(iter(self._arrived))
            number = first if draws is None else self._sorted[int(draws.random() * len(self._sorted))][1]
            item = self._arrived[number]
            if row and not fits(item, room):
                break
            row.append(self._taken(item, room))
        while min(room) >= 0 and (largest := self._largest(room)):
            row.append(self._taken(largest, room))
        return row

    def _largest(self, room: Sequence[int]) -> Waiting | None:
        place = bisect_right(self._sorted, (room[0], sys.maxsize))
        for index in range(place - 1, -1, -1):  # the first fits, where tokens are the only budget
            if fits(item := self._arrived[self._sorted[index][1]], room):
                return item
        return None

    def _taken(self, item: Waiting, room: list[int]) -> Waiting:
        del self._arrived[item.number]
        del self._sorted[bisect_right(self._sorted, (item.sizes[0], item.number)) - 1]
        for place, size in enumerate(item.sizes):
            room[place] -= size
        return item


def fits(item: Waiting, room: Sequence[int]) -> bool:
    for size, free in zip(item.sizes, room, strict=True):  # noqa: SIM110  # all() of a generator takes twice as long
        if size > free:
            return False
    return True
