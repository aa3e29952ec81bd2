"""Rows of one capacity from a stream of examples, which is resumed in the middle."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, get_worker_info

from packing_ops._runtime.arguments import as_tensor, at_least, integer, one_of, place_in
from packing_ops.data._stream_reading import Reading, Row, StreamProgress

ALGORITHM = 1  # a higher one makes other rows of the same examples


class PackedStream(IterableDataset[Row]):
    """Rows of at most ``capacity`` tokens, each a list of examples, from a dataset of any length that is read once.

    ``buffer`` examples wait at a time. A row takes them in order, or as the seed draws them, up to the first without
    room, and fills up with the largest that fit. The rows depend only on the examples and the arguments. They are dealt
    in turn: batch i is row ``i * dp_size + dp_rank``, whatever the number of workers. So all ranks have as many
    batches, without communication, and no example is lost or repeated. Every rank and worker reads all examples and
    keeps its rows: reading should be cheap (tokenized examples).

    Args:
        examples: dicts of ``input_ids`` and any other columns, the same in all of them: a list, a Hugging Face dataset
            (also a streaming one), any iterable that starts again with each ``iter``. Each rank has the same examples
            in the same order. What divides itself among workers (get_worker_info) is read as a whole in each.
        capacity: maximum tokens of a row, or several budgets: ``{"tokens": 4096, "images": 8, "patches": 16384}``.
        buffer: how many examples wait. Memory is bounded by them.
        seed: draws the examples, differently in each epoch; the same on every rank. None: in order. A stream that is
            sorted should be shuffled before: examples change places within the buffer only.
        dp_rank, dp_size: this rank, and the number of data-parallel ranks.
        document_multiple, row_multiple: an example takes its tokens rounded up to the first, a row rounded up to the
            second (packed_alignment gives both).
        overlong: what is done with an example over a budget: ``"error"``; ``"drop"``; ``"own"`` makes it a longer row
            without other examples; ``"truncate"`` keeps its first tokens in all columns as long as input_ids (only for
            a budget of tokens).
        sizes: function of an example that returns its sizes by budget, all but the tokens. By default images are the
            rows of ``image_grid_thw``, patches the products of its rows and those of ``video_grid_thw``; without a grid
            they are the first sizes of ``pixel_values [images, patches, dim]``.
        rows_per_batch: the DataLoader's batch_size; 1 for None. The collators refuse larger batches: workers and states
            count by it.
        num_batches: how many batches an epoch has. For examples that differ between ranks (each with dp_size=1): a rank
            whose examples end before raises, in place of one that waits for ever.
        drop_last: at the end, documents of full rows go to ranks without one. With too few, some ranks have
            an empty row ``[]``, which they still have to run (see empty_like_batch). True: this step is left out.

    Attributes:
        progress: StreamProgress of the latest iteration in this process.
        epoch: the epoch of the next iteration.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from packing_ops.data import PaddingFreeCollator
        >>> examples = [{"input_ids": [7] * length} for length in (820, 410, 520, 110, 250, 700, 50)]
        >>> stream = PackedStream(examples, 1024, buffer=4, seed=None)
        >>> loader = DataLoader(stream, batch_size=None, collate_fn=PaddingFreeCollator())
        >>> [batch["cu_seq_lens_q"].diff().tolist() for batch in loader]
        [[820, 110], [410, 520], [250, 700, 50]]
        >>> round(stream.progress.padding, 2)
        0.07

        Resumed after the first batch:

        >>> rows = iter(stream)
        >>> _ = next(rows)
        >>> resumed = PackedStream(examples, 1024, buffer=4, seed=None)
        >>> resumed.load_state_dict(stream.state_dict())
        >>> [[len(example["input_ids"]) for example in row] for row in resumed]
        [[410, 520], [250, 700, 50]]

    Raises:
        ValueError: while iterating, with the number of the example: one over a budget with ``overlong="error"``,
            without tokens, or with other columns than the first; no examples. An argument that is out of range.
        TypeError: examples that can be read only once (a generator); examples that are no dicts.

    A DataLoader with workers fetches ahead, so ``state_dict`` is asked with the number of batches trained on, as
    PackedBatchSampler's. torchdata's StatefulDataLoader asks by itself. Deterministic. Time: a few microseconds for
    each example, and O(buffer) with several budgets.
    """

    def __init__(
        self,
        examples: Iterable[Mapping[str, Any]],
        capacity: int | Mapping[str, int],
        *,
        buffer: int = 1000,
        seed: int | None = 0,
        dp_rank: int = 0,
        dp_size: int = 1,
        document_multiple: int = 1,
        row_multiple: int = 1,
        overlong: Literal["error", "drop", "own", "truncate"] = "error",
        sizes: Callable[[Mapping[str, Any]], Mapping[str, int]] | None = None,
        rows_per_batch: int = 1,
        num_batches: int | None = None,
        drop_last: bool = False,
    ):
        if isinstance(examples, Mapping) or not hasattr(examples, "__iter__"):
            raise TypeError(f"examples: expected an iterable of dicts, got {type(examples).__name__}")
        if isinstance(examples, Iterator):
            raise TypeError(
                f"examples: expected an iterable that starts again with each iter() (a list, a dataset), got "
                f"{type(examples).__name__}, which can be read once"
            )
        self.examples, self.sizes = examples, sizes or image_sizes
        self.capacity = budgets_of(capacity)
        self.buffer = at_least(buffer, "buffer", 1, "example")
        self.seed = None if seed is None else integer(seed, "seed")
        self.dp_size = at_least(dp_size, "dp_size", 1, "rank")
        self.dp_rank = place_in(dp_rank, "dp_rank", self.dp_size, "dp_size")
        self.document_multiple = at_least(document_multiple, "document_multiple", 1)
        self.row_multiple = at_least(row_multiple, "row_multiple", 1)
        self.slots = self.capacity["tokens"] // self.row_multiple * self.row_multiple
        if self.longest < 1:
            raise ValueError(
                f"capacity: expected room for a document of document_multiple={document_multiple} slots in a row of a "
                f"multiple of row_multiple={row_multiple}, got {self.capacity['tokens']}"
            )
        one_of(overlong, ("error", "drop", "own", "truncate"), "overlong")
        if overlong == "truncate" and len(self.capacity) > 1:
            raise ValueError(f"overlong: expected 'error', 'drop' or 'own' for {[*self.capacity]}, got 'truncate'")
        self.overlong, self.drop_last = overlong, drop_last
        self.rows_per_batch = at_least(rows_per_batch, "rows_per_batch", 1, "row")
        self.num_batches = None if num_batches is None else at_least(num_batches, "num_batches", 1, "batch")
        # Shared: a worker that lives through several epochs has a copy of this object.
        self._epoch = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()
        self._state: Mapping[str, Any] | None = None
        self._pass: Reading | None = None

    def __getstate__(self) -> dict[str, Any]:
        # An iteration cannot be copied; each worker of a DataLoader begins a new one.
        return {**self.__dict__, "_pass": None}

    @property
    def longest(self) -> int:
        """Return the most tokens of an example that fits."""
        return self.slots // self.document_multiple * self.document_multiple

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    @property
    def progress(self) -> StreamProgress:
        return StreamProgress() if self._pass is None else self._pass.progress

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the first batch of ``epoch``. No effect if that is the current epoch already.

        ``examples`` that have set_epoch too get it when that iteration starts.

        Raises:
            ValueError: a negative epoch.
        """
        epoch = at_least(epoch, "epoch", 0)
        if epoch != self.epoch:
            self._epoch.fill_(epoch)
            self._state = self._pass = None

    def __iter__(self) -> Iterator[Row]:
        state, self._state = self._state, None  # a second iteration has the whole epoch
        if state is not None and state["epoch"] != self.epoch:
            state = None  # a worker's copy, which set_epoch of the main process does not reach
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        self._pass = Reading(self, state, num_workers)
        return self._rows(self._pass, worker)

    def _rows(self, reading: Reading, worker: int) -> Iterator[Row]:
        most = None if self.num_batches is None else self.num_batches * self.rows_per_batch
        while reading.steps != most:
            batch = (reading.steps - reading.first_step) // self.rows_per_batch
            if (rows := reading.next_step()) is None:
                break
            if batch % reading.num_workers == worker:
                yield rows[self.dp_rank]
        if most is not None and reading.steps < most:
            got = reading.steps / self.rows_per_batch
            raise ValueError(
                f"examples: expected enough for num_batches={self.num_batches}, got {got:g} batches of them"
            )
        reading.finished = True

    def state_dict(self, batches_done: int | None = None) -> dict[str, Any]:
        """Return the position in the epoch: numbers and strings, the examples that wait, and the state of ``examples``.

        Args:
            batches_done: batches of this epoch trained on so far. By default those that this object has yielded, which
                is for an iteration in this process and for torchdata's StatefulDataLoader. With it the state is small,
                the same on every rank and for any number of workers; to resume, the rows before are packed again.

        Raises:
            ValueError: a negative batches_done.
        """
        if batches_done is not None:
            steps = at_least(batches_done, "batches_done", 0) * self.rows_per_batch
            return {**self.identity, "epoch": self.epoch, "rows_done": steps, "num_workers": 1}
        if self._pass is None:
            return dict(self._state) if self._state is not None else self.state_dict(0)
        return {**self.identity, **self._pass.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next iteration yield the remaining batches of the epoch, in the same order; no row if it was
        finished.

        ``examples`` with state_dict and load_state_dict go on where they were. Others are read again up to there, and
        so is a dataset with a shuffle buffer, whose state would lose what the buffer holds.

        A DataLoader with workers iterates over copies: call set_epoch before its next epoch.

        Raises:
            ValueError: the state of a stream with other rows: another capacity, buffer, seed, dp_size, ...; names it.
                While iterating: a state of other examples, or of another number of workers.
        """
        if missing := [name for name in ("epoch", "rows_done", "num_workers") if name not in state_dict]:
            raise ValueError(f"state_dict: expected that of a PackedStream, got none of {', '.join(missing)}")
        for name, ours in self.identity.items():
            if state_dict.get(name) != ours:
                raise ValueError(
                    f"state_dict: expected that of a stream with {name}={ours}, got {state_dict.get(name)}"
                )
        self.set_epoch(state_dict["epoch"])
        self._state, self._pass = dict(state_dict), None

    @property
    def identity(self) -> dict[str, Any]:
        """Return the arguments that determine the rows; part of state_dict."""
        names = ("buffer", "seed", "dp_size", "document_multiple", "row_multiple", "overlong", "rows_per_batch")
        budgets = {f"capacity of {name}": most for name, most in self.capacity.items()}
        own = {name: getattr(self, name) for name in names}
        return {"algorithm": ALGORITHM, "budgets": [*self.capacity], **budgets, **own, "drop_last": self.drop_last}


def image_sizes(example: Mapping[str, Any]) -> dict[str, int]:
    """Count ``images`` and ``patches`` of an example: by its ``image_grid_thw`` and ``video_grid_thw`` (rows of t, h,
    w), or by ``pixel_values``, an image for each entry. Pixels of ``[images, channels, height, width]`` give no
    patches.

    Example:
        >>> image_sizes({"image_grid_thw": [[1, 4, 6], [1, 2, 2]]})
        {'images': 2, 'patches': 28}
        >>> image_sizes({"pixel_values": torch.zeros(2, 9, 48)})
        {'images': 2, 'patches': 18}
    """
    grids = {name: example.get(name) for name in ("image_grid_thw", "video_grid_thw")}
    pixels, images = example.get("pixel_values"), grids["image_grid_thw"]
    if pixels is not None and images is None:
        pixels = as_tensor(pixels)
        count = {"images": len(pixels)}
        return {**count, "patches": pixels.shape[0] * pixels.shape[1]} if pixels.dim() == 3 else count
    return {
        "images": 0 if images is None else len(images),
        "patches": sum(
            int(as_tensor(grid).reshape(-1, 3).prod(1).sum()) for grid in grids.values() if grid is not None
        ),
    }


def budgets_of(capacity: int | Mapping[str, int]) -> dict[str, int]:
    """Return the budgets by name, tokens first."""
    if not isinstance(capacity, Mapping):
        return {"tokens": at_least(capacity, "capacity", 1, "token")}
    if "tokens" not in capacity:
        raise ValueError(f"capacity: expected tokens among the budgets, got {[*capacity]}")
    ordered = {"tokens": capacity["tokens"], **capacity}
    return {name: at_least(most, f"capacity of {name}", 1) for name, most in ordered.items()}
