"""Examples of natural length, as collators get them: 1-D or ``[1, length]`` values in Python lists, arrays or
tensors.
"""

import operator
import reprlib
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from operator import iadd
from typing import Any

import torch

from packing_ops._runtime.arguments import as_tensor, buffer_tensor, described, integer, plain

Examples = Sequence[Mapping[str, Any]]
_CODES = {torch.int64: "q", torch.float32: "f"}
_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}  # torch.cat takes them with no other dtype


def check_examples(examples: Examples, name: str) -> None:
    """Raise TypeError for an iterator, which could be read only once, and for a dict of columns."""
    if isinstance(examples, Mapping) or not hasattr(examples, "__len__"):
        raise TypeError(f"{name}: expected a list of dicts, got {type(examples).__name__}")


def without_rows(examples: Any) -> Any:
    """Return examples as they are; those of rows of a PackedStream, which are lists of examples, one row after the
    other.
    """
    if (
        isinstance(examples, list)
        and examples
        and all(isinstance(row, list) and (not row or isinstance(row[0], Mapping)) for row in examples)
    ):
        most = getattr(examples[0], "rows_per_batch", len(examples))
        if len(examples) > most:
            raise ValueError(
                f"rows_per_batch: expected the {len(examples)} rows of a batch (the DataLoader's batch_size) in "
                f"PackedStream, got {most}"
            )
        return [example for row in examples for example in row]
    return examples


def column(examples: Examples, name: str) -> list[Any]:
    """Return what every example has under ``name``."""
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


def sequences(examples: Examples, name: str) -> tuple[list[Any], list[int]]:
    """Return what every example has under ``name``, one value per token, and the lengths. Of ``[1, length]``, as
    iter_microbatches takes and yields it, it returns the one row.
    """
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
    """Return whether a value of one entry is a row."""
    return isinstance(value[0], (list, tuple)) if isinstance(value, (list, tuple)) else _dim(value) == 2


def optional_column(examples: Examples, name: str, lengths: Sequence[int], like: str) -> list[Any] | None:
    """Return a column as sequences does, checked to be as long as ``like``; None if no example has it."""
    if not any(name in example for example in examples):
        return None
    values, found = sequences(examples, name)
    for i, (wanted, length) in enumerate(zip(lengths, found, strict=True)):
        if length != wanted:
            raise ValueError(f"{name}: expected {wanted} values like {like}, got {length} in example {i}")
    return values


# --- columns next to input_ids: docs/columns.md ---

TARGETS = ("loss_mask", "completion_mask", "assistant_masks")  # 1 where a token is trained on
OF_TOKENS = ("token_type_ids", "mm_token_type_ids")  # models get them with their tokens
OF_IMAGES = (  # rows of images, videos or sounds, in the order of the examples
    "pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "image_sizes",
    "pixel_attention_mask", "spatial_shapes", "image_position_ids", "video_position_ids", "num_frames_per_video",
    "input_features", "feature_attention_mask", "input_features_mask",
)  # fmt: skip
STARTS = ("seq_lengths", "cu_seqlens", "position_ids")  # say where documents begin in an example
WEIGHTS = (
    "weight", "weights", "loss_weight", "loss_weights", "sample_weight", "sample_weights", "advantage", "advantages",
)  # fmt: skip
_READ = ("input_ids", "labels", "attention_mask", "num_actions", *TARGETS, *OF_TOKENS, *STARTS)


@dataclass
class Documents:
    """Columns with a value for each token, by name, an entry for each example; and the lengths of its documents."""

    columns: dict[str, list[Any]]
    lengths: list[list[int]]
    places: list[tuple[str, int]]  # prefix and example of each entry, for errors

    @property
    def flat_lengths(self) -> list[int]:
        return [length for own in self.lengths for length in own]

    @property
    def num_tokens(self) -> int:
        return sum(map(sum, self.lengths))

    def cut(self, kept: Sequence[int]) -> "Documents":
        """Return the first ``kept[i]`` tokens of each example; examples of 0 are left out."""
        columns = {
            name: [value[:n] for value, n in zip(values, kept, strict=True) if n]
            for name, values in self.columns.items()
        }
        lengths = [_first(own, n) for own, n in zip(self.lengths, kept, strict=True) if n]
        return Documents(columns, lengths, [place for place, n in zip(self.places, kept, strict=True) if n])

    def __add__(self, other: "Documents") -> "Documents":
        names = [name for name in self.columns if name in other.columns]
        if missing := (self.columns.keys() | other.columns.keys()) - set(names):
            raise ValueError(f"{min(missing)}: expected on both sides of a pair, got it on one")
        columns = {name: self.columns[name] + other.columns[name] for name in names}
        return Documents(columns, self.lengths + other.lengths, self.places + other.places)

    def flattened(self, name: str, dtype: torch.dtype = torch.int64, **gaps: Any) -> torch.Tensor:
        return flattened(self.columns[name], name, dtype, places=self.places, **gaps)


def documents_of(examples: Examples, prefix: str = "", known: Collection[str] = ()) -> Documents:
    """Return the columns of examples that a row of them has. Other columns, if not ``known``, raise or are ignored.

    Raises:
        ValueError: columns that do not fit input_ids or each other; weights, or a column with a value for each token,
            that is not ``known``.
    """
    input_ids, lengths = tokens_of(examples, prefix)
    found: set[str] = set().union(*examples)
    check_columns(examples, found, lengths, {*(prefix + name for name in _READ), *known}, prefix)
    columns = {"input_ids": input_ids}
    for name in ("labels", *TARGETS, *OF_TOKENS):
        if prefix + name in found and not (name == "loss_mask" and prefix + "num_actions" in found):
            values = optional_column(examples, prefix + name, lengths, prefix + "input_ids")
            assert values is not None
            columns[name] = values
    if prefix + "num_actions" in found:
        actions = num_actions_of(examples, lengths, prefix)
        masks = optional_column(examples, prefix + "loss_mask", actions, prefix + "num_actions")
        given = [[1] * count for count in actions] if masks is None else [list(plain(mask)) for mask in masks]
        columns["loss_mask"] = [[0] * (length - len(mask)) + mask for length, mask in zip(lengths, given, strict=True)]
    places = [(prefix, i) for i in range(len(examples))]
    return Documents(columns, lengths_of_documents(examples, found, lengths, prefix), places)


def check_columns(
    examples: Examples, found: set[str], lengths: list[int], known: Collection[str], prefix: str = ""
) -> None:
    """Raise ValueError for a column that says something of each token, or weighs an example, and that would be
    dropped.
    """
    for name in sorted(map(str, found - set(known))):
        if not name.startswith(prefix):
            continue
        values = [example.get(name) for example in examples]
        sizes = [() if value is None else _sizes(value) for value in values]
        per_token = [size[:1] for size in sizes] == [(length,) for length in lengths]
        if (
            name.removeprefix(prefix) in (*WEIGHTS, *OF_IMAGES, *_READ)
            or per_token
            or any(len(size) > 1 for size in sizes)  # rows of numbers: of images, say
        ):
            raise ValueError(
                f"{name}: expected no column that this collator would drop, got one beside {prefix}input_ids; see "
                "docs/columns.md for those that it knows, name others in token_fields, document_fields or "
                "image_fields, or take them out of the examples (dataset.remove_columns)"
            )


def _sizes(value: Any) -> tuple[int, ...]:
    """Return the sizes of a sequence of numbers, or of rows of numbers, without a first axis of 1; () for anything
    else, such as a text.
    """
    if isinstance(value, (list, tuple)):
        sizes: list[int] = []
        first: Any = value
        while isinstance(first, (list, tuple)) and first:
            sizes.append(len(first))
            first = first[0]
        found = tuple(sizes) if isinstance(first, (int, float)) else ()
    else:
        shape = getattr(value, "shape", None)
        found = tuple(shape) if shape and getattr(value.dtype, "kind", "i") not in "OSU" else ()
    return found[1:] if len(found) == 2 and found[0] == 1 else found


def num_actions_of(examples: Examples, lengths: Sequence[int], prefix: str = "") -> list[int]:
    counts = column(examples, prefix + "num_actions")
    for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        try:
            counts[i] = operator.index(count)
            fits = 0 <= counts[i] <= length
        except TypeError:  # None, or a fraction
            fits = False
        if not fits:
            raise ValueError(
                f"{prefix}num_actions: expected 0 to the example's {length} tokens, got {count!r} in example {i}"
            )
    return counts


def lengths_of_documents(
    examples: Examples, found: Collection[str], lengths: list[int], prefix: str = ""
) -> list[list[int]]:
    """Return the lengths of an example's documents, by the columns of STARTS; an example without any is one
    document.
    """
    given = [prefix + name for name in STARTS if prefix + name in found]
    if not given:
        return [[length] for length in lengths]
    answers = {}
    for name in given:
        values, _ = sequences(examples, name)
        kind = name.removeprefix(prefix)
        answers[name] = [
            _DOCUMENTS[kind]([integer(each, name) for each in plain(value)], length)
            for value, length in zip(values, lengths, strict=True)
        ]
        for i, (own, length) in enumerate(zip(answers[name], lengths, strict=True)):
            if sum(own) != length or min(own) < 1:
                got = plain(values[i])
                raise ValueError(
                    f"{name}: expected {_WANTED[kind]} of {length} tokens, got {reprlib.repr(list(got))} in example {i}"
                )
    first = answers[given[0]]
    for name in given[1:]:
        for i, own in enumerate(answers[name]):
            if own != first[i]:
                raise ValueError(
                    f"{name}: expected the documents of {given[0]}, {first[i]} tokens, got {own} in example {i}"
                )
    return first


def _by_positions(positions: list[int], length: int) -> list[int]:
    """Return the documents' lengths by their positions; [0] for positions that do not count from 0 in each document."""
    starts = [i for i, position in enumerate(positions) if position == 0]
    if len(positions) != length or starts[:1] != [0]:
        return [0]
    own = [end - start for start, end in zip(starts, [*starts[1:], length], strict=True)]
    return own if positions == [i for count in own for i in range(count)] else [0]


_DOCUMENTS: dict[str, Callable[[list[int], int], list[int]]] = {
    "seq_lengths": lambda lengths, _: lengths or [0],
    "cu_seqlens": lambda ends, _: [b - a for a, b in pairwise(ends)] if ends[:1] == [0] and len(ends) > 1 else [0],
    "position_ids": _by_positions,
}
_WANTED = {
    "seq_lengths": "the lengths of its documents, which make the example",
    "cu_seqlens": "where its documents begin and end, from 0 to the end of the example",
    "position_ids": "positions that count from 0 in each document of the example",
}


def trained_on(documents: Documents, name: str, gaps: Sequence[int] | None = None) -> torch.Tensor:
    """Return bool ``[total]`` of a column of TARGETS. Raises ValueError for weights, which labels cannot hold."""
    on_cpu = not any(isinstance(value, torch.Tensor) and not value.is_cpu for value in documents.columns[name])
    # Elsewhere the host would wait to see whether floating ones are 0 and 1: they are refused.
    flat = documents.flattened(name, torch.float32 if on_cpu else torch.int64, gaps=gaps)
    wrong = ((flat != 0) & (flat != 1)).nonzero() if on_cpu else flat[:0]
    if wrong.numel():
        raise ValueError(
            f"{name}: expected 0 and 1, since labels have no place for weights, got {flat[wrong[0]].item():g}"
        )
    return flat != 0


def check_pairs(features: Examples, sides: Sequence[Documents]) -> None:
    """Raise ValueError for columns of pairs that would be dropped, and for a side of several documents."""
    for name in ("prompt_input_ids", *WEIGHTS, *OF_IMAGES):
        if any(example.get(name) is not None for example in features):
            why = ", whose tokens chosen_input_ids and rejected_input_ids begin with" if name[0] == "p" else ""
            raise ValueError(f"{name}: expected no column that this collator would drop, got one beside pairs{why}")
    for side in sides:
        for i, own in enumerate(side.lengths):
            if len(own) > 1:
                raise ValueError(
                    f"position_ids: expected one document on each side of a pair, got {len(own)} in example {i}"
                )


def _first(lengths: list[int], count: int) -> list[int]:
    """Return the documents of the first ``count`` tokens."""
    ends = [0, *(min(end, count) for end in accumulate(lengths))]
    return [b - a for a, b in pairwise(ends) if b > a]


def lengths_of(values: Sequence[Any], name: str) -> list[int]:
    try:
        if torch.Tensor in set(map(type, values)):  # len() of one takes several times as long as its size
            return [value.size(0) if isinstance(value, torch.Tensor) else len(value) for value in values]
        return list(map(len, values))
    except (TypeError, IndexError):
        index = next(i for i, value in enumerate(values) if not hasattr(value, "__len__") or _dim(value) == 0)
        raise ValueError(f"{name}: expected a 1-D sequence, got {values[index]!r} in example {index}") from None


def tokens_of(examples: Examples, prefix: str = "") -> tuple[list[Any], list[int]]:
    """Return ``input_ids`` and their lengths, at least 1. An ``attention_mask`` next to them must hold no padding."""
    name = prefix + "input_ids"
    input_ids, lengths = sequences(examples, name)
    if 0 in lengths:
        raise ValueError(f"{name}: expected at least 1 token, got 0 in example {lengths.index(0)}")
    mask_name = prefix + "attention_mask"
    masks = optional_column(examples, mask_name, lengths, name) or ()
    ones = all(isinstance(mask, list) and mask.count(1) == len(mask) for mask in masks)
    if not ones and any(edge != 1 for edge in flattened(masks, mask_name).aminmax()):
        index = next(i for i, mask in enumerate(masks) if not (as_tensor(mask) == 1).all())
        raise ValueError(f"{mask_name}: expected no padding, got other values than 1 in example {index}")
    return input_ids, lengths


def flattened(
    values: Sequence[Any],
    name: str,
    dtype: torch.dtype = torch.int64,
    *,
    order: Sequence[int] | None = None,
    gaps: Sequence[int] | None = None,
    fill: int = 0,
    places: Sequence[tuple[str, int]] | None = None,
) -> torch.Tensor:
    """Return ``values`` end to end, as one tensor of ``dtype``, on the tensors' device, or on the CPU for lists.

    Args:
        order: the order of the values; as they are by default.
        gaps: how many slots of ``fill`` follow each value in that order.
        places: what is in front of ``name`` in an error about a value, and the example that it is of.

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
        raise _error(values, name, dtype, places) from error
    if flat.dim() != 1 or not _becomes(flat, dtype):
        raise _error(values, name, dtype, places)
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
    """Return whether ``values`` can be ``dtype`` without a cut."""
    if values.dtype == torch.uint64 and (values.long() < 0).any():
        return False
    return not values.is_complex() and (dtype.is_floating_point or not values.is_floating_point())


def _dim(value: Any) -> int:
    return value.dim() if isinstance(value, torch.Tensor) else getattr(value, "ndim", 1)


def _error(
    values: Sequence[Any], name: str, dtype: torch.dtype, places: Sequence[tuple[str, int]] | None
) -> ValueError:
    """Return an error that names the first value that is not a 1-D sequence of the kind, or that is not like the
    first one.
    """
    wanted = "numbers" if dtype.is_floating_point else "integers"
    for (prefix, i), value in zip(places or [("", i) for i in range(len(values))], values, strict=True):
        try:
            tensor = as_tensor(value)
            got = "" if tensor.dim() == 1 and _becomes(tensor, dtype) else described(tensor)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            got = repr(value)
        if got:
            return ValueError(f"{prefix}{name}: expected a 1-D sequence of {wanted}, got {got} in example {i}")
    devices = sorted({str(as_tensor(value).device) for value in values})
    return ValueError(f"{name}: expected 1-D sequences of {wanted} on one device, got {devices}")
