"""Fields other than the tokens that a collator is asked for: one value for each token, or one for each document; and
columns of images, videos and sounds, rows that follow the documents and give them the axes of their positions.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from packing_ops._runtime.arguments import as_tensor, described, index_tensor, integer, number
from packing_ops.data._examples import OF_IMAGES, OF_TOKENS, Examples, column, sequences


def check_fields(fields: Any, name: str) -> tuple[str, ...]:
    if isinstance(fields, str) or not all(isinstance(field, str) for field in fields):
        raise TypeError(f"{name}: expected names in a tuple, got {fields!r}")
    if taken := [field for field in fields if field in ("input_ids", "labels", "attention_mask", "position_ids")]:
        raise ValueError(f"{name}: expected columns that the collator does not make itself, got {taken[0]!r}")
    return tuple(fields)


def token_fields(
    fields: Sequence[str], examples: Examples, lengths: Sequence[int], slots: Sequence[int], total: int
) -> dict[str, torch.Tensor]:
    """Return the values of all tokens end to end, ``[total, ...]``, by field.

    Args:
        examples: in the order of the row.
        lengths, slots: tokens of each that are in the row, the first ones of the example, and what it takes in the row.
        total: slots of the row.

    Returns:
        Integers as int64, all others as float32, 0 in slots without a token. ``routed_experts`` is int16, -1 there.
        ``allowed_ids`` become two: int64 end to end, and ``allowed_offsets`` int64 ``[total + 1]``, as token_logps
        takes them.

    Example:
        >>> examples = [{"input_ids": [7, 8], "old_logps": [-0.5, -2.0]}, {"input_ids": [9], "old_logps": [-1.0]}]
        >>> token_fields(["old_logps"], examples, [2, 1], [2, 2], 5)
        {'old_logps': tensor([-0.5000, -2.0000, -1.0000,  0.0000,  0.0000])}
    """
    result: dict[str, torch.Tensor] = {}
    for name in fields:
        if name == "allowed_ids":
            result |= _allowed(examples, lengths, slots, total)
        else:
            result[name] = _of_tokens(name, examples, lengths, slots, total)
    return result


def document_field(name: str, examples: Examples) -> list[float]:
    """Return the number of each example. Raises ValueError for one that is not finite."""
    values = [float(number(value, name)) for value in column(examples, name)]
    for i, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"{name}: expected a finite number, got {value} in example {i}")
    return values


def _of_tokens(name: str, examples: Examples, lengths: Sequence[int], slots: Sequence[int], total: int) -> torch.Tensor:
    whole = sequences(examples, "input_ids")[1]
    tensors = [
        _without_batch(as_tensor(value), length) for value, length in zip(column(examples, name), whole, strict=True)
    ]
    routed = name == "routed_experts"
    for i, (tensor, length) in enumerate(zip(tensors, whole, strict=True)):
        tail = tensors[0].shape[1:]
        if tensor.dim() == 0 or len(tensor) != length or tensor.shape[1:] != tail or (routed and len(tail) != 2):
            shape = "length, layers, k" if routed else ", ".join(map(str, ["length", *tail]))
            raise ValueError(
                f"{name}: expected [{shape}] with length={length} like input_ids, got {described(tensor)} in "
                f"example {i}"
            )
        integers = not (tensor.is_floating_point() or tensor.is_complex())
        if routed and not (integers and (not tensor.numel() or -1 <= tensor.amin() <= tensor.amax() < 2**15)):
            raise ValueError(f"{name}: expected experts from -1 (not known) to 32767, got others in example {i}")
    floating = any(tensor.is_floating_point() for tensor in tensors)
    dtype = torch.int16 if routed else torch.float32 if floating else torch.int64
    flat = tensors[0].new_full((total, *tensors[0].shape[1:]), -1 if routed else 0, dtype=dtype)
    start = 0
    for tensor, length, taken in zip(tensors, lengths, slots, strict=True):
        flat[start : start + length] = tensor[:length]
        start += taken
    return flat


def _without_batch(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Return ``[length, ...]`` of ``[1, length, ...]``."""
    return tensor[0] if length > 1 and tensor.dim() > 1 and len(tensor) == 1 else tensor


def _allowed(examples: Examples, lengths: Sequence[int], slots: Sequence[int], total: int) -> dict[str, torch.Tensor]:
    """Return the allowed ids of examples with a list of ids for each token (empty: all of the vocabulary), or with
    the ids end to end and ``allowed_offsets``.
    """
    ids, counts = [], torch.zeros(total, dtype=torch.int64, device="cpu")
    whole, start = sequences(examples, "input_ids")[1], 0
    has_offsets = any("allowed_offsets" in example for example in examples)
    offsets = column(examples, "allowed_offsets") if has_offsets else [None] * len(examples)
    for i, (sets, own, length, taken) in enumerate(
        zip(column(examples, "allowed_ids"), offsets, lengths, slots, strict=True)
    ):
        if own is None:
            sizes = torch.tensor([len(one) for one in sets], dtype=torch.int64, device="cpu")
            flat = index_tensor([each for one in sets[:length] for each in one], f"allowed_ids of example {i}")
        else:
            edges = index_tensor(own, f"allowed_offsets of example {i}").cpu().long()
            sizes = edges.diff()
            flat = index_tensor(sets, f"allowed_ids of example {i}").cpu()
            if not len(edges) or edges[0] != 0 or (sizes < 0).any() or edges[-1] != len(flat):
                raise ValueError(
                    f"allowed_offsets: expected 0 to the {len(flat)} allowed_ids, got others in example {i}"
                )
            flat = flat[: int(edges[min(length, len(sizes))])]
        if len(sizes) != whole[i]:
            raise ValueError(f"allowed_ids: expected sets for {whole[i]} tokens, got {len(sizes)} in example {i}")
        counts[start : start + length] = sizes[:length]
        ids.append(flat.long())
        start += taken
    return {"allowed_ids": torch.cat(ids), "allowed_offsets": torch.nn.functional.pad(counts.cumsum(0), (1, 0))}


# --- columns of images ---


RopeIndex = Callable[..., Any]


def check_image_fields(fields: Any, others: Sequence[str]) -> dict[str, int]:
    """Return {name: axis} of all columns of images: the known ones, along their first axis, and the declared ones."""
    if not isinstance(fields, Mapping) or not all(isinstance(name, str) for name in fields):
        raise TypeError(f"image_fields: expected a dict of names and axes, got {fields!r}")
    if taken := [name for name in fields if name in (*others, "input_ids", "labels", *OF_TOKENS)]:
        raise ValueError(f"image_fields: expected columns of images, got {taken[0]!r}")
    return {**dict.fromkeys(OF_IMAGES, 0), **{name: integer(axis, "image_fields") for name, axis in fields.items()}}


def joined_rows(examples: Examples, axes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return the columns of images that examples have, one after the other; None in an example that has no image.

    Raises:
        ValueError: values that do not fit each other.
    """
    joined: dict[str, torch.Tensor] = {}
    found = set[str]().union(*examples)
    for name, axis in axes.items():
        if name not in found:
            continue
        parts = [as_tensor(example[name]) for example in examples if example.get(name) is not None]
        try:
            joined.update({name: torch.cat(parts, axis)} if parts else {})
        except (RuntimeError, TypeError, IndexError) as error:
            raise ValueError(
                f"{name}: expected rows of one shape in all examples, joined along axis {axis}, got {error}"
            ) from None
    return joined


def axes_of_documents(
    rope_index: RopeIndex,
    examples: Examples,
    names: Iterable[str],
    lengths: Sequence[int],
    slots: Sequence[int],
    positions: torch.Tensor,
) -> torch.Tensor:
    """Return position_ids ``[axes, 1, total]``: for each example those that ``rope_index`` gives it in a call of one
    document.

    Args:
        names: the columns of images. ``rope_index`` gets those that it has a parameter for.
        lengths, slots: tokens of each that are in the row, the first ones of the example, and what it takes in the row.
        positions: int64 ``[1, total]``, those of text. In front of three axes they are a fourth, by which models find
            documents; slots without a token have them, too.
    """
    takes = inspect.signature(rope_index).parameters
    has = set[str]().union(*examples) & takes.keys()
    per_token = {name: sequences(examples, name)[0] for name in ("input_ids", *OF_TOKENS) if name in has}
    result: torch.Tensor | None = None
    start = 0
    for i, length in enumerate(sequences(examples, "input_ids")[1]):
        given = {name: as_tensor(values[i])[None] for name, values in per_token.items()}
        images = {name: examples[i].get(name) for name in names if name in takes}
        given |= {name: as_tensor(value) for name, value in images.items() if value is not None}
        found = rope_index(**given)
        found = found[0] if isinstance(found, tuple) else found
        if not isinstance(found, torch.Tensor) or found.dim() != 3 or found.shape[1:] != (1, length):
            got = described(found) if isinstance(found, torch.Tensor) else repr(found)
            raise ValueError(f"rope_index: expected [axes, 1, {length}] for example {i}, got {got}")
        front = int(len(found) == 3)
        if result is None:
            result = positions.expand(front + len(found), -1)[:, None].clone()
        result[front:, :, start : start + lengths[i]] = found[..., : lengths[i]]
        start += slots[i]
    assert result is not None  # there is an example
    return result
