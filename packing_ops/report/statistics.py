"""What packing would save, from lengths: the same documents as padded batches, padding-free and as packed rows. And
what prefix trees would: documents that begin alike, with what they share computed once.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

import packing_ops as po
from packing_ops.data import PackedStream
from packing_ops.packing import Overlong, Strategy

STRATEGIES: tuple[Strategy, ...] = ("next_fit", "first_fit", "ffd", "bfd", "balanced")
OVERLONG = ("truncate", "split", "own", "drop", "error")


# What one rank computes at once, a batch or a row: slots and flops, float64 [num_units], in the order of the epoch.
_Units = tuple[torch.Tensor, torch.Tensor]


def length_statistics(lengths: torch.Tensor) -> dict[str, Any]:
    """Return mean, quantiles and a histogram over powers of two.

    Example:
        >>> length_statistics(torch.tensor([1, 5, 6]))["histogram"]
        [{'from': 1, 'to': 1, 'documents': 1, 'tokens': 1}, {'from': 2, 'to': 3, 'documents': 0, 'tokens': 0},
         {'from': 4, 'to': 7, 'documents': 2, 'tokens': 11}]
    """
    if not lengths.numel():
        return {"histogram": []}
    ascending = lengths.sort().values
    least, most = (int(ascending[end]).bit_length() for end in (0, -1))
    powers = 2 ** torch.arange(least - 1, most + 1, device=lengths.device)
    edges = torch.searchsorted(ascending, powers)
    tokens = torch.nn.functional.pad(ascending.cumsum(0), (1, 0))
    columns = (powers[:-1], powers[1:] - 1, edges.diff(), tokens[edges].diff())
    names = ("from", "to", "documents", "tokens")
    last = ascending.numel() - 1
    return {
        "mean": float(lengths.double().mean()),
        **{f"p{percent}": int(ascending[round(last * percent / 100)]) for percent in (10, 50, 90, 99)},
        "max": int(ascending[-1]),
        "histogram": [
            dict(zip(names, bucket, strict=True)) for bucket in zip(*(c.tolist() for c in columns), strict=True)
        ],
    }


def layouts(
    lengths: torch.Tensor,
    *,
    capacity: int,
    batch_size: int,
    dp: int,
    overlong: Overlong,
    hidden_size: int,
    buffer: int | None = None,
) -> dict[str, Any]:
    """Lay the same documents out in every way, and return the time of an epoch of each.

    A step is, on each of ``dp`` ranks, one batch of ``batch_size`` documents in the order of arrival, or one packed
    row of ``capacity`` slots. It takes as long as its slowest rank. Two models bound the time from both sides: in
    proportion to the slots (memory: every slot's activations are moved), and to the operations, a * L + b * L**2 for
    L slots that attend to each other (a = 12 * hidden_size, b = 1: a dense causal decoder, see pack_sequences).

    Args:
        lengths: int64 ``[num_documents]``, tokens, at least 1, in the order of arrival.
        capacity, overlong: as pack_sequences; every layout then holds the same pieces of documents.
        batch_size, dp, hidden_size, buffer: as make_report.

    Returns:
        dict with ``model`` (a, b), ``overlong`` (documents over the capacity, tokens that no layout holds) and
        ``layouts``, by name: ``padded``, ``length_grouped`` (padded batches of documents of like length, sorted inside
        of groups of 50 steps), ``padding_free``, every strategy of pack_sequences, and with a buffer ``stream``. Each
        has

        - ``rows``, ``steps``, ``slots``, ``fill`` (share of the slots that hold tokens)
        - ``flop_balance``: operations of all ranks / (ranks * the slowest one's), step by step; 1 is perfect.
          Packed rows are dealt by ``balance="flops"``; without it they have ``flop_balance_as_packed``.
        - ``step_time_ratio`` and ``epoch_time_ratio``: the padded layout's time / this one's, by ``tokens``, ``flops``

    Example:
        >>> lengths = torch.tensor([5, 7, 2, 6])
        >>> found = layouts(lengths, capacity=10, batch_size=2, dp=1, overlong="truncate", hidden_size=64)["layouts"]
        >>> [(name, found[name]["rows"], found[name]["slots"]) for name in ("padded", "padding_free", "ffd")]
        [('padded', 4, 26), ('padding_free', 4, 20), ('ffd', 3, 30)]

    Raises:
        ValueError: as pack_sequences.

    Source of the operation count: 24 * hidden_size**2 * L + 2 * hidden_size * L**2 per layer, forward, by 2 *
    hidden_size.
    """
    a, b = 12.0 * hidden_size, 1.0

    def flops(slots: torch.Tensor) -> torch.Tensor:
        return a * slots + b * slots**2

    def pack(strategy: Strategy, **options: Any) -> po.Packing:
        return po.pack_sequences(lengths, capacity, strategy=strategy, overlong=overlong, **options)

    def rows_for_ranks(strategy: Strategy, **options: Any) -> po.Packing:
        try:
            return pack(strategy, bins_multiple_of=dp, **options)
        except ValueError:  # too few documents for a row on every rank: some ranks have no row in the last step
            return pack(strategy, **options)

    # Lengths as every layout has them
    in_order = pack("next_fit")  # keeps the order of arrival
    pieces = in_order.lengths.double()
    changed = {name: getattr(in_order, name).numel() for name in ("truncated", "split", "own", "dropped")}
    result = {
        "model": {"a": a, "b": b},
        "overlong": {**changed, "documents": int((lengths > capacity).sum()), "lost_tokens": in_order.lost_tokens},
        "layouts": {},
    }
    if not pieces.numel():
        return result

    # Slots and FLOPs of each unit of work
    batches = _filled_rows(pieces, batch_size)
    padding_free = (batches.sum(1), flops(batches).sum(1))

    def padded_units(documents: torch.Tensor) -> _Units:
        rows = _filled_rows(documents, batch_size)
        width, real = rows.amax(1, keepdim=True), rows > 0
        return ((real * width).sum(1), (real * flops(width)).sum(1))

    def units_of(documents: torch.Tensor, offsets: torch.Tensor) -> _Units:
        """Return the units of rows; the padding at the end of a row attends to itself, like a document."""
        tokens = po.segment_sum(documents, offsets)
        slots = tokens.clamp(min=capacity)
        return (slots, po.segment_sum(flops(documents), offsets) + flops(slots - tokens))

    def rows_of(packing: po.Packing) -> _Units:
        return units_of(packing.lengths.double(), packing.bin_offsets.int())

    # One entry for each layout
    found, num_tokens = result["layouts"], in_order.num_tokens
    padded, grouped = padded_units(pieces), padded_units(_grouped_by_length(pieces, batch_size * dp))
    today = _epoch(padded, dp)
    found["padded"] = _layout(pieces.numel(), num_tokens, padded, dp, today)
    found["length_grouped"] = _layout(pieces.numel(), num_tokens, grouped, dp, today)
    found["padding_free"] = _layout(pieces.numel(), num_tokens, padding_free, dp, today)
    for strategy in STRATEGIES:
        dealt = rows_for_ranks(strategy, balance=("flops", a, b))
        found[strategy] = _layout(dealt.num_bins, num_tokens, rows_of(dealt), dp, today)
        as_packed = rows_for_ranks(strategy)
        found[strategy]["flop_balance_as_packed"] = _epoch(rows_of(as_packed), dp)["balance"]
    if buffer is not None:
        stream = PackedStream(_Documents(in_order.lengths), capacity, buffer=buffer, overlong="own")
        of_rows = [[len(example["input_ids"]) for example in row] for row in stream]
        offsets = torch.tensor([0, *map(len, of_rows)], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
        rows = units_of(torch.tensor([*chain(*of_rows)], dtype=torch.float64, device="cpu"), offsets)
        found["stream"] = _layout(rows[0].numel(), num_tokens, rows, dp, today)
    return result


class _Documents:
    """Examples of these lengths, one at a time."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[dict[str, range]]:
        return ({"input_ids": range(length)} for length in self.lengths.tolist())


def _grouped_by_length(values: torch.Tensor, step: int) -> torch.Tensor:
    """Sort inside of groups of up to 50 steps, a quarter of the epoch at most: transformers' ``group_by_length``."""
    steps = max(1, min(50, values.numel() // (4 * step)))
    groups = _filled_rows(values, steps * step)
    return groups.sort(1, descending=True).values.flatten()[: values.numel()]


def _filled_rows(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``[rows, size]``, the last row filled with 0; a single row if there are fewer than ``size`` values."""
    size = min(size, values.numel())
    return torch.nn.functional.pad(values, (0, -values.numel() % size)).view(-1, size)


def _epoch(units: _Units, dp: int) -> dict[str, float]:
    """Return an epoch's steps, its times (slots and flops of the slowest rank, summed over the steps) and balance. Step
    ``s`` is units ``s * dp`` to ``s * dp + dp - 1``, one per rank; ranks without one wait.
    """
    slots, flops = (_filled_rows(each, dp) for each in units)
    slowest = float(flops.amax(1).sum())
    times = {"tokens": float(slots.amax(1).sum()), "flops": slowest}
    return {"steps": slots.shape[0], **times, "balance": float(flops.sum()) / (dp * slowest)}


def _layout(rows: int, num_tokens: int, units: _Units, dp: int, today: dict[str, float]) -> dict[str, Any]:
    epoch, slots = _epoch(units, dp), int(units[0].sum())
    ratios = {name: today[name] / epoch[name] for name in ("tokens", "flops")}
    return {
        "rows": rows,
        "steps": epoch["steps"],
        "slots": slots,
        "fill": num_tokens / slots,
        "flop_balance": epoch["balance"],
        "step_time_ratio": {name: ratio * epoch["steps"] / today["steps"] for name, ratio in ratios.items()},
        "epoch_time_ratio": ratios,
    }


# --- prefix trees ---


def savings(
    tokens: torch.Tensor, lengths: torch.Tensor, groups: torch.Tensor | None, *, capacity: int, overlong: Overlong
) -> dict[str, Any]:
    """Count tokens, rows and visible pairs of query and key, of separate documents and as the trees of
    pack_prefix_tree.

    Args:
        tokens: int64 ``[total]``, the documents end to end.
        lengths: int64 ``[num_documents]``.
        groups: int64 ``[num_documents]``: only documents of one number are compared. None: all are.
        capacity: tokens of a row. Longer documents are cut to it, or left out with ``overlong="drop"``.

    Example:
        >>> found = savings(torch.zeros(400).long(), torch.tensor([200, 200]), None, capacity=256, overlong="truncate")
        >>> found["tokens"], found["rows"]
        ({'alone': 400, 'shared': 200}, {'alone': 2, 'shared': 1})
    """
    kept = torch.where(lengths > capacity, 0 if overlong == "drop" else capacity, lengths)
    position_ids = po.position_ids_from_cu_seqlens(po.cu_seqlens_from_lengths(lengths), tokens.numel())
    tokens = tokens[position_ids < kept.repeat_interleave(lengths)]
    groups, lengths = None if groups is None else groups[kept > 0], kept[kept > 0]
    tree = po.pack_prefix_tree(tokens, po.cu_seqlens_from_lengths(lengths), groups=groups, capacity=capacity)
    pairs = {"alone": int((lengths * (lengths + 1) // 2).sum()), "shared": int((tree.position_ids + 1).sum())}
    return {
        "documents": lengths.numel(),
        "groups": None if groups is None else groups.unique().numel(),
        "tokens": {"alone": tree.num_tokens, "shared": tree.num_slots},
        "rows": {
            "alone": po.pack_sequences(lengths, capacity).num_bins,
            "shared": tree.num_bins if tree.num_slots else 0,
        },
        "pairs": pairs,
        "repeated_at_forks": tree.repeated_at_forks,
        "repeated_by_cuts": tree.repeated_by_cuts,
    }
