"""Columns of images, videos and sounds: rows that follow the documents, and the axes of positions that they give
them.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from packing_ops._runtime.arguments import as_tensor, described, integer
from packing_ops.data._examples import OF_IMAGES, OF_TOKENS, Examples, sequences

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
