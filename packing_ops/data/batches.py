"""Rows of a batch: dummy rows up to a multiple, a slice, any choice of rows.

A batch is a plain dict. Its rows are dim 0 of tensors (nested ones and NumPy arrays too) and the entries of lists, which
may be ragged; a dict inside it, such as ``metadata``, holds more of the same. None, numbers, strings, tuples and 0-d
tensors belong to no row and are carried as they are. PackedCollator's ``order`` has an entry per document instead: beside
``sub_seq_lengths``, which says how many a row has, its entries go where their row goes.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice

import torch

from packing_ops._args import integer


def num_rows(batch: Mapping[str, object]) -> int:
    """Rows of a batch, after a look that all of it has as many.

    Example:
        >>> num_rows({"ids": torch.tensor([[5], [6]]), "metadata": {"uids": ["a", "b"], "step": 3}})
        2

    Raises:
        ValueError: tensors or lists that differ in their number of rows, or none of them; an ``order`` of another number of
            documents than ``sub_seq_lengths``.
    """
    counts = [(name, len(value)) for name, value in _fields(batch) if _has_rows(value)]
    if not counts:
        raise ValueError(f"batch: expected a tensor or a list to count rows by, got {sorted(batch)}")
    first, rows = counts[0]
    for name, count in counts:
        if count != rows:
            raise ValueError(f"{name}: expected {rows} rows like {first}, got {count}")
    return rows


def pad_batch_to_multiple(
    batch: Mapping[str, object], multiple: int, *, zero_keys: Sequence[str] = ("loss_mask",)
) -> Mapping[str, object]:
    """A batch whose number of rows divides: dummy rows at the end are copies of row 0 that count in no loss.

    Copies of a real row, because any model runs them: no row without tokens, no attention mask without a one.

    Args:
        batch: as the module says.
        multiple: the rows of the result are a multiple of this (data-parallel size, micro-batch size).
        zero_keys: names, at the top or in a nested dict, whose dummy rows are zeros.

    Returns:
        A new dict; ``batch``, which stays as it was, when there is nothing to do.

    Example:
        >>> batch = {"ids": torch.tensor([[5, 6]]), "loss_mask": torch.tensor([[0.0, 1.0]]), "uids": ["a"]}
        >>> pad_batch_to_multiple(batch, 3)
        {'ids': tensor([[5, 6],
                [5, 6],
                [5, 6]]), 'loss_mask': tensor([[0., 1.],
                [0., 0.],
                [0., 0.]]), 'uids': ['a', 'a', 'a']}

    Raises:
        ValueError: multiple < 1; tensors or lists that differ in their number of rows; a zero key that the batch does
            not have, or has as None: its dummy rows would count in the loss.
        TypeError: a multiple that is no integer; a zero key whose rows are neither numbers nor tensors nor lists of them.
    """
    if integer(multiple, "multiple") < 1:
        raise ValueError(f"multiple: expected at least 1, got {multiple}")
    rows = num_rows(batch)
    missing = -rows % multiple
    if not missing:
        return batch
    found = {name for name, value in _fields(batch) if _has_rows(value)}
    absent = [name for name in zero_keys if name not in found]
    if absent:
        raise ValueError(
            f"zero_keys: expected names of rows in the batch, got {absent}, which it lacks; "
            "give the names of its loss masks, () for none"
        )

    def pad(name, value):
        if isinstance(value, list):
            copies = [_clone(value[0]) for _ in range(missing)]
            return value + [_zeros(name, row) if name in zero_keys else row for row in copies]
        if isinstance(value, torch.Tensor):
            padded = torch.cat([value, value[:1].expand(missing, *value.shape[1:])])
        else:
            padded = value[[*range(rows), *[0] * missing]]
        if name in zero_keys:
            padded[rows:] = 0
        return padded

    return _map_rows(batch, pad)


def slice_batch(batch: Mapping[str, object], start: int, end: int) -> dict[str, object]:
    """Rows ``start`` to ``end`` (exclusive), lists and a nested ``metadata`` dict sliced with the tensors.

    Args:
        batch: as the module says.
        start, end: ``0 <= start <= end <= rows``.

    Returns:
        A new dict; its tensors are views, no copies.

    Example:
        >>> slice_batch({"ids": torch.tensor([[5], [6], [7]]), "metadata": {"uids": ["a", "b", "c"]}}, 1, 3)
        {'ids': tensor([[6],
                [7]]), 'metadata': {'uids': ['b', 'c']}}

    Raises:
        ValueError: rows that the batch does not have; tensors or lists that differ in their number of rows.
    """
    rows = num_rows(batch)
    start, end = integer(start, "start"), integer(end, "end")
    if not 0 <= start <= end <= rows:
        raise ValueError(f"start, end: expected 0 <= start <= end <= {rows} rows, got {start} and {end}")
    return _map_rows(batch, lambda _, rows: rows[start:end])


def select_rows(batch: Mapping[str, object], indices: Sequence[int]) -> dict[str, object]:
    """The rows named by ``indices``, in that order: one micro-batch of token_budget_microbatches, say.

    Args:
        batch: as the module says.
        indices: row numbers, each ``0 <= index < rows``; one may come twice.

    Returns:
        A new dict; tensors are copied, entries of lists are the same objects.

    Example:
        >>> select_rows({"ids": torch.tensor([[5], [6], [7]]), "uids": ["a", "b", "c"]}, [2, 0])
        {'ids': tensor([[7],
                [5]]), 'uids': ['c', 'a']}

    Raises:
        ValueError: a row that the batch does not have; tensors or lists that differ in their number of rows.
        TypeError: an index that is no integer.
    """
    rows = num_rows(batch)
    indices = [integer(index, "indices") for index in indices]
    wrong = [index for index in indices if not 0 <= index < rows]
    if wrong:
        raise ValueError(f"indices: expected 0 to {rows - 1} for {rows} rows, got {wrong[0]}")
    return _map_rows(batch, lambda _, rows: [rows[i] for i in indices] if isinstance(rows, list) else rows[indices])


def _has_rows(value) -> bool:
    return isinstance(value, list) or getattr(value, "ndim", 0) > 0


def _fields(batch: Mapping) -> Iterator[tuple[str, object]]:
    """(name, value) of the batch and of the dicts in it."""
    for name, value in _order_by_row(batch).items():
        if isinstance(value, Mapping):
            yield from _fields(value)
        else:
            yield name, value


def _map_rows(batch: Mapping, change: Callable) -> dict[str, object]:
    """``change(name, rows)`` of everything with rows, which are a list or an array."""

    def changed(name, value):
        if isinstance(value, Mapping):
            return _map_rows(value, change)
        if not _has_rows(value):
            return value
        if isinstance(value, torch.Tensor) and value.is_nested:
            rows = change(name, list(value.unbind()))
            return torch.nested.as_nested_tensor(rows, layout=value.layout, device=value.device)
        return change(name, value)

    by_row = _order_by_row(batch)
    result = {name: changed(name, value) for name, value in by_row.items()}
    return result if by_row is batch else {**result, "order": list(chain(*result["order"]))}


def _order_by_row(batch: Mapping) -> Mapping:
    """The batch, its ``order`` as one list per row if it is one of PackedCollator's."""
    order, lengths = batch.get("order"), batch.get("sub_seq_lengths")
    if not isinstance(order, list) or not isinstance(lengths, list) or not all(isinstance(n, list) for n in lengths):
        return batch
    documents = sum(map(len, lengths))
    if len(order) != documents:
        raise ValueError(f"order: expected {documents} entries, one per document of sub_seq_lengths, got {len(order)}")
    entries = iter(order)
    return {**batch, "order": [list(islice(entries, len(row))) for row in lengths]}


def _clone(row):
    return row.clone() if isinstance(row, torch.Tensor) else copy.deepcopy(row)


def _zeros(name: str, row):
    if isinstance(row, torch.Tensor):
        return torch.zeros_like(row)
    if isinstance(row, list):
        return [_zeros(name, value) for value in row]
    if isinstance(row, (int, float)):
        return type(row)(0)
    raise TypeError(f"{name}: expected numbers, tensors or lists of them to zero, got {row!r} ({type(row).__name__})")
