"""Fields other than the tokens that a collator is asked for: one value for each token, or one for each document."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from packing_ops._runtime.arguments import as_tensor, described, index_tensor, number
from packing_ops.data._examples import Examples, column, sequences


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
        if routed and not _are_experts(tensor):
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


def _are_experts(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return False
    least, most = tensor.aminmax() if tensor.numel() else (0, 0)
    return bool(least >= -1 and most < 2**15)


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
