"""Examples of natural length, as collators get them: 1-D or ``[1, length]`` values in Python lists, arrays or tensors."""

from array import array
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import iadd
from typing import Any

import torch

from packing_ops._arguments import as_tensor, buffer_tensor, described

_CODES = {torch.int64: "q", torch.float32: "f"}
_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}  # torch.cat takes them beside no other dtype


def check_examples(examples: Sequence[Mapping[str, Any]], name: str) -> None:
    """TypeError for an iterator, which could be read only once, and for a dict of columns."""
    if isinstance(examples, Mapping) or not hasattr(examples, "__len__"):
        raise TypeError(f"{name}: expected a list of dicts, got {type(examples).__name__}")


def without_rows(examples: Any) -> Any:
    """Examples as they are; those of rows of a PackedStream, which are lists of examples, one row after the other."""
    if isinstance(examples, list) and examples and all(map(_is_row, examples)):
        most = getattr(examples[0], "rows_per_batch", len(examples))
        if len(examples) > most:
            raise ValueError(
                f"rows_per_batch: expected the {len(examples)} rows of a batch (the DataLoader's batch_size) in "
                f"PackedStream, got {most}"
            )
        return [example for row in examples for example in row]
    return examples


def _is_row(row: Any) -> bool:
    return isinstance(row, list) and (not row or isinstance(row[0], Mapping))


def column(examples: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """What every example has under ``name``."""
    try:
        return [example[name] for example in examples]
    except (KeyError, TypeError):
        for i, example in enumerate(examples):
            if not isinstance(example, Mapping):
                raise TypeError(f"examples: expected dicts, got {type(example).__name__} as example {i}") from None
            if name not in example:
                raise ValueError(
                    f"{name}: expected in every example, got only {sorted(example)} in example {i}"
                ) from None
        raise


def sequences(examples: Sequence[Mapping[str, Any]], name: str) -> tuple[list[Any], list[int]]:
    """The same of one value for each token, and their lengths. Of ``[1, length]``, as iter_microbatches takes and yields it,
    the one row."""
    values = column(examples, name)
    lengths = lengths_of(values, name)
    if 1 in lengths:
        values = [
            value[0] if length == 1 and _is_one_row(value) else value
            for value, length in zip(values, lengths, strict=True)
        ]
        lengths = lengths_of(values, name)
    return values, lengths


def _is_one_row(value: Any) -> bool:
    """Of a value with one entry."""
    return isinstance(value[0], (list, tuple)) if isinstance(value, (list, tuple)) else _dim(value) == 2


def optional_column(
    examples: Sequence[Mapping[str, Any]], name: str, lengths: Sequence[int], like: str
) -> list[Any] | None:
    """The same, checked to be as long as ``like``; None where no example has it."""
    if not any(name in example for example in examples):
        return None
    values, found = sequences(examples, name)
    for i, (wanted, length) in enumerate(zip(lengths, found, strict=True)):
        if length != wanted:
            raise ValueError(f"{name}: expected {wanted} values like {like}, got {length} in example {i}")
    return values


def lengths_of(values: Sequence[Any], name: str) -> list[int]:
    try:
        if torch.Tensor in set(map(type, values)):  # len() of one takes several times as long as its size
            return [value.size(0) if isinstance(value, torch.Tensor) else len(value) for value in values]
        return list(map(len, values))
    except (TypeError, IndexError):
        index = next(i for i, value in enumerate(values) if not hasattr(value, "__len__") or _dim(value) == 0)
        raise ValueError(f"{name}: expected a 1-D sequence, got {values[index]!r} in example {index}") from None


def tokens_of(examples: Sequence[Mapping[str, Any]], prefix: str = "") -> tuple[list[Any], list[int]]:
    """``input_ids`` and their lengths, at least 1; an ``attention_mask`` beside them must hold no padding."""
    name = prefix + "input_ids"
    input_ids, lengths = sequences(examples, name)
    if 0 in lengths:
        raise ValueError(f"{name}: expected at least 1 token, got 0 in example {lengths.index(0)}")
    masks = optional_column(examples, prefix + "attention_mask", lengths, name)
    if masks is not None:
        _check_no_padding(masks, prefix + "attention_mask")
    return input_ids, lengths


def flattened(
    values: Sequence[Any],
    name: str,
    dtype: torch.dtype = torch.int64,
    *,
    order: Sequence[int] | None = None,
    gaps: Sequence[int] | None = None,
    fill: int = 0,
) -> torch.Tensor:
    """``values`` end to end, as one tensor of ``dtype`` where the tensors are, on the CPU for lists.

    Args:
        order: which value comes when; as they are by default.
        gaps: how many slots of ``fill`` come after each value of that order.

    Example:
        >>> flattened([[1, 2], [3]], "input_ids", order=[1, 0], gaps=[2, 0])
        tensor([3, 0, 0, 1, 2])
    """
    pieces = values if order is None else [values[i] for i in order]
    try:
        if all(isinstance(value, (list, tuple)) for value in values):
            return _from_lists(pieces, dtype, gaps or [0] * len(pieces), fill)
        pieces = list(map(as_tensor, pieces))
        pieces = [piece.long() if piece.dtype in _UNSIGNED and _becomes(piece, dtype) else piece for piece in pieces]
        if gaps is not None:
            filling = torch.full((max(gaps),), fill, device=pieces[0].device)
            fillings = [(filling[:gap],) if gap else () for gap in gaps]  # most documents have no gap after them
            pieces = [part for piece, after in zip(pieces, fillings, strict=True) for part in (piece, *after)]
        flat = torch.cat(pieces)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise _error(values, name, dtype) from error
    if flat.dim() != 1 or not _becomes(flat, dtype):
        raise _error(values, name, dtype)
    return flat.to(dtype)


def _from_lists(values: Sequence[Sequence[Any]], dtype: torch.dtype, gaps: Sequence[int], fill: int) -> torch.Tensor:
    # torch.tensor() takes ten times as long for a list as array, and that twice as long as bytearray.
    if dtype.is_floating_point and not any(gaps):
        try:
            return buffer_tensor(bytearray(reduce(iadd, values, [])), torch.uint8).to(dtype)
        except (TypeError, ValueError):  # weights, not a mask
            pass
    buffer, filling = array(_CODES[dtype]), array(_CODES[dtype], [fill])
    for value, gap in zip(values, gaps, strict=True):
        buffer.fromlist(value if isinstance(value, list) else list(value))
        if gap:
            buffer += filling * gap
    return buffer_tensor(buffer, dtype)


def _becomes(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether ``values`` can be ``dtype`` without a cut."""
    if values.dtype == torch.uint64 and (values.long() < 0).any():
        return False
    return not values.is_complex() and (dtype.is_floating_point or not values.is_floating_point())


def _check_no_padding(masks: Sequence[Any], name: str) -> None:
    if all(isinstance(mask, list) and mask.count(1) == len(mask) for mask in masks):
        return
    if any(edge != 1 for edge in flattened(masks, name).aminmax()):
        index = next(i for i, mask in enumerate(masks) if not (as_tensor(mask) == 1).all())
        raise ValueError(f"{name}: expected no padding, got other values than 1 in example {index}")


def _dim(value: Any) -> int:
    return value.dim() if isinstance(value, torch.Tensor) else getattr(value, "ndim", 1)


def _error(values: Sequence[Any], name: str, dtype: torch.dtype) -> ValueError:
    """Names the first value that is no 1-D sequence of the kind, or that is not like the first one."""
    wanted = "numbers" if dtype.is_floating_point else "integers"
    for i, value in enumerate(values):
        try:
            tensor = as_tensor(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            return ValueError(f"{name}: expected a 1-D sequence of {wanted}, got {value!r} in example {i}")
        if tensor.dim() != 1 or not _becomes(tensor, dtype):
            return ValueError(f"{name}: expected a 1-D sequence of {wanted}, got {described(tensor)} in example {i}")
    devices = sorted({str(as_tensor(value).device) for value in values})
    return ValueError(f"{name}: expected 1-D sequences of {wanted} on one device, got {devices}")
