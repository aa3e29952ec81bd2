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
from packing_ops.metadata import PackedMetadata


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


def empty_like_batch(batch: Mapping[str, object], *, tokens: str = "input_ids", padding: int = 0) -> dict[str, object]:
    """A batch of no tokens with every field of ``batch``: the step of a rank that has no sequences left.

    Such a rank runs forward and backward like the others, which wait for it: the model gives logits of no token,
    masked_loss and the sum of sequence_logps are 0 with a gradient graph, and each parameter gets a gradient of zeros. A
    mean over its tokens would be NaN: divide by what the whole step holds (transformers: ``num_items_in_batch``).

    Args:
        batch: as the module says; or packed rows, which are told by a field with ``cu_seq`` in its name, or a
            PackedMetadata: those of PaddingFreeCollator and PackedCollator.model_inputs, or a dict of one's own.
        tokens: of packed rows, the field whose shape, ``[total]``, ``[1, total]`` or ``[rows, width]``, is that of every
            field with a value per token. Other tensors and lists have a value per document.
        padding: of packed rows, slots that belong to no document, for models that run no row of 0 slots. Those of
            transformers need 1: their reshapes are ambiguous without an element.

    Returns:
        A new dict. Of packed rows: values per token ``[padding, ...]`` or ``[1, padding, ...]``, zeros, -100 where a name
        ends in "labels" or "targets"; values per document ``[0, ...]``, no entry in lists; cu_seqlens ``[0]``, longest
        documents (``max_length*``, ``max_seqlen*``) 0, a PackedMetadata likewise; in ``cu_seq_lens*`` and ``max_length*``,
        transformers' own, padding is a document, as in to_transformers. Of any other batch: no rows. Dtypes and devices
        are those of ``batch``, and what belongs to no row is carried as it is.

    Example:
        >>> row = {"input_ids": torch.tensor([[5, 6, 7]]), "cu_seq_lens_q": torch.tensor([0, 2, 3]), "max_length_q": 2}
        >>> empty_like_batch(row)
        {'input_ids': tensor([], size=(1, 0), dtype=torch.int64), 'cu_seq_lens_q': tensor([0]), 'max_length_q': 0}
        >>> empty_like_batch(row, padding=1)
        {'input_ids': tensor([[0]]), 'cu_seq_lens_q': tensor([0, 1]), 'max_length_q': 1}
        >>> empty_like_batch({"ids": torch.tensor([[5, 6], [7, 8]]), "uids": ["a", "b"]})
        {'ids': tensor([], size=(0, 2), dtype=torch.int64), 'uids': []}

    Raises:
        ValueError: packed rows without the field ``tokens``; padding below 0, or of a batch that is no packed rows.
        TypeError: a padding that is no integer.
    """
    if integer(padding, "padding") < 0:
        raise ValueError(f"padding: expected at least 0 slots, got {padding}")
    if any("cu_seq" in name or isinstance(value, PackedMetadata) for name, value in _fields(batch)):
        like = batch.get(tokens)
        if not isinstance(like, torch.Tensor) or not like.dim():
            got = f"a {type(like).__name__}" if like is not None else f"only {sorted(batch)}"
            raise ValueError(f"{tokens}: expected a tensor [total], [1, total] or [rows, width], got {got}")
        return _without_tokens(batch, tuple(like.shape[:2]), padding)
    if padding:
        raise ValueError(f"padding: expected 0 for a batch without cu_seqlens, got {padding}")
    return _map_rows(batch, lambda _, rows: _nothing_of(rows))


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


def _without_tokens(batch: Mapping, shape: tuple[int, ...], padding: int) -> dict[str, object]:
    """``shape``: that of the tokens, in front of any others."""
    dims, slots = len(shape), (padding,) if len(shape) == 1 else (1, padding)

    def emptied(name, value):
        if isinstance(value, Mapping):
            return _without_tokens(value, shape, padding)
        if isinstance(value, PackedMetadata):
            return PackedMetadata.from_lengths([], total=padding, device=value.cu_seqlens.device)
        if name.startswith(("max_length", "max_seqlen")):
            longest = padding if name.startswith("max_length") else 0
            return torch.full_like(value, longest) if isinstance(value, torch.Tensor) else longest
        if not _has_rows(value):
            return value
        if "cu_seq" in name:
            ends = 2 if padding and "cu_seq_lens" in name else 1
            return torch.arange(ends, dtype=value.dtype, device=value.device) * padding
        if isinstance(value, torch.Tensor):
            axes = (
                1 if name == "position_ids" and tuple(value.shape[1 : dims + 1]) == shape else 0
            )  # [3, batch, seqlen]
            if tuple(value.shape[axes : axes + dims]) == shape:
                fill = -100 if name.endswith(("labels", "targets")) else 0
                return value.new_full((*value.shape[:axes], *slots, *value.shape[axes + dims :]), fill)
        return _nothing_of(value)

    return {name: emptied(name, value) for name, value in batch.items()}


def _nothing_of(rows):
    """No view, which would keep the batch."""
    if isinstance(rows, list):
        return []
    return rows.new_empty((0, *rows.shape[1:])) if isinstance(rows, torch.Tensor) else rows[:0].copy()


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
