"""Which fields of a batch have rows, and how a batch of the same class is made of other rows. The rules: see
rows.py.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from numbers import Integral, Number

import torch

from packing_ops._runtime.arguments import alone, described, dtype_name, holds, wrong_type


class Fields:
    """The fields of a batch, nested dicts and metadata included; ``all`` has them as (name, value)."""

    def __init__(self, batch: Mapping, row_keys: Sequence[str] = (), batch_keys: Sequence[str] = ()):
        if not isinstance(batch, Mapping):
            raise wrong_type("batch", "a dict or another Mapping", batch)
        self.batch, self.row_keys, self.batch_keys = batch, row_keys, batch_keys
        given = {"row_keys": row_keys, "batch_keys": batch_keys}
        for argument, names in given.items():
            if isinstance(names, str):
                raise wrong_type(argument, "a list of names", names)
        self.all = list(self._walk(batch))
        for argument, names in given.items():
            check_names(names, argument, {name for name, _ in self.all})
        if both := set(row_keys) & set(batch_keys):
            raise ValueError(f"row_keys, batch_keys: expected a name in one of them, got {min(both)!r} in both")
        for name in row_keys:
            values = [value for found, value in self.all if found == name and value is not None]
            if values and not any(map(_may_be_rows, values)):
                raise TypeError(f"{name}: expected rows, as row_keys says, got {type(values[0]).__name__}")

    def _walk(self, batch: Mapping) -> Iterator[tuple[str, object]]:
        if isinstance(getattr(batch, "batch_size", None), torch.Size):
            # tensordict's, which its fields do not show.
            raise TypeError(
                f"batch: expected a Mapping without a batch_size of its own, got {type(batch).__name__} of "
                f"{list(batch.batch_size)}, which has slices itself; a dict of its fields is taken"
            )
        fields = chain(_order_by_row(batch).items(), [("metadata", batch.metadata)] if _has_metadata(batch) else [])
        for name, value in fields:
            yield name, value
            if isinstance(value, Mapping) and name not in self.batch_keys:
                yield from self._walk(value)

    def has_rows(self, name: str, value) -> bool:
        """Return whether the field is cut with the rows; if not, it is carried whole."""
        if name in self.batch_keys or value is None:
            return False
        if name in self.row_keys:
            return _may_be_rows(value)  # at another depth the name may be of something else
        return _has_length_and_slices(value) and not (_says_boundaries(name) and _are_boundaries(value))

    def rows(self) -> list[tuple[str, object]]:
        """Yield the fields that have rows, as (name, value)."""
        return [(name, value) for name, value in self.all if self.has_rows(name, value)]

    def count(self) -> int:
        """Count the rows of a batch. Raises ValueError where fields disagree in it, or where a field may have rows
        or not.
        """
        found = self.rows()
        if not found:
            raise ValueError(f"batch: expected a tensor or a list to count rows by, got {sorted(self.batch)}")
        first, like = next((field for field in found if hasattr(field[1], "ndim")), found[0])
        strided = isinstance(like, torch.Tensor) and like.is_nested and like.layout != torch.jagged
        rows = like.size(0) if strided else len(like)
        for name, value in found:
            if isinstance(value, torch.Tensor) and value.is_nested and value.layout != torch.jagged:
                raise ValueError(f"{name}: expected nested tensors of layout jagged, got strided")
            if len(value) != rows:
                said = "" if name in self.row_keys else f"; batch_keys={(name,)} carries it as it is"
                raise ValueError(f"{name}: expected {rows} rows like {first}, got {len(value)}{said}")
        for name, value in self.all:
            if name not in self.row_keys and name not in self.batch_keys and _is_ambiguous(name, value, rows):
                raise ValueError(
                    f"{name}: expected in row_keys or batch_keys, since it has as many entries as there are rows: "
                    f"row_keys={(name,)} if one belongs to each row, batch_keys={(name,)} if not"
                )
        return rows

    def decided(self) -> dict[str, set[str]]:
        """Return row_keys and batch_keys with every guess made explicit, for slices of the batch, which might be
        guessed otherwise.
        """
        names = {name for name, value in self.all if value is not None and not isinstance(value, Mapping)}
        with_rows = {name for name, _ in self.rows()}
        return {"row_keys": with_rows, "batch_keys": (names - with_rows) | set(self.batch_keys)}

    def map(self, change: Callable):
        """Return the batch with ``change(name, rows)`` in place of each field with rows. Rows of a nested tensor are
        a list.
        """
        return self._mapped(self.batch, change)

    def _mapped(self, batch: Mapping, change: Callable):
        by_row = _order_by_row(batch)

        def changed(name, value):
            if isinstance(value, Mapping) and name not in self.batch_keys:
                return self._mapped(value, change)
            if not self.has_rows(name, value):
                return value
            if isinstance(value, torch.Tensor) and value.is_nested:
                rows = change(name, list(value.unbind()))
                if not len(rows):
                    return torch.nested.nested_tensor_from_jagged(value.values()[:0], value.offsets()[:1])
                return torch.nested.as_nested_tensor(rows, layout=value.layout, device=value.device)
            rows = change(name, value)
            return list(chain(*rows)) if name == "order" and by_row is not batch else rows

        return rebuilt(batch, changed, by_row)


def check_names(names: Sequence[str], argument: str, found: set[str]) -> None:
    for name in names:
        if name not in found:
            raise ValueError(f"{argument}: expected names in the batch, got {name!r}; it has {sorted(map(str, found))}")


# --- what a field is ---


def _has_length_and_slices(value) -> bool:
    if isinstance(value, (str, bytes, tuple, Mapping)):
        return False
    if hasattr(value, "ndim"):
        return value.ndim > 0
    return hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")


def _may_be_rows(value) -> bool:
    """Return whether a value may have an entry for each row. Where row_keys says so, a tuple may too."""
    return not isinstance(value, (str, bytes, Mapping)) and hasattr(value, "__getitem__") and bool(_dim(value))


def _dim(value) -> int:
    return getattr(value, "ndim", 1)


def _says_boundaries(name: str) -> bool:
    return str(name).endswith("boundaries")


def _numbers(value):
    """Return tensors and arrays as lists, except those on a GPU, which are not read."""
    if isinstance(value, torch.Tensor) and not value.is_cpu:
        return value
    return value.tolist() if hasattr(value, "tolist") else value


def _is_row_number(value) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _pairs(value) -> list[tuple[int, int]] | None:
    """Return the pairs of a list, tensor or array of pairs of integers; None for anything else."""
    pairs = _numbers(value)
    pairs = list(map(_numbers, pairs)) if isinstance(pairs, list) else []
    are_pairs = (isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs)
    if not pairs or not all(are_pairs) or not all(_is_row_number(_numbers(number)) for number in chain(*pairs)):
        return None
    return [(int(start), int(end)) for start, end in pairs]


def _are_boundaries(value) -> bool:
    """Return whether a value is contiguous (start, end) pairs from 0 on. Of a GPU tensor only shape and dtype are
    checked: no synchronisation.
    """
    if isinstance(value, torch.Tensor) and not value.is_cpu:
        return value.ndim == 2 and value.shape[1] == 2 and not value.is_floating_point()
    pairs = _pairs(value)
    if pairs is None or any(end <= start for start, end in pairs):
        return False
    return [start for start, _ in pairs] == [0, *(end for _, end in pairs[:-1])]


def _is_ambiguous(name: str, value, rows: int) -> bool:
    """Return whether a field with as many entries as rows may have rows or belong to the whole batch.

    Three kinds: a field called boundaries, on a GPU or in another form than contiguous pairs; a list of contiguous
    pairs up to the last row under another name; a tuple of tensors or lists.
    """
    if not hasattr(value, "__len__") or not _dim(value) or not rows or len(value) != rows:
        return False
    if isinstance(value, torch.Tensor) and not value.is_cpu:
        return _says_boundaries(name) and _are_boundaries(value)
    if _says_boundaries(name):  # those of a part of a batch have gaps between them, or are only their ends
        numbers = _numbers(value) if (pairs := _pairs(value)) is None else list(chain(*pairs))
        ascending = isinstance(numbers, list) and all(map(_is_row_number, numbers)) and numbers == sorted(numbers)
        return ascending and not isinstance(value, tuple) and not _are_boundaries(value)
    if isinstance(value, tuple):
        return all(map(_has_length_and_slices, value))
    return isinstance(value, list) and isinstance(value[0], tuple) and _are_boundaries(value) and value[-1][1] == rows


def _has_metadata(batch: Mapping) -> bool:
    # Not hasattr(batch, ...): a class may expose its fields as attributes.
    return "metadata" in getattr(batch, "__dict__", ()) or hasattr(type(batch), "metadata")


def _order_by_row(batch: Mapping) -> Mapping:
    """Return the batch; for one of PackedCollator's, ``order`` becomes a list for each row, with an entry per
    document.
    """
    order, lengths = batch.get("order"), batch.get("sub_seq_lengths")
    if not isinstance(order, list) or not isinstance(lengths, list) or not all(isinstance(n, list) for n in lengths):
        return batch
    documents = sum(map(len, lengths))
    if len(order) != documents:
        raise ValueError(f"order: expected {documents} entries, one per document of sub_seq_lengths, got {len(order)}")
    entries = iter(order)
    return {**batch, "order": [list(islice(entries, len(row))) for row in lengths]}


# --- a batch, or rows, of the same class ---


def rebuilt(batch: Mapping, change: Callable, fields: Mapping | None = None):
    """Return a batch of the same class with ``change(name, value)`` for each field and for its metadata."""
    changed = {name: change(name, value) for name, value in (batch if fields is None else fields).items()}
    kind = type(batch)
    if kind.__module__ in ("builtins", "collections"):
        return changed
    try:
        result = kind(changed)
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise TypeError(f"batch: expected a dict or a class made of one, {kind.__name__}(fields), got {got}") from error
    set_by_class = getattr(result, "__dict__", {})
    for name, value in getattr(batch, "__dict__", {}).items():
        if name not in set_by_class and name != "metadata":
            setattr(result, name, value)
    if _has_metadata(batch):
        result.metadata = change("metadata", batch.metadata)
    return result


def cut(name: str, rows, start: int, end: int):
    """Return ``rows[start:end]``, checked to have that many rows."""
    advice = f"; batch_keys={(name,)} carries it as it is"
    wanted = f"{name}: expected {type(rows).__name__} to have rows {start} to {end}"
    return (
        rows[start:end]
        if isinstance(rows, torch.Tensor)
        else _counted(lambda: _by_place(rows)[start:end], end - start, wanted, advice)
    )


def made_of(name: str, like, rows: list):
    """Return ``rows`` as a list of the class of ``like``."""
    wanted = f"{name}: expected {type(like).__name__} to be made of {len(rows)} rows"
    return rows if type(like) is list else _counted(lambda: type(like)(rows), len(rows), wanted)


def _counted(make: Callable, count: int, wanted: str, advice: str = ""):
    """Return ``make()``, checked to have ``count`` rows."""
    try:
        made = make()
        if len(made) == count:
            return made
        got = f"{len(made)} of them"
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
    raise ValueError(f"{wanted}, got {got}{advice}")


def taken(name: str, rows, indices: list[int]):
    """Return ``rows[i]`` for each index; entries of a list are the same objects."""
    if hasattr(rows, "ndim"):
        return _by_place(rows)[indices]
    return made_of(name, rows, [rows[i] for i in indices])


def _by_place(rows):
    """Return what indexes by position: a pandas column would take positions for its labels."""
    return getattr(rows, "iloc", rows)


def none_of(name: str, rows):
    """Return 0 rows, and no view: a view would keep the batch's memory alive."""
    if isinstance(rows, torch.Tensor):
        return rows.new_empty((0, *rows.shape[1:]))
    return _by_place(rows)[:0].copy() if hasattr(rows, "ndim") else made_of(name, rows, [])


def with_own_memory(name: str, value):
    """Return copies of tensors; in lists only of those that are views of a larger storage."""
    if isinstance(value, Mapping):
        return rebuilt(value, with_own_memory)
    if isinstance(value, torch.Tensor):
        return value.clone()
    if not _has_length_and_slices(value) or hasattr(value, "ndim"):
        return value
    rows = [value[i] for i in range(len(value))]
    if not any(isinstance(row, torch.Tensor) for row in rows):
        return value
    return made_of(name, value, [alone(row) if isinstance(row, torch.Tensor) else row for row in rows])


# --- dummy rows ---


def with_dummies(name: str, rows, missing: int, fill: Mapping):
    """Return the rows, then ``missing`` dummy rows: ``fill[name]`` if it is given, else copies of row 0."""
    if isinstance(rows, torch.Tensor):
        dummies = rows[:1].expand(missing, *rows.shape[1:]).clone()
        return torch.cat([rows, _filled(name, dummies, fill[name]) if name in fill else dummies])
    padded = None
    if hasattr(rows, "ndim"):
        padded = _by_place(rows)[[*range(len(rows)), *[0] * missing]].copy()
        places = _by_place(padded)
        if rows.ndim > 1 or rows.dtype != object:
            if name in fill:
                places[len(rows) :] = _filled(name, places[len(rows) :].copy(), fill[name])
            return padded
    first = _by_place(rows)[0]
    dummies = [first.clone() if isinstance(first, torch.Tensor) else copy.deepcopy(first) for _ in range(missing)]
    if name in fill:
        dummies = _filled(name, dummies, fill[name], _filled_row if padded is None else _filled_object)
    if padded is None:
        return made_of(name, rows, [*(rows[i] for i in range(len(rows))), *dummies])
    for place, row in enumerate(dummies, len(rows)):
        places[place] = row
    return padded


def _filled(name: str, dummies, value, filled_row: Callable | None = None):
    if not callable(value):
        return (
            [filled_row(name, row, value) for row in dummies]
            if isinstance(dummies, list)
            else _full(name, dummies, value)
        )
    made = value(dummies)
    if isinstance(dummies, torch.Tensor):
        wanted = f"{described(dummies)} on {dummies.device}"
        got = f"{described(made)} on {made.device}" if isinstance(made, torch.Tensor) else type(made).__name__
        if got != wanted:
            raise ValueError(f"fill: expected {wanted} for {name!r}, got {got}")
    elif hasattr(dummies, "dtype") and hasattr(dummies, "shape"):
        wanted = f"{dummies.dtype} {dummies.shape}"
        got = f"{made.dtype} {made.shape}" if type(made) is type(dummies) else type(made).__name__
        if got != wanted:
            raise ValueError(f"fill: expected {wanted} for {name!r}, got {got}")
    elif not _has_length_and_slices(made) or len(made) != len(dummies):
        got = len(made) if _has_length_and_slices(made) else type(made).__name__
        raise ValueError(f"fill: expected {len(dummies)} rows for {name!r}, got {got}")
    return made


def _full(name: str, like, value):
    """Return a tensor or an array like ``like``, filled with ``value``, which its dtype must hold unchanged."""
    if isinstance(like, torch.Tensor):
        if isinstance(value, Number) and holds(like.dtype, value):
            return torch.full_like(like, value)
        raise _wrong_fill(name, value, dtype_name(like.dtype))
    full = like.copy()
    try:
        _by_place(full)[:] = value
        if ((full == value) | ((full != full) & (value != value))).all():  # NaN differs from itself
            return full
    except (TypeError, ValueError, OverflowError):
        pass
    raise _wrong_fill(name, value, like.dtype)


def _filled_object(name: str, row, value):
    """Return a row of objects filled with a value: an array of objects takes any; in one whose entries have entries,
    those are filled.
    """
    return _filled_row(name, row, value) if isinstance(row, (list, tuple)) or hasattr(row, "ndim") else value


def _filled_row(name: str, row, value):
    if isinstance(row, (list, tuple)):
        return type(row)(_filled_row(name, inner, value) for inner in row)
    if isinstance(row, torch.Tensor) or getattr(row, "ndim", 0) > 0:
        return _full(name, row, value)
    if isinstance(row, Number) and isinstance(value, Number) and type(row)(value) == value:
        return type(row)(value)
    if type(row) is type(value):
        return copy.deepcopy(value)
    raise _wrong_fill(name, value, type(row).__name__)


def _wrong_fill(name: str, value, wanted) -> ValueError:
    return ValueError(
        f"fill: expected a value of {wanted} for {name!r}, or a function of its dummy rows, got {value!r}; "
        f"fill={{{name!r}: ...}} says what they get"
    )
