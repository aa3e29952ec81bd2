"""Which sequences share a row: bin packing of lengths, before any tensor is touched."""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Literal

import torch

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import at_least, described, index_tensor, integer, one_of, place_in, plain

# A dense causal decoder does 24 * hidden_size**2 * L + 2 * hidden_size * L**2 operations per layer and sequence.
_FLOPS = (12.0 * 4096, 1.0)
_LARGEST = sys.float_info.max

Strategy = Literal["ffd", "bfd", "next_fit", "first_fit", "balanced"]
Overlong = Literal["error", "own", "drop", "truncate", "split"]
Ties = Literal["first", "last"]
Cost = Literal["tokens", "flops"] | tuple[str, float, float]


@dataclass(eq=False, repr=False)
class Packing:
    """Bins of sequences, as CSR: bin ``b`` holds pieces ``bin_offsets[b] : bin_offsets[b + 1]``.

    A bin is a packed row. A piece is a sequence, or a part of one with ``overlong="split"`` or ``"truncate"``. The
    pieces of a bin are in the order in which they were put there.

    Attributes:
        bin_offsets: int64 ``[num_bins + 1]``, from 0 to num_pieces.
        item_indices: int64 ``[num_pieces]``, the sequence (index into the lengths) of each piece.
        starts: int64 ``[num_pieces]``, first token of the piece inside its sequence.
        lengths: int64 ``[num_pieces]``, tokens of the piece, not aligned; ``[num_pieces, sides]`` of several budgets.
        dropped, split, truncated, own: int64, ascending: indices of sequences over the capacity, by what was done with
            them.
        num_tokens: tokens in bins, of all sides.
        lost_tokens: tokens that are in no bin, from dropped sequences and truncated ends.
        lower_bound: no packing of these pieces has fewer bins.
        capacity, alignment, row_multiple: as given; alignment is document_multiple.

    Example:
        >>> packing = pack_sequences([5, 3, 9, 2], 8, overlong="split")
        >>> packing.bins, packing.pieces(0), packing.split.tolist()
        ([[2], [0, 1], [3, 2]], [(2, 0, 8)], [2])
    """

    bin_offsets: torch.Tensor
    item_indices: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    dropped: torch.Tensor
    split: torch.Tensor
    truncated: torch.Tensor
    own: torch.Tensor
    num_tokens: int
    lost_tokens: int
    lower_bound: int
    capacity: int
    alignment: int
    own_slots: int  # slots of the bins in `own`, which are longer than the capacity on one side at least
    row_multiple: int = 1

    @property
    def num_bins(self) -> int:
        return self.bin_offsets.numel() - 1

    @property
    def num_slots(self) -> int:
        """Return the slots of all rows, of all sides: ``capacity`` each, in whole multiples, or the aligned length
        where a sequence is longer.
        """
        sides = self.lengths.shape[1] if self.lengths.dim() == 2 else 1
        row = self.capacity // self.row_multiple * self.row_multiple
        return (self.num_bins - self.own.numel()) * row * sides + self.own_slots

    @property
    def efficiency(self) -> float:
        """Return the share of the slots that hold tokens, 0 to 1; 1 for no bins."""
        return self.num_tokens / self.num_slots if self.num_bins else 1.0

    @cached_property
    def bins(self) -> list[list[int]]:
        """Return sequence indices per bin; a split sequence is in several. A ``batch_sampler`` for torch's
        DataLoader as it is.
        """
        items, offsets = self.item_indices.tolist(), self.bin_offsets.tolist()
        return [items[begin:end] for begin, end in itertools.pairwise(offsets)]

    def pieces(self, bin: int) -> list[tuple[int, int, int]]:
        """Return (sequence, start, length) of every piece of one bin: what to copy from where; a list of lengths of
        sides.
        """
        begin, end = self.bin_offsets[bin : bin + 2].tolist()
        columns = (self.item_indices, self.starts, self.lengths)
        return list(zip(*(column[begin:end].tolist() for column in columns), strict=True))

    def rows_for_rank(self, rank: int, world_size: int) -> list[int]:
        """Return the bins of one rank, dealt in turn: ``rank, rank + world_size, ...``, the same number for every rank.

        Raises:
            ValueError: rank outside 0 to world_size - 1, or bins that do not divide (see ``bins_multiple_of``).
        """
        world_size = at_least(world_size, "world_size", 1)
        rank = place_in(rank, "rank", world_size, "world_size")
        if self.num_bins % world_size:
            raise ValueError(
                f"world_size: expected a divisor of num_bins={self.num_bins}, got {world_size}; "
                f"pack with bins_multiple_of={world_size}"
            )
        return list(range(rank, self.num_bins, world_size))

    def __repr__(self) -> str:
        overlong = {name: getattr(self, name).numel() for name in ("dropped", "split", "truncated", "own")}
        counts = "".join(f", {name}={count}" for name, count in overlong.items() if count)
        return (
            f"Packing(num_bins={self.num_bins}, num_pieces={self.item_indices.numel()}, "
            f"efficiency={self.efficiency:.4f}, lower_bound={self.lower_bound}{counts})"
        )


def pack_sequences(
    lengths: torch.Tensor | Sequence[int] | Sequence[Sequence[int]],
    capacity: int,
    *,
    strategy: Strategy = "ffd",
    alignment: int = 1,
    document_multiple: int = 1,
    row_multiple: int = 1,
    max_sequences_per_bin: int | None = None,
    min_bins: int = 1,
    bins_multiple_of: int = 1,
    overlong: Overlong = "error",
    balance: Cost | None = None,
    ties: Ties = "first",
    seed: int | None = None,
) -> Packing:
    """Put sequences into as few rows of ``capacity`` tokens as the strategy manages.

    Args:
        lengths: int32 or int64 ``[num_sequences]``, tokens per sequence, or a Python sequence. 0 is a length. A CUDA
            tensor is copied to the CPU, which synchronises once; pack_ffd leaves it where it is. ``[num_sequences,
            sides]``, at most 8 sides, or a list of lists: a sequence takes of several budgets at once, the chosen and
            the rejected tokens of a preference pair for example. What goes by length goes by its longest side then,
            costs are summed, and the strategy is "next_fit", "first_fit" or "ffd", overlong "error", "own" or "drop".
        capacity: tokens of one row, at least 1; of each side. No row exceeds it, aligned lengths counted;
            ``overlong="own"`` is the one exception.
        strategy:
            ``"ffd"`` first-fit decreasing: the longest first, each into the first bin with room.
            ``"bfd"`` best-fit decreasing: the longest first, each into the bin with the least room that is enough.
            ``"next_fit"`` in the given order, a new bin when the last one has no room: the order is kept.
            ``"first_fit"`` in the given order, each into the first bin with room.
            ``"balanced"`` the longest first, each into the cheapest bin so far that has room, among the fewest bins
            that this works for (at least ``min_bins``); then, up to 65,536 sequences, a costly and a cheap bin swap
            two sequences while that evens them: bins of near-equal cost. ``balance`` defaults to "tokens".
        document_multiple, row_multiple: a sequence occupies its length rounded up to a multiple of the first (context
            parallel), a row the sum of these rounded up to a multiple of the second (tensor parallel, fp8), which is
            no more than the capacity. ``packed_alignment(tp=, cp=, fp8=)`` of packing_ops.data gives both.
        alignment: document_multiple by its earlier name.
        max_sequences_per_bin: most pieces in a bin.
        min_bins: least number of bins.
        bins_multiple_of: the number of bins is a multiple of this (the data-parallel size). Where bins are missing, the
            bin with the most sequences (the last of equals) gives its last sequences to new bins, one to each, until it
            has one left. No bin is ever empty.
        overlong: what is done with a sequence whose aligned length is over the capacity: ``"error"``; ``"own"`` puts it
            into a longer bin without others; ``"split"`` cuts it into pieces, all but the last as long
            as the capacity allows; ``"truncate"`` keeps the first of these pieces; ``"drop"``. The result lists these
            sequences and counts the tokens lost.
        balance: ``"tokens"``, ``"flops"`` or ``("flops", a, b)``: a sequence of L aligned tokens costs L, or
            a * L + b * L**2 (a = 12 * hidden_size, b = 1 for a dense causal decoder; only "flops" takes hidden_size
            4096). Bins are then ordered from costly to cheap and dealt so that ``rows_for_rank`` gives every one of
            ``bins_multiple_of`` ranks near-equal cost: the difference is never over that between two bins.
        ties: among sequences of equal aligned length, ``"first"`` takes the lower index first, ``"last"`` the higher.
        seed: shuffles the order of arrival first, the same way for the same seed everywhere. ``next_fit`` and
            ``first_fit`` then pack that order, the others break ties by it. Without it nothing is random.

    Returns:
        Packing, on the CPU. It shares no memory with ``lengths``.

    Example:
        >>> packing = pack_sequences([820, 410, 520, 110, 250, 700, 50], 1024, ties="last")
        >>> packing.bins
        [[0, 3, 6], [5, 4], [2, 1]]
        >>> packing
        Packing(num_bins=3, num_pieces=7, efficiency=0.9310, lower_bound=3)

        Batches of preference pairs in their order, two budgets of 10 tokens and at most three pairs:

        >>> pairs = [[4, 5], [5, 4], [2, 1], [1, 1], [3, 12]]
        >>> pack_sequences(pairs, 10, strategy="next_fit", max_sequences_per_bin=3, overlong="own").bins
        [[0, 1], [2, 3], [4]]

    Raises:
        ValueError: a negative length; one over the capacity with ``overlong="error"``; a capacity, alignment,
            max_sequences_per_bin, min_bins or bins_multiple_of below 1; more bins than sequences; an unknown name;
            costs whose sum is past a double.
        TypeError: a fractional length in a list, or a number that is not an integer.

    O(n log n) time at most, linear where lengths or capacity are not much larger than n; O(n) memory; one core, the GIL
    released. Johnson 1973 for the fits: ffd needs at most 11/9 of the fewest bins plus 1. With several sides a search
    may return from bins that have room only on one side, which makes ffd and first_fit quadratic at worst: 100,000
    pairs took 0.9 s and 0.2 s, next_fit 0.03 s.

    Determinism: the same bins in every call and on every machine, with ``seed`` too.
    Synchronises: once for a CUDA tensor, which is copied.
    Memory: grows with the number of sequences, on the CPU.
    Gradients: none: integers.
    """
    # Slots of a row, cost of a sequence
    capacity, alignment = integer(capacity, "capacity"), document_multiple_of(document_multiple, alignment)
    slots = whole_rows(capacity, row_multiple, "capacity")
    token_cost, square_cost = cost_coefficients(balance, "balance")
    lengths = lengths_tensor(lengths)
    try:
        bin_offsets, item_indices, starts, piece_lengths, overlong_items, counts = gate.pack_sequences(
            lengths,
            slots,
            _name(strategy, "strategy"),
            alignment,
            None if max_sequences_per_bin is None else integer(max_sequences_per_bin, "max_sequences_per_bin"),
            integer(min_bins, "min_bins"),
            integer(bins_multiple_of, "bins_multiple_of"),
            _name(overlong, "overlong"),
            balance is not None or strategy == "balanced",
            token_cost,
            square_cost,
            _name(ties, "ties"),
            None if seed is None else integer(seed, "seed"),
        )
    except ValueError as error:
        if document_multiple == row_multiple == 1:
            raise
        text = str(error) if document_multiple == 1 else str(error).replace("alignment", "document_multiple")
        whole = f"{slots} slots of capacity={capacity} (row_multiple={row_multiple})"
        raise ValueError(text if slots == capacity else text.replace(f"capacity={slots}", whole)) from None
    # Counts, and who was over the capacity
    num_tokens, lost_tokens, own_slots, lower_bound = counts.tolist()
    none = overlong_items[:0]
    if row_multiple > 1 and overlong == "own":
        own = lengths.cpu()[overlong_items].long()  # the rows of one sequence, on all sides
        for multiple in (alignment, row_multiple):
            own = (own + multiple - 1) // multiple * multiple
        own_slots = int(own.clamp(min=slots).sum())
    return Packing(
        bin_offsets,
        item_indices,
        starts,
        piece_lengths,
        dropped=overlong_items if overlong == "drop" else none,
        split=overlong_items if overlong == "split" else none,
        truncated=overlong_items if overlong == "truncate" else none,
        own=overlong_items if overlong == "own" else none,
        num_tokens=num_tokens,
        lost_tokens=lost_tokens,
        lower_bound=lower_bound,
        capacity=capacity,
        alignment=alignment,
        own_slots=own_slots,
        row_multiple=row_multiple,
    )


def document_multiple_of(document_multiple: int, alignment: int) -> int:
    """Return the given one of the two: alignment is the earlier name."""
    multiple, earlier = integer(document_multiple, "document_multiple"), integer(alignment, "alignment")
    if multiple != 1 and earlier not in (1, multiple):
        raise ValueError(f"alignment: expected document_multiple={multiple} alone, got {earlier} too")
    for name, value in (("document_multiple", multiple), ("alignment", earlier)):
        at_least(value, name, 1)
    return multiple if multiple != 1 else earlier


def whole_rows(capacity: int, row_multiple: int, name: str) -> int:
    """Return the slots of the longest row that is a multiple of row_multiple.

    Example:
        >>> whole_rows(100, 16, "capacity")
        96
    """
    at_least(row_multiple, "row_multiple", 1)
    if 1 <= capacity < row_multiple:
        raise ValueError(f"row_multiple: expected at most {name}={capacity}, got {row_multiple}")
    return capacity // row_multiple * row_multiple


def pack_ffd(
    lengths: torch.Tensor, capacity: int, *, alignment: int = 1, ties: Ties = "first"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pack by first-fit decreasing, with results of fixed size on the device of ``lengths``: no synchronisation,
    capturable.

    For lengths on the GPU that the host must not wait for, above all in a CUDA graph. First fit is sequential: where
    waiting is allowed, a copy to the host and pack_sequences is several times faster (docs/performance-ops.md).

    Args:
        lengths: int32 or int64 ``[num_sequences]``, tokens per sequence.
        capacity, alignment, ties: as pack_sequences; the bins are the same.

    Returns:
        bin_offsets int64 ``[num_sequences + 1]``, entries after the last bin repeat ``num_sequences``; item_indices
        int64 ``[num_sequences]``; num_bins int64 ``[1]``.

    Example:
        >>> bin_offsets, item_indices, num_bins = pack_ffd(torch.tensor([3, 9, 6]), 10)
        >>> bin_offsets.tolist(), item_indices.tolist(), num_bins.tolist()
        ([0, 1, 3, 3], [1, 2, 0], [2])

    Raises:
        ValueError: as pack_sequences. On CUDA a length that is negative or over the capacity is raised in the next
            call; it has a separate bin meanwhile.

    Determinism: the same bins in every call, and those of pack_sequences.
    Synchronises: never: it can be captured in a CUDA graph; a wrong length on CUDA raises in a later call.
    Memory: the results, a tree over the bins, and buffers of two sorts.
    Gradients: none: integers.
    """
    one_of(ties, ("first", "last"), "ties")
    return gate.pack_ffd(lengths, capacity, alignment, ties == "last")


def lengths_tensor(lengths: object) -> torch.Tensor:
    """Return ``[num_sequences]``, or ``[num_sequences, sides]`` of sequences of sequences."""
    if isinstance(lengths, torch.Tensor):
        return lengths
    rows = plain(lengths)
    if not hasattr(rows, "__iter__"):
        return index_tensor(lengths, "lengths")  # type: ignore[arg-type]  # which names what it is
    rows = list(rows)  # of an iterator nothing would be left
    has_sides = rows and hasattr(rows[0], "__len__") and not isinstance(rows[0], str | bytes)
    if not has_sides or getattr(rows[0], "ndim", 1) == 0:
        return index_tensor(rows, "lengths")
    sides = [index_tensor(row, f"lengths[{i}]").cpu() for i, row in enumerate(rows)]
    for i, row in enumerate(sides):
        if row.shape != sides[0].shape:
            raise ValueError(f"lengths[{i}]: expected {len(sides[0])} sides like lengths[0], got {described(row)}")
    return torch.stack(sides)


def _name(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a name, got {value!r} ({type(value).__name__})")
    return value


def cost_coefficients(cost: str | tuple[str, float, float] | None, name: str) -> tuple[float, float]:
    """Return (per token, per token squared) of ``cost``, an argument called ``name``."""
    if cost is None or cost == "tokens":
        return 1.0, 0.0
    if cost == "flops":
        return _FLOPS
    match cost:
        case ("flops", Real() as a, Real() as b) if 0 <= a <= _LARGEST and 0 <= b <= _LARGEST and (a or b):  # type: ignore[has-type]
            return float(a), float(b)
    raise ValueError(
        f"{name}: expected None, 'tokens', 'flops' or ('flops', a, b) with finite a, b >= 0 and not both 0, "
        f"got {cost!r}"
    )
