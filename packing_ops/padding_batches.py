"""Padded batches: trim the columns that are only padding, pad examples per micro-batch. The columns to keep are an
op's.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import torch

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import (
    alone,
    as_tensor,
    at_least,
    check_names,
    check_real,
    check_tensor,
    described,
    dtype_name,
    holds,
    wrong_type,
)


def trim_padding(
    batch: Mapping[str, object],
    attention_mask: torch.Tensor | None = None,
    *,
    side: Literal["right", "left", "both"] = "right",
    min_length: int = 1,
    multiple_of: int = 1,
    own: bool = False,
) -> Mapping[str, object]:
    """Return the batch without the columns that are padding in every row, by the mask alone: token ids are not read.

    ``torch.ops.packing_ops.trim_padding_range`` finds the columns to keep; on CUDA it synchronises once. The values are
    sliced by torch: views of the batch, through which gradients flow, nothing is copied. A view keeps the padded memory
    alive, which matters where batches wait in a queue or are pickled: ``own=True`` copies what is kept. Meant for the
    CPU, before the batch goes to the device.

    Args:
        batch: name to value. Tensors and arrays of two dimensions or more are ``[batch, seqlen, ...]`` and are trimmed;
            other values (numbers, strings, one value per row) are copied over.
        attention_mask: ``[batch, seqlen]``, nonzero for tokens; ``batch["attention_mask"]`` by default.
        side: the side to trim, "right", "left" or "both".
        min_length: minimum number of columns to keep.
        multiple_of: round the number of columns up to a multiple of this, at most to the columns of the batch.
        own: every tensor and array of the result has memory that holds it alone: a copy where it is a part of more, of
            the padded batch or of what ``batch`` has views of. Without ``batch`` nothing holds that memory any longer.
            Gradients flow through copies too; a copy is not in pinned memory.

    Returns:
        A new dict whose trimmed tensors are views of those in ``batch``, with ``own`` copies; ``batch`` itself when
        there is nothing to trim, and with ``own`` nothing to copy.

    Example:
        >>> batch = {"input_ids": torch.tensor([[5, 6, 0, 0], [7, 0, 0, 0]])}
        >>> trim_padding(batch, torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]))
        {'input_ids': tensor([[5, 6],
                [7, 0]])}
        >>> whole = {"attention_mask": torch.ones(2, 1000).index_fill(1, torch.arange(10, 1000), 0)}
        >>> [trim_padding(whole, own=own)["attention_mask"].untyped_storage().nbytes() for own in (False, True)]
        [8000, 80]

    Raises:
        ValueError: no mask, a mask that is not ``[batch, seqlen]``, a tensor with other first dimensions, an unknown
            side, min_length < 0 or multiple_of < 1.

    Determinism: the same columns in every call.
    Synchronises: once for a mask on CUDA.
    Memory: nothing, the results are views; with ``own`` a copy of what is kept.
    Gradients: through the views, or the copies, as torch has them.
    """
    check_names(batch, "batch")
    mask: Any = batch.get("attention_mask") if attention_mask is None else attention_mask
    if mask is None:
        raise ValueError("attention_mask: expected one, as an argument or in the batch, got neither")
    check_real(mask, "attention_mask")
    start, end = gate.trim_padding_range(mask, side, min_length, multiple_of).tolist()
    columns: dict[str, Any] = {name: value for name, value in batch.items() if getattr(value, "ndim", 0) > 1}
    for name, rows in columns.items():
        check_padded(name, as_tensor(rows), mask, same_device=False)
    if end - start < mask.shape[1]:
        batch = {name: columns[name][:, start:end] if name in columns else value for name, value in batch.items()}
    if not own:
        return batch
    copied = {name: alone(value) for name, value in batch.items()}
    return copied if any(copied[name] is not value for name, value in batch.items()) else batch


def iter_microbatches(
    examples: Iterable[Mapping[str, torch.Tensor | Sequence[Any] | float]],
    microbatch_size: int,
    *,
    pad_values: Mapping[str, float],
) -> Iterator[dict[str, Any]]:
    """Yield micro-batches of examples, in order, each padded on the right to its longest example.

    Args:
        examples: iterable of dicts with the same names, read as needed. Names in ``pad_values`` are sequences of the
            same length within an example: a tensor ``[length]``, a Python list, or ``[1, length]``, whose one row is
            taken. With a 1-D one, ``[length, ...]`` is allowed too. Other names have one value per example.
        microbatch_size: examples per micro-batch; the last one may have fewer.
        pad_values: name to its padding value, for example ``{"input_ids": 0, "labels": -100}``.

    Yields:
        A dict of ``[group, longest, ...]`` for sequences and ``[group]`` for single values (a list for strings), with
        group = number of examples; and ``attention_mask`` int64 ``[group, longest]``, 1 for tokens, unless the examples
        have separate values.

    Example:
        >>> examples = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 4]}]
        >>> [m["input_ids"].tolist() for m in iter_microbatches(examples, 2, pad_values={"input_ids": 0})]
        [[[5, 6, 7], [8, 0, 0]], [[9, 4]]]
        >>> rows = [{"input_ids": torch.tensor([[5, 6, 7]])}, {"input_ids": torch.tensor([[8]])}]
        >>> next(iter_microbatches(rows, 2, pad_values={"input_ids": 0}))["input_ids"].tolist()
        [[5, 6, 7], [8, 0, 0]]

    Raises:
        ValueError: microbatch_size < 1, no pad_values, a name that is missing in an example, a sequence whose name
            has no pad value, several rows in an example, sequences of one example that differ in length, a pad value
            that their dtype cannot hold.

    Determinism: the same batches for the same examples.
    Synchronises: never for examples on the CPU.
    Memory: one micro-batch at a time.
    Gradients: of floating tensors, by torch's copies.
    """
    at_least(microbatch_size, "microbatch_size", 1, "example")
    if not pad_values:
        raise ValueError("pad_values: expected a value for at least one name, got none")
    if not isinstance(pad_values, Mapping):
        raise wrong_type("pad_values", "a dict of values by name", pad_values)
    return _microbatches(iter(examples), microbatch_size, pad_values)


def check_padded(name: str, tensor: torch.Tensor, mask: torch.Tensor, same_device: bool = True) -> None:
    check_tensor(tensor, name)
    check_tensor(mask, "attention_mask")
    if tensor.shape[:2] != mask.shape:
        raise ValueError(
            f"{name}: expected [batch, seqlen, ...] = {list(mask.shape)} like attention_mask, got {described(tensor)}"
        )
    if same_device and tensor.device != mask.device:
        raise ValueError(f"{name}: expected on {mask.device} like attention_mask, got {tensor.device}")


def _microbatches(
    examples: Iterator[Mapping[str, Any]], microbatch_size: int, pad_values: Mapping[str, float]
) -> Iterator[dict[str, torch.Tensor | list[str]]]:
    first = 0
    while group := list(islice(examples, microbatch_size)):
        yield _pad_group(group, first, pad_values)
        first += len(group)


def _pad_group(
    group: Sequence[Mapping[str, Any]], first: int, pad_values: Mapping[str, float]
) -> dict[str, torch.Tensor | list[str]]:
    """Return one micro-batch; ``first`` is the number of its first example, for messages."""
    for i, example in enumerate(group, first):
        if not isinstance(example, Mapping):
            raise TypeError(f"examples: expected dicts, got {type(example).__name__} as example {i}")
    # Check that all examples have the same names
    names = group[0].keys()
    for i, example in enumerate(group, first):
        if example.keys() != names:
            raise ValueError(f"examples: expected the names {sorted(names)}, got {sorted(example)} in example {i}")
    missing = sorted(pad_values.keys() - names - {"attention_mask"})
    if missing:
        raise ValueError(
            f"examples: expected {missing} (they have a pad value), got {sorted(names)} in example {first}"
        )
    # Pad each name
    pad_values = {"attention_mask": 0, **pad_values}
    padded, lengths = {}, None
    padded_names = [name for name in names if name in pad_values]
    rows = [_rows({name: example[name] for name in padded_names}, i) for i, example in enumerate(group, first)]
    for name in names:
        values = [example[name] for example in group]
        if name not in pad_values:
            padded[name] = _single_values(name, values, first)
            continue
        sequences = _sequences(name, values, [row[name] for row in rows], first)
        found = [len(sequence) for sequence in sequences]
        lengths = lengths or found
        for i, (wanted, length) in enumerate(zip(lengths, found, strict=True), first):
            if length != wanted:
                raise ValueError(f"{name}: expected {wanted} values like the rest of example {i}, got {length}")
        value, dtype = pad_values[name], sequences[0].dtype
        if not holds(dtype, value):
            raise ValueError(f"pad_values: expected a value of {dtype_name(dtype)} for {name!r}, got {value}")
        padded[name] = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=value)
    # Make the mask
    if "attention_mask" not in names:
        ones = [torch.ones(length, dtype=torch.int64, device=sequences[0].device) for length in lengths or ()]
        padded["attention_mask"] = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True)
    return padded


def _rows(sequences: Mapping[str, Any], index: int) -> dict[str, torch.Tensor]:
    """Return the sequences of one example. ``[1, length]`` becomes ``[length]``, unless a 1-D sequence next to it
    has length 1: then it is one token with ``length`` values.
    """
    tensors = {name: _tensor(name, value, "a sequence of numbers", index) for name, value in sequences.items()}
    length = next((len(tensor) for tensor in tensors.values() if tensor.dim() == 1), None)
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or len(tensor) == length:
            continue
        if len(tensor) == 1:
            tensors[name] = tensor[0]
        elif length is None:
            raise ValueError(
                f"{name}: expected a 1-D sequence or [1, length], got {described(tensor)} in example {index}; "
                "[length, ...] needs one of them beside it"
            )
    of_values = next((name for name, tensor in tensors.items() if tensor.dim() > 1), None)
    if of_values is not None and not any(tensor.dim() == 1 for tensor in tensors.values()):
        raise ValueError(
            f"{of_values}: expected a 1-D sequence or [1, length], got {described(as_tensor(sequences[of_values]))} in "
            f"example {index}; [length, ...] needs one of them beside it"
        )
    return tensors


def _tensor(name: str, value: Any, wanted: str, index: int) -> torch.Tensor:
    try:
        return as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"{name}: expected {wanted}, got {value!r} in example {index}") from None


def _sequences(name: str, values: list[Any], tensors: list[torch.Tensor], first: int) -> list[torch.Tensor]:
    # An empty Python list has no dtype.
    like = next((tensor for tensor in tensors if tensor.numel()), tensors[0])
    for i, tensor in enumerate(tensors):
        if tensor.dim() == 0:
            raise ValueError(
                f"{name}: expected a sequence (it has a pad value), got {values[i]} in example {first + i}"
            )
        if isinstance(values[i], Sequence) and not tensor.numel():
            tensors[i] = like.new_empty((0, *like.shape[1:]))
        elif (tensor.dtype, tensor.device, tensor.shape[1:]) != (like.dtype, like.device, like.shape[1:]):
            shape = ", ".join(["length", *map(str, like.shape[1:])])
            raise ValueError(
                f"{name}: expected {dtype_name(like.dtype)} [{shape}] on {like.device} as in the others, "
                f"got {described(tensor)} on {tensor.device} in example {first + i}"
            )
    return tensors


def _single_values(name: str, values: list[Any], first: int) -> torch.Tensor | list[str]:
    if all(isinstance(value, str) for value in values):
        return values
    for i, value in enumerate(values, first):
        if isinstance(value, str):
            raise ValueError(f"{name}: expected a number or a string as in the others, got {value!r} in example {i}")
        if isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0:
            raise ValueError(f"pad_values: expected a value for {name!r}, a sequence in example {i}, got none")
    return torch.stack([_tensor(name, value, "a number or a string", i) for i, value in enumerate(values, first)])
