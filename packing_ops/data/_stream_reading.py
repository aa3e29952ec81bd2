"""One iteration over the examples of a PackedStream: what was read, which examples wait for a row, the rows made of
them, and how to go on there.
"""

import contextlib
import copy
import random
import sys
import zlib
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data._utils import worker as workers

from packing_ops._runtime.arguments import at_least
from packing_ops.data._examples import OF_IMAGES, tokens_of
from packing_ops.data.context_parallel import aligned


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


# --- what was read ---


_END: Any = object()
_MAY_LACK = frozenset(OF_IMAGES)  # of examples, some have no image


class Row(list[Mapping[str, Any]]):
    """Examples of one row. A collator refuses more of them than ``rows_per_batch``, with which states count batches."""

    def __init__(self, examples: Iterable[Mapping[str, Any]] = (), rows_per_batch: int = 1) -> None:
        super().__init__(examples)
        self.rows_per_batch = rows_per_batch


@dataclass
class StreamProgress:
    """How far an iteration over a PackedStream is, counted over all ranks.

    Attributes:
        examples_read: examples taken from the stream, those that wait and those that were dropped among them.
        examples_waiting: read, and in no row yet.
        rows: rows so far, those of other ranks and workers too.
        tokens, slots: in these rows. A row has as many slots as the capacity; one that is longer has its length.
        dropped, truncated: examples that were lost whole, or in part, by ``overlong`` and ``drop_last``.
        lost_tokens: their lost tokens.
    """

    examples_read: int = 0
    examples_waiting: int = 0
    rows: int = 0
    tokens: int = 0
    slots: int = 0
    dropped: int = 0
    truncated: int = 0
    lost_tokens: int = 0

    @property
    def padding(self) -> float:
        """Return the share of the slots without a token, 0 to 1; 0 for no rows."""
        return 1 - self.tokens / self.slots if self.slots else 0.0


class Reading:
    """One iteration over the examples: what was read and is in no row yet, and how much is done.

    Every attribute that state_dict returns is right whenever the examples may raise. ``stream`` is the PackedStream.
    """

    def __init__(self, stream: Any, state: Mapping[str, Any] | None, num_workers: int) -> None:
        self.stream, self.num_workers = stream, num_workers
        self.progress = StreamProgress()
        self.waiting = WaitingExamples((stream.slots, *list(stream.capacity.values())[1:]))
        self.formed: list[list[Waiting]] = []  # rows of the next step
        self.unchecked: list[Any] = []  # one example that was read and may be refused
        self.steps = self.first_step = self.checksum = 0
        self.columns: frozenset[str] | None = None
        self.first: int | None = None  # checksum of the first example
        self.finished = False
        self.epoch = stream.epoch
        self.examples: Any = stream.examples
        if hasattr(self.examples, "set_epoch"):
            self.examples.set_epoch(self.epoch)
        self.source = iter(self.examples)
        if state is not None:
            self._resume(state)

    def next_step(self) -> list[Row] | None:
        """Return a row for each rank; None after the last."""
        size, stream = self.stream.dp_size, self.stream
        if self.finished:
            return None
        while len(self.formed) < size:
            self._fill()
            if not len(self.waiting):
                break
            seed = f"{stream.seed}, epoch {self.epoch}, row {self.steps * size + len(self.formed)}"
            self.formed.append(self.waiting.row(None if stream.seed is None else random.Random(seed)))
        while self.formed and len(self.formed) < size:
            fullest = max(self.formed, key=len)
            self.formed.append([fullest.pop()] if len(fullest) > 1 else [])
        rows, self.formed = self.formed, []
        left_out = rows if rows and stream.drop_last and not rows[-1] else []
        for row in left_out:
            self.progress.dropped += len(row)
            self.progress.lost_tokens += sum(item.tokens for item in row)
        if not rows or left_out:
            return None
        self.steps += 1
        self.progress.rows += size
        for row in rows:
            self.progress.tokens += sum(item.tokens for item in row)
            slots = aligned(sum(item.sizes[0] for item in row), stream.row_multiple)
            self.progress.slots += max(stream.capacity["tokens"], slots)
        self.progress.examples_waiting = len(self.waiting)
        return [Row((item.example for item in row), stream.rows_per_batch) for row in rows]

    def _fill(self) -> None:
        with _as_no_worker():
            while len(self.waiting) < self.stream.buffer:
                if not self.unchecked:
                    if (example := next(self.source, _END)) is _END:
                        break
                    self.unchecked.append(example)
                    self.progress.examples_read += 1
                self._admit(self.unchecked[0])
                self.unchecked.clear()
        if not self.progress.examples_read:
            raise ValueError(f"examples: expected at least one in epoch {self.epoch}, got none")

    def _admit(self, example: Any) -> None:
        """Let an example wait, or do as ``overlong`` says."""
        stream, number = self.stream, self.progress.examples_read - 1
        item = self._measured(example, number)
        over = not fits(item, self.waiting.budgets)
        if over and stream.overlong == "error":
            budgets = zip(stream.capacity.items(), item.sizes, self.waiting.budgets, strict=True)
            (name, most), size = next((budget, size) for budget, size, room in budgets if size > room)
            raise ValueError(
                f"capacity: expected at least the {size} {'slots' if name == 'tokens' else name} of example {number}, "
                f"got {most}; overlong='drop', 'own' or 'truncate' accepts it"
            )
        checksum = _checksum(item)
        self.first = checksum if self.first is None else self.first
        self.checksum = zlib.crc32(b"%d" % checksum, self.checksum)
        if over and stream.overlong == "drop":
            self.progress.dropped += 1
            self.progress.lost_tokens += item.tokens
            return
        if over and stream.overlong == "truncate":
            if images := [name for name in OF_IMAGES if example.get(name) is not None]:
                raise ValueError(
                    f"{images[0]}: expected an example of text to cut, got images beside the {item.tokens} tokens of "
                    f"example {number}; overlong='drop' or 'own' accepts it"
                )
            self.progress.truncated += 1
            self.progress.lost_tokens += item.tokens - stream.longest
            item = self._measured(_cut(example, item.tokens, stream.longest), number)
        self.waiting.add(item)

    def _measured(self, example: Any, number: int) -> Waiting:
        try:
            tokens = _plain_tokens(example) or tokens_of([example])[1][0]
        except (TypeError, ValueError) as error:
            raise type(error)(str(error).replace("example 0", f"example {number}")) from None
        self.columns = frozenset(example) if self.columns is None else self.columns
        if example.keys() != self.columns and (example.keys() ^ self.columns) - _MAY_LACK:
            raise ValueError(
                f"examples: expected columns {sorted(self.columns)}, got {sorted(example)} in example {number}"
            )
        sizes = [aligned(tokens, self.stream.document_multiple)]
        if len(self.stream.capacity) > 1:
            found = self.stream.sizes(example)
            for name in list(self.stream.capacity)[1:]:
                if name not in found:
                    raise ValueError(f"sizes: expected {name} too, got {sorted(found)} in example {number}")
                sizes.append(at_least(found[name], f"sizes of example {number}: {name}", 0))
        return Waiting(number, tuple(sizes), tokens, example)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "rows_done": self.steps,
            "first_row": self.first_step,
            "num_workers": self.num_workers,
            "finished": self.finished,
            "columns": None if self.columns is None else sorted(self.columns),
            "first_checksum": self.first,
            "checksum": self.checksum,
            "examples_state": _state_of(self.examples),
            "waiting": [(item.number, item.example) for item in self.waiting.in_order()],
            "formed": [[(item.number, item.example) for item in row] for row in self.formed],
            "unchecked": list(self.unchecked),
            "progress": dict(vars(self.progress)),
        }

    def _resume(self, state: Mapping[str, Any]) -> None:
        if state["num_workers"] not in (1, self.num_workers):
            raise ValueError(
                f"state_dict: expected num_workers={self.num_workers}, got that of a worker among "
                f"{state['num_workers']}; state_dict(batches_done=n) serves any number"
            )
        if "waiting" not in state:  # of state_dict(batches_done=...)
            while self.steps < state["rows_done"]:
                if self.next_step() is None:
                    raise ValueError(
                        f"state_dict: expected at most the {self.steps} rows of the examples, got {state['rows_done']}"
                    )
            self.first_step = self.steps
            return
        # Advance the source to the example where it was, and check that it is the same
        position, number = state["examples_state"], state["progress"]["examples_read"] - len(state["unchecked"])
        checked = number if position is None else min(number, 1)  # how many are read to be compared
        wanted = state["checksum"] if position is None else state["first_checksum"]
        found, first = 0, None
        with _as_no_worker():
            for count in range(checked):
                if (example := next(self.source, _END)) is _END:
                    raise ValueError(f"state_dict: expected that of the {count} examples that there are, got {number}")
                one = _checksum(self._measured(example, count))
                first, found = one if first is None else first, zlib.crc32(b"%d" % one, found)
            if wanted != (found if position is None else first):
                raise ValueError(
                    f"state_dict: expected that of these examples, got that of others among the first {checked}"
                )
            if position is not None:
                self.examples = copy.copy(self.examples)  # one of Hugging Face starts every later iteration there
                if hasattr(self.examples, "__dict__"):  # attributes of its own, whatever its class does in a copy
                    self.examples.__dict__ = dict(vars(self.examples))
                self.examples.load_state_dict(position)
                self.source = iter(self.examples)
            elif state["unchecked"]:
                next(self.source, None)
        # What waits
        self.finished, self.steps = state["finished"], state["rows_done"]
        self.first_step = state["first_row"] if state["num_workers"] == self.num_workers else self.steps
        self.columns = None if state["columns"] is None else frozenset(state["columns"])
        self.first, self.checksum = state["first_checksum"], state["checksum"]
        self.unchecked, self.progress = list(state["unchecked"]), StreamProgress(**state["progress"])
        self.formed = [[self._measured(example, number) for number, example in row] for row in state["formed"]]
        self.waiting = WaitingExamples(self.waiting.budgets)
        for number, example in state["waiting"]:
            self.waiting.add(self._measured(example, number))


def _plain_tokens(example: Any) -> int:
    """Count the tokens of the most common example, a list of integers without a mask; return 0 for any other, which
    tokens_of checks.
    """
    if type(example) is not dict or "attention_mask" in example:
        return 0
    ids = example.get("input_ids")
    return len(ids) if type(ids) is list and ids and type(ids[0]) is int else 0


def _checksum(item: Waiting) -> int:
    """Return a checksum of the length and the last token."""
    ids = item.example["input_ids"]
    last = ids[-1] if len(ids) == item.tokens else ids[0][-1]
    return zlib.crc32(b"%d %d" % (item.tokens, int(last)))


def _cut(example: Mapping[str, Any], tokens: int, longest: int) -> dict[str, Any]:
    """Return the first ``longest`` tokens, in every column that has one value for each."""

    def cut(value: Any) -> Any:
        if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
            return value
        if tokens > 1 and len(value) == 1 and hasattr(value[0], "__len__") and len(value[0]) == tokens:
            return [value[0][:longest]] if isinstance(value, list | tuple) else value[:, :longest]
        return value[:longest] if len(value) == tokens else value

    return {name: cut(value) for name, value in example.items()}


def _state_of(examples: Any) -> Any:
    """Return the examples' state. None if they cannot say where they are, or would go on with a shuffle buffer
    filled anew.
    """
    if not (hasattr(examples, "state_dict") and hasattr(examples, "load_state_dict")):
        return None
    found = [getattr(examples, "_ex_iterable", None)]
    for inner in found:  # of datasets: one around the other
        if type(inner).__name__ == "BufferShuffledExamplesIterable":
            return None
        more = getattr(inner, "ex_iterables", None) or [getattr(inner, "ex_iterable", None)]
        found += [each for each in more if each is not None]
    return examples.state_dict()


@contextlib.contextmanager
def _as_no_worker() -> Iterator[None]:
    """Hide that this is a worker: a dataset that divides itself among the workers would give each of them other
    rows.
    """
    info, workers._worker_info = workers._worker_info, None
    try:
        yield
    finally:
        workers._worker_info = info
