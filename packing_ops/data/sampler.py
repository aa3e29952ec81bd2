"""A batch sampler whose batches each fill one packed row; it can be resumed from a checkpoint."""

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import torch
from torch.utils.data import Sampler

from packing_ops._runtime.arguments import at_least, described, index_tensor, integer, one_of, place_in
from packing_ops.data.stream import budgets_of
from packing_ops.packing import (
    Cost,
    Packing,
    Strategy,
    cost_coefficients,
    document_multiple_of,
    lengths_tensor,
    pack_sequences,
    whole_rows,
)

_PACKING = 1  # the version of the algorithm: another number where the same arguments make other batches
_ORDERS = 8  # of the sequences, tried for an epoch of no more batches than the first
_BEFORE = {"row_multiple": 1}  # what states say that are older than the argument


class PackedBatchSampler(Sampler[list[int]]):
    """A ``batch_sampler`` for torch's DataLoader: the sequences of a batch fit into one packed row of ``capacity``
    tokens.

    Each epoch is shuffled and packed only from the seed and the epoch number, so ranks agree without communication.
    Each sequence occurs once in an epoch. All ranks have the same number of batches, and all epochs, as transformers'
    Trainer takes it: it finds the epoch of a checkpoint from the number of its steps. Batches are sorted by cost before
    they are dealt to the ranks, so batch i costs nearly the same on each rank. Over a whole epoch ranks wait for each
    other no longer than the costliest batch takes more than the cheapest.

    Args:
        lengths: int32 or int64 ``[num_sequences]``, tokens per sequence of the dataset, or a Python sequence. For
            preference pairs ``[num_pairs, 2]`` or a list of (chosen, rejected): ``capacity`` then limits each side. For
            several budgets a dict of these by name.
        capacity: maximum tokens of a batch, counting aligned lengths, or several budgets, as PackedStream's:
            ``PackedBatchSampler({"tokens": [...], "patches": [...]}, {"tokens": 4096, "patches": 16384})``.
        dp_rank, dp_size: this rank, and the number of data-parallel ranks. Context- and tensor-parallel ranks that
            share a row pass the same dp_rank.
        seed: the same for all epochs and on every rank. None: nothing is shuffled and every epoch is the same.
        strategy: of pack_sequences. "first_fit" puts other sequences together in each epoch. "ffd" fills rows best, but
            puts much the same sequences together in each epoch. The order of the batches is always shuffled.
        cost: what is balanced in a step: ``"tokens"``, ``"flops"`` or ``("flops", a, b)``, as in pack_sequences. Of
            several budgets the costs are summed: a tenth of one counts as a tenth of the tokens.
        document_multiple, row_multiple: as pack_sequences: a sequence takes its length rounded up to a multiple of the
            first, a batch its sum rounded up to a multiple of the second.
        alignment: document_multiple by its earlier name.
        overlong: what is done with a sequence over the capacity: ``"error"``; ``"drop"``; ``"own"`` makes it a longer
            batch of one sequence; ``"truncate"`` counts it as cut, and the collator must cut it (not for pairs
            and several budgets).
        max_sequences_per_bin: maximum number of sequences in a batch.
        drop_last: False: with too few sequences for a multiple of dp_size batches, some ranks have an empty
            batch ``[]`` in the last step, which they still have to run (see empty_like_batch). True: such a step is
            left out of the epoch.

    Attributes:
        epoch: the epoch of the next iteration.
        left_out: indices of the sequences that are in no batch of this epoch, on any rank.

    Example:
        >>> lengths = [820, 410, 520, 110, 250, 700, 50]
        >>> samplers = [PackedBatchSampler(lengths, 1024, rank, 2, seed=0, strategy="ffd") for rank in range(2)]
        >>> [len(sampler) for sampler in samplers]
        [2, 2]
        >>> sorted(index for sampler in samplers for batch in sampler for index in batch)
        [0, 1, 2, 3, 4, 5, 6]

        With a DataLoader and a checkpoint. The DataLoader's workers fetch batches ahead, so the loop passes how many it
        has trained on. A resumed epoch has the remaining batches.

        >>> from torch.utils.data import DataLoader
        >>> def train(sampler, dataset, epochs, stop_after=None):
        ...     loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=list)
        ...     for epoch in range(sampler.epoch, epochs):
        ...         sampler.set_epoch(epoch)
        ...         for done, batch in enumerate(loader, start=sampler.batches_done + 1):
        ...             print(f"epoch {epoch}, batch {done} of {len(sampler)}: {sum(batch)} tokens")
        ...             if (epoch, done) == stop_after:
        ...                 return sampler.state_dict(batches_done=done)
        >>> state = train(PackedBatchSampler(lengths, 1024, seed=1, strategy="ffd"), lengths, 2, stop_after=(0, 2))
        epoch 0, batch 1 of 3: 950 tokens
        epoch 0, batch 2 of 3: 930 tokens
        >>> resumed = PackedBatchSampler(lengths, 1024, seed=1, strategy="ffd")
        >>> resumed.load_state_dict(state)
        >>> train(resumed, lengths, 1)
        epoch 0, batch 3 of 3: 980 tokens

    Raises:
        ValueError: a length that is negative or over the capacity with ``overlong="error"``; dp_rank outside of
            dp_size; a capacity, dp_size or multiple below 1; budgets that have no lengths; an unknown strategy, cost or
            overlong.
        TypeError: lengths or sizes that are no integers.

    An epoch that packs into fewer batches than epoch 0 cuts some in two. For one that packs into more, other orders are
    tried; after these it has the batches of epoch 0, in another order. O(n log n) time per epoch and O(n) memory for n
    sequences.
    """

    def __init__(
        self,
        lengths: torch.Tensor | Sequence[int] | Mapping[str, torch.Tensor | Sequence[int]],
        capacity: int | Mapping[str, int],
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int | None = 0,
        *,
        strategy: Strategy = "first_fit",
        cost: Cost = "tokens",
        document_multiple: int = 1,
        row_multiple: int = 1,
        alignment: int = 1,
        overlong: Literal["error", "drop", "own", "truncate"] = "error",
        max_sequences_per_bin: int | None = None,
        drop_last: bool = False,
    ):
        self.document_multiple = document_multiple_of(document_multiple, alignment)
        self.row_multiple = integer(row_multiple, "row_multiple")
        self.lengths, self.capacity = _copied(lengths, capacity)
        self.dp_size = at_least(dp_size, "dp_size", 1, "rank")
        self.dp_rank = place_in(dp_rank, "dp_rank", self.dp_size, "dp_size")
        one_of(overlong, ("error", "drop", "own", "truncate"), "overlong")
        self.seed = None if seed is None else integer(seed, "seed")
        self.strategy, self.overlong, self.drop_last = strategy, overlong, drop_last
        most = max_sequences_per_bin
        self.max_sequences_per_bin = None if most is None else integer(most, "max_sequences_per_bin")
        self._balance = ("flops", *cost_coefficients(cost, "cost"))
        self._options: dict[str, Any] = {
            "strategy": strategy,
            "document_multiple": self.document_multiple,
            "row_multiple": self.row_multiple,
            "overlong": overlong,
            "max_sequences_per_bin": self.max_sequences_per_bin,
        }
        self._units, self._most = self.lengths, self.capacity if isinstance(self.capacity, int) else 1
        if not isinstance(self.capacity, int):
            self._several_budgets(self.capacity)
        self.epoch, self._first, self._taken = 0, 0, 0
        self._num_bins: int | None = None  # of epoch 0
        self._batches, self.left_out = self._of_epoch()

    @property
    def batches_done(self) -> int:
        """Return the number of batches of this epoch that the next iteration skips, because they were trained on
        before a resume.
        """
        return self._first

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the first batch of ``epoch``. No effect if that is the current epoch already.

        Raises:
            ValueError: a negative epoch.
        """
        epoch = at_least(epoch, "epoch", 0)
        if epoch != self.epoch:
            self.epoch, self._first, self._taken = epoch, 0, 0
            self._batches, self.left_out = self._of_epoch()

    def __len__(self) -> int:
        """Count the batches of each rank in every epoch, including those already done."""
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        first, self._first = self._first, 0  # a second iteration has the whole epoch
        batches = self._batches
        for self._taken in range(first + 1, len(batches) + 1):
            yield batches[self._taken - 1]

    def state_dict(self, batches_done: int | None = None) -> dict[str, int | str | None]:
        """Return the position in the epoch, as ints and strings. The same on every rank: one checkpoint serves all.

        Args:
            batches_done: batches of this epoch trained on so far. By default the number of batches yielded, which is
                larger while DataLoader workers or prefetch run ahead.

        Raises:
            ValueError: batches_done below 0 or over the number of batches.
        """
        done = self._taken if batches_done is None else integer(batches_done, "batches_done")
        if not 0 <= done <= len(self):
            raise ValueError(f"batches_done: expected 0 to the epoch's {len(self)} batches, got {done}")
        return {"epoch": self.epoch, "batches_done": done, **self._identity}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next iteration yield the remaining batches of the epoch, in the same order; no batch if it was
        finished.

        Raises:
            ValueError: the state of a sampler with other batches: another seed, capacity, dp_size, lengths, ...
        """
        if missing := [name for name in ("epoch", "batches_done") if name not in state_dict]:
            raise ValueError(f"state_dict: expected that of a sampler, got none of {' and '.join(missing)}")
        for name, ours in self._identity.items():
            if (theirs := state_dict.get(name, _BEFORE.get(name))) != ours:
                raise ValueError(f"state_dict: expected that of a sampler with {name}={ours}, got {theirs}")
        self.set_epoch(state_dict["epoch"])
        done = integer(state_dict["batches_done"], "batches_done")
        if not 0 <= done <= len(self):
            raise ValueError(f"state_dict: expected batches_done of 0 to {len(self)}, got {done}")
        self._first = self._taken = done

    @cached_property
    def _identity(self) -> dict[str, int | str | None]:
        """Return everything that determines the batches of an epoch; part of state_dict."""
        places = torch.arange(1, self.lengths.numel() + 1, device="cpu").view_as(self.lengths)
        return {
            "packing": _PACKING,
            "seed": self.seed,
            "capacity": self.capacity if isinstance(self.capacity, int) else str(self.capacity),
            "dp_size": self.dp_size,
            "strategy": self.strategy,
            "cost": str(self._balance),
            "alignment": self.document_multiple,
            "row_multiple": self.row_multiple,
            "overlong": self.overlong,
            "max_sequences_per_bin": self.max_sequences_per_bin,
            "drop_last": self.drop_last,
            "num_sequences": len(self.lengths),
            "lengths_checksum": int((self.lengths * places).sum()),
        }

    def _several_budgets(self, capacity: Mapping[str, int]) -> None:
        """Count each budget in such parts that all are equally large, which pack_sequences takes as sides."""
        mult = self.document_multiple
        slots = (self.lengths[:, 0] + mult - 1) // mult * mult
        sizes = torch.cat([slots[:, None], self.lengths[:, 1:]], 1)
        most = [whole_rows(capacity["tokens"], self.row_multiple, "capacity of tokens"), *list(capacity.values())[1:]]
        over = (sizes > torch.tensor(most, device="cpu")).nonzero()
        if self.overlong == "error" and len(over):
            index, place = over[0].tolist()
            raise ValueError(
                f"lengths: expected at most {most[place]} {list(capacity)[place]}, got {int(sizes[index, place])} at "
                f"index {index}; overlong='drop' or 'own' accepts it"
            )
        self._most = math.lcm(*most)
        self._units = sizes * torch.tensor([self._most // own for own in most], device="cpu")
        parts = self._most // most[0]  # of a token
        _, per_token, per_pair = self._balance
        self._balance = ("flops", per_token / parts, per_pair / parts**2)
        self._options |= {"document_multiple": 1, "row_multiple": 1}

    def _draws(self, epoch: int) -> random.Random | None:
        return None if self.seed is None else random.Random(f"{self.seed}, epoch {epoch}")

    def _packing(self, seeds: Iterable[int | None]) -> Packing:
        """Pack by the first of these seeds, or by the seed of epoch 0, that gives no more bins than epoch 0 has, and
        as many.
        """
        first = self._draws(0)
        for seed in chain(seeds, [None if first is None else first.getrandbits(63)]):
            try:
                packing = pack_sequences(self._units, self._most, seed=seed, **self._options)
            except ValueError as error:
                raise ValueError(str(error).replace("'split', ", "")) from None  # of a sequence in several batches
            # A multiple of dp_size bins; with too few sequences for that, a bin for each sequence.
            count, equal = packing.item_indices.numel(), -(-packing.num_bins // self.dp_size) * self.dp_size
            if self._num_bins is None:
                self._num_bins = min(equal, count)
            bins = self._num_bins
            whole = bins % self.dp_size == 0
            if (equal if whole else packing.num_bins) <= bins:
                break
        options = {**self._options, "seed": seed, "balance": self._balance, "min_bins": max(bins, 1)}
        return pack_sequences(self._units, self._most, bins_multiple_of=self.dp_size if whole else 1, **options)

    def _of_epoch(self) -> tuple[list[list[int]], list[int]]:
        """Return this rank's batches of the epoch, and the sequences that no rank gets."""
        draws = self._draws(self.epoch)
        packing = self._packing([None] if draws is None else (draws.getrandbits(63) for _ in range(_ORDERS)))
        whole, rest = divmod(packing.num_bins, self.dp_size)
        order = list(range(whole))
        if draws is not None:
            draws.shuffle(order)
        batches = [packing.bins[step * self.dp_size + self.dp_rank] for step in order]
        left_out = packing.dropped.tolist()
        last = packing.bins[whole * self.dp_size :]
        if rest and self.drop_last:
            left_out += [index for bin in last for index in bin]
        elif rest:
            batches.append(last[self.dp_rank] if self.dp_rank < rest else [])
        return batches, left_out


def _copied(lengths: Any, capacity: Any) -> tuple[torch.Tensor, int | dict[str, int]]:
    """Return lengths on the CPU, which later writes by the caller do not change, ``[num_sequences, budgets]`` of
    several.
    """
    if not isinstance(capacity, Mapping) and not isinstance(lengths, Mapping):
        taken = lengths_tensor(lengths).cpu()
        return taken.clone() if taken is lengths else taken, integer(capacity, "capacity")
    budgets = budgets_of(capacity)
    if not isinstance(lengths, Mapping) or lengths.keys() != budgets.keys():
        got = [*lengths] if isinstance(lengths, Mapping) else type(lengths).__name__
        raise ValueError(f"lengths: expected a dict of those of {[*budgets]}, as capacity, got {got}")
    columns = [index_tensor(lengths[name], f"lengths of {name}").cpu().long() for name in budgets]
    for name, own in zip(budgets, columns, strict=True):
        if own.dim() != 1 or own.shape != columns[0].shape or (own < 0).any():
            raise ValueError(f"lengths of {name}: expected [{len(columns[0])}] of at least 0, got {described(own)}")
    return torch.stack(columns, 1), budgets
