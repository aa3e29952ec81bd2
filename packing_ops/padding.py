"""Taking padding out of a batch and putting it back.

A slot of a padded batch ``[batch, seqlen]`` is real where attention_mask is not zero, wherever that is: padding may be
left, right, on both sides or in between. ``indices`` int64 ``[total]`` names the real slots, row by row, as numbers in
``[0, batch * seqlen)``; packed row ``i`` is padded row ``indices[i]``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice

import torch

from packing_ops import _ops
from packing_ops._args import as_tensor, check_real, check_tensor, described, dtype_name, holds, index_tensor, integer
from packing_ops._autograd import past_autograd, register_autograd

Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]
PackedDict = tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, int, torch.Tensor]


def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
    *,
    lengths: torch.Tensor | Sequence[int] | None = None,
    total: int | None = None,
    max_seqlen: int | None = None,
) -> Packed:
    """The real rows of a padded batch, packed: the 5-tuple of flash_attn.bert_padding.unpad_input. Differentiable.

    Args:
        hidden_states: ``[batch, seqlen, ...]``, any dtype. Read in place when each ``[...]`` row is contiguous
            (slices, transposed batch and seqlen); copied first otherwise.
        attention_mask: ``[batch, seqlen]``, bool, integer or floating; not zero = real. A mask of 0 and -inf means
            something else and must be converted.
        unused_mask: ``[batch, seqlen]``, slots that are packed too but not counted in ``seqused``.
        lengths: packed slots per batch row, where they are known on the CPU; or
        total: packed slots, at most ``batch * seqlen``; rows after the real ones are zeros and their indices -1.
        max_seqlen: with ``total``, the longest row; ``seqlen`` by default.

    Returns:
        packed ``[total, ...]``; indices int64 ``[total]``; cu_seqlens int32 ``[batch + 1]``; max_seqlen, a Python
        int; seqused int32 ``[batch]``, real slots of attention_mask alone. New tensors. One synchronisation on CUDA,
        none with ``lengths`` or ``total`` (torch.compile needs one of those, or capture_scalar_outputs). Reads and
        writes ``total`` rows once. Deterministic, backward too.

    Example:
        >>> hidden = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 4.0]])
        >>> packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(
        ...     hidden, torch.tensor([[1, 1, 0], [1, 0, 1]])
        ... )
        >>> packed.tolist(), indices.tolist(), cu_seqlens.tolist(), max_seqlen, seqused.tolist()
        ([1.0, 2.0, 3.0, 4.0], [0, 1, 3, 5], [0, 2, 4], 2, [2, 2])

    Raises:
        ValueError: a mask that is not ``[batch, seqlen]``, shapes or devices that differ, lengths or totals that do
            not fit the mask (on CUDA found in the next call).
    """
    _check_padded("hidden_states", hidden_states, attention_mask)
    if lengths is None and total is None and not torch.compiler.is_compiling():
        (packed,), indices, cu_seqlens, seqused, totals = past_autograd(
            _ops.unpad_rows, [hidden_states], attention_mask, unused_mask
        )
        return packed, indices, cu_seqlens, int(totals[1]), seqused
    indices, cu_seqlens, seqused, total, max_seqlen = _layout(attention_mask, unused_mask, lengths, total, max_seqlen)
    packed = _ops.gather_rows(hidden_states, indices, total)
    return packed, indices[:total], cu_seqlens, max_seqlen, seqused


def pad_input(packed: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Packed rows back in a padded batch: the inverse of unpad_input. Differentiable.

    Args:
        packed: ``[total, ...]``, any dtype.
        indices: int64 ``[total]`` from unpad_input: strictly increasing below ``batch * seqlen``; -1 skips a row.
        batch, seqlen: of the result.

    Returns:
        ``[batch, seqlen, ...]``, a new tensor; zeros where no index points. Every element is written once, no
        synchronisation. Deterministic, backward too.

    Example:
        >>> pad_input(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 4]), batch=2, seqlen=3).tolist()
        [[1.0, 2.0, 0.0], [0.0, 3.0, 0.0]]

    Raises:
        ValueError: indices that are not int64 ``[total]``, do not increase or name a row outside the batch.
    """
    return _ops.scatter_rows(packed, indices, batch, seqlen)


def unpad_inputs(
    tensors: Mapping[str, torch.Tensor],
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
    *,
    lengths: torch.Tensor | Sequence[int] | None = None,
    total: int | None = None,
    max_seqlen: int | None = None,
) -> PackedDict:
    """unpad_input for several tensors (ids, positions, labels, hidden states) with one layout. Differentiable.

    Args:
        tensors: name to ``[batch, seqlen, ...]``; dtypes and trailing dimensions may differ.
        others: as unpad_input.

    Returns:
        As unpad_input, with a dict of ``[total, ...]`` tensors in front. At most one synchronisation on CUDA, none
        with ``lengths`` or ``total``.

    Example:
        >>> batch = {"input_ids": torch.tensor([[7, 8, 0]]), "labels": torch.tensor([[-100, 8, -100]])}
        >>> packed, *_ = unpad_inputs(batch, torch.tensor([[1, 1, 0]]))
        >>> {name: values.tolist() for name, values in packed.items()}
        {'input_ids': [7, 8], 'labels': [-100, 8]}

    Raises:
        ValueError: as unpad_input, with the tensor's name.
    """
    for name, tensor in tensors.items():
        _check_padded(name, tensor, attention_mask)
    if lengths is None and total is None and tensors and not torch.compiler.is_compiling():
        return _unpad_many(tensors, attention_mask, unused_mask)
    indices, cu_seqlens, seqused, total, max_seqlen = _layout(attention_mask, unused_mask, lengths, total, max_seqlen)
    packed = _many(_ops.gather_rows_many, tensors, indices, total)
    return packed, indices[:total], cu_seqlens, max_seqlen, seqused


def pad_inputs(
    packed: Mapping[str, torch.Tensor], indices: torch.Tensor, batch: int, seqlen: int
) -> dict[str, torch.Tensor]:
    """pad_input for several tensors; padding is zero in all of them. Differentiable.

    Args:
        packed: name to ``[total, ...]``.
        indices, batch, seqlen: as pad_input.

    Returns:
        name to ``[batch, seqlen, ...]``, new tensors. No synchronisation.

    Example:
        >>> pad_inputs({"input_ids": torch.tensor([7, 8])}, torch.tensor([0, 1]), batch=1, seqlen=3)
        {'input_ids': tensor([[7, 8, 0]])}

    Raises:
        ValueError: as pad_input.
    """
    return _many(_ops.scatter_rows_many, packed, indices, batch, seqlen)


def trim_padding(
    batch: Mapping[str, object],
    attention_mask: torch.Tensor | None = None,
    *,
    side: str = "right",
    min_length: int = 1,
    multiple_of: int = 1,
) -> Mapping[str, object]:
    """A batch without the columns that are padding in every row. Padding is read from the mask, never from token ids.

    Meant for the CPU, before the batch goes to the device; on CUDA it synchronises once.

    Args:
        batch: name to tensor. Those with two dimensions or more are ``[batch, seqlen, ...]`` and are cut; anything
            else (numbers, strings, one value per row) is passed on.
        attention_mask: ``[batch, seqlen]``, not zero = real; ``batch["attention_mask"]`` by default.
        side: which side to cut, "right", "left" or "both".
        min_length: columns to keep at least.
        multiple_of: round the kept columns up to a multiple. Never more columns than there were.

    Returns:
        A new dict of views, or ``batch`` itself when there is nothing to cut.

    Example:
        >>> batch = {"input_ids": torch.tensor([[5, 6, 0, 0], [7, 0, 0, 0]])}
        >>> trim_padding(batch, torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]))
        {'input_ids': tensor([[5, 6],
                [7, 0]])}

    Raises:
        ValueError: no mask, a mask that is not ``[batch, seqlen]``, a tensor with other first dimensions, an unknown
            side, min_length < 0 or multiple_of < 1.
    """
    if side not in ("right", "left", "both"):
        raise ValueError(f'side: expected "right", "left" or "both", got {side!r}')
    if integer(min_length, "min_length") < 0:
        raise ValueError(f"min_length: expected at least 0, got {min_length}")
    if integer(multiple_of, "multiple_of") < 1:
        raise ValueError(f"multiple_of: expected at least 1, got {multiple_of}")
    mask = batch.get("attention_mask") if attention_mask is None else attention_mask
    if mask is None:
        raise ValueError("attention_mask: expected one, as an argument or in the batch, got neither")
    check_real(mask, "attention_mask")
    if mask.dim() != 2:
        raise ValueError(f"attention_mask: expected [batch, seqlen], got {described(mask)}")
    columns = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and value.dim() > 1}
    for name, tensor in columns.items():
        _check_padded(name, tensor, mask, same_device=False)
    start, end = _kept_columns(mask, side, min_length, multiple_of)
    if end - start == mask.shape[1]:
        return batch
    return {name: value[:, start:end] if name in columns else value for name, value in batch.items()}


def iter_microbatches(
    examples: Iterable[Mapping[str, torch.Tensor | Sequence | float]],
    microbatch_size: int,
    *,
    pad_values: Mapping[str, float],
) -> Iterator[dict[str, torch.Tensor]]:
    """Examples of natural length in groups, each padded on the right and only to its own longest.

    Args:
        examples: dicts with the same names. Names in ``pad_values`` are sequences, a tensor ``[length, ...]`` or a
            Python list, equally long within an example; others are one value per example. Read as they are needed.
        microbatch_size: examples per group; the last group may hold fewer.
        pad_values: name to the value that padding gets, for example ``{"input_ids": 0, "labels": -100}``.

    Yields:
        name to ``[group, longest, ...]``, or ``[group]`` for single values (a list for strings), in the order of the
        examples; and ``attention_mask`` int64 ``[group, longest]``, 1 = real, unless the examples bring their own.

    Example:
        >>> examples = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 4]}]
        >>> [m["input_ids"].tolist() for m in iter_microbatches(examples, 2, pad_values={"input_ids": 0})]
        [[[5, 6, 7], [8, 0, 0]], [[9, 4]]]

    Raises:
        ValueError: microbatch_size < 1, no pad_values, a name that is missing in an example, a sequence whose name
            has no pad value, sequences of one example that differ in length, a pad value that their dtype cannot hold.
    """
    if integer(microbatch_size, "microbatch_size") < 1:
        raise ValueError(f"microbatch_size: expected at least 1 example, got {microbatch_size}")
    if not pad_values:
        raise ValueError("pad_values: expected a value for at least one name, got none")
    return _microbatches(iter(examples), microbatch_size, pad_values)


def _check_padded(name: str, tensor: torch.Tensor, mask: torch.Tensor, same_device: bool = True) -> None:
    check_tensor(tensor, name)
    check_tensor(mask, "attention_mask")
    if tensor.shape[:2] != mask.shape:
        raise ValueError(
            f"{name}: expected [batch, seqlen, ...] = {list(mask.shape)} like attention_mask, got {described(tensor)}"
        )
    if same_device and tensor.device != mask.device:
        raise ValueError(f"{name}: expected on {mask.device} like attention_mask, got {tensor.device}")


def _layout(attention_mask, unused_mask, lengths, total, max_seqlen):
    """indices [batch * seqlen] (-1 after total), cu_seqlens, seqused, total, max_seqlen."""
    indices, cu_seqlens, seqused, totals = _ops.unpad_layout(
        attention_mask, unused_mask, lengths is None and total is None
    )
    if lengths is None and total is None:
        total, max_seqlen = totals.tolist()
    elif lengths is not None:
        total, max_seqlen = _totals_of(lengths, cu_seqlens)
    else:
        slots, seqlen = indices.shape[0], attention_mask.shape[1]
        if not 0 <= integer(total, "total") <= slots:
            raise ValueError(f"total: expected 0 to batch * seqlen = {slots}, got {total}")
        max_seqlen = seqlen if max_seqlen is None else max_seqlen
        if max_seqlen < seqlen and totals.is_cpu and not torch.compiler.is_compiling() and max_seqlen < totals[1]:
            raise ValueError(f"max_seqlen: expected at least the longest row = {int(totals[1])}, got {max_seqlen}")
    return indices, cu_seqlens, seqused, total, max_seqlen


def _totals_of(lengths, cu_seqlens) -> tuple[int, int]:
    values = index_tensor(lengths, "lengths").tolist()
    if len(values) != cu_seqlens.shape[0] - 1:
        raise ValueError(f"lengths: expected one per batch row = {cu_seqlens.shape[0] - 1}, got {len(values)}")
    if cu_seqlens.is_cpu and not torch.compiler.is_compiling() and [0, *accumulate(values)] != cu_seqlens.tolist():
        raise ValueError(f"lengths: expected the masks' {cu_seqlens.diff().tolist()}, got {values}")
    return sum(values), max(values, default=0)


def _unpad_many(tensors, attention_mask, unused_mask) -> PackedDict:
    """One call for the layout and the first group of tensors, one more where only some of them require grad."""
    first = next(iter(tensors.values())).requires_grad
    now = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad == first}
    moved, indices, cu_seqlens, seqused, totals = past_autograd(
        _ops.unpad_rows, [*now.values()], attention_mask, unused_mask
    )
    packed = dict(zip(now, moved, strict=True))
    later = [name for name in tensors if name not in packed]
    if later:
        moved = _ops.gather_rows_many([tensors[name] for name in later], indices, indices.shape[0])
        packed.update(zip(later, moved, strict=True))
    return {name: packed[name] for name in tensors}, indices, cu_seqlens, int(totals[1]), seqused


def _many(op, tensors, *arguments) -> dict[str, torch.Tensor]:
    """op over a dict. Outputs of one call require grad together, so tensors without grad go in a call of their own."""
    for name, tensor in tensors.items():
        check_tensor(tensor, name)
    moved = {}
    for requires_grad in (False, True):
        names = [name for name, tensor in tensors.items() if tensor.requires_grad == requires_grad]
        if names:
            moved.update(zip(names, op([tensors[name] for name in names], *arguments), strict=True))
    return {name: moved[name] for name in tensors}


def _kept_columns(mask: torch.Tensor, side: str, min_length: int, multiple_of: int) -> tuple[int, int]:
    width = mask.shape[1]
    real = mask.any(dim=0).cpu().nonzero()
    # Nothing real: an empty span at the side that stays.
    nothing = (width, width) if side == "left" else (0, 0)
    first, last = (int(real[0]), int(real[-1]) + 1) if len(real) else nothing
    start = 0 if side == "right" else first
    end = width if side == "left" else last
    kept = max(end - start, min_length)
    kept = min(-(-kept // multiple_of) * multiple_of, width)
    # Columns that min_length and multiple_of add come from the side that is cut; with "both" from the right first.
    end = width if side == "left" else min(start + kept, width)
    return end - kept, end


def _microbatches(examples, microbatch_size, pad_values):
    first = 0
    while group := list(islice(examples, microbatch_size)):
        yield _pad_group(group, first, pad_values)
        first += len(group)


def _pad_group(group, first, pad_values) -> dict[str, torch.Tensor | list]:
    """One micro-batch; ``first`` is the number of its first example, for messages."""
    names = group[0].keys()
    for i, example in enumerate(group, first):
        if example.keys() != names:
            raise ValueError(f"examples: expected the names {sorted(names)}, got {sorted(example)} in example {i}")
    missing = sorted(pad_values.keys() - names - {"attention_mask"})
    if missing:
        raise ValueError(
            f"examples: expected {missing} (they have a pad value), got {sorted(names)} in example {first}"
        )
    pad_values = {"attention_mask": 0, **pad_values}
    padded, lengths = {}, None
    for name in names:
        values = [example[name] for example in group]
        if name not in pad_values:
            padded[name] = _single_values(name, values, first)
            continue
        sequences = _sequences(name, values, first)
        found = [len(sequence) for sequence in sequences]
        lengths = lengths or found
        for i, (wanted, length) in enumerate(zip(lengths, found, strict=True), first):
            if length != wanted:
                raise ValueError(f"{name}: expected {wanted} values like the rest of example {i}, got {length}")
        value, dtype = pad_values[name], sequences[0].dtype
        if not holds(dtype, value):
            raise ValueError(f"pad_values: expected a value of {dtype_name(dtype)} for {name!r}, got {value}")
        padded[name] = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=value)
    if "attention_mask" not in names:
        ones = [torch.ones(length, dtype=torch.int64, device=sequences[0].device) for length in lengths]
        padded["attention_mask"] = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True)
    return padded


def _sequences(name, values, first) -> list[torch.Tensor]:
    tensors = list(map(as_tensor, values))
    # An empty Python list has no dtype of its own.
    like = next((tensor for tensor in tensors if tensor.numel()), tensors[0])
    for i, tensor in enumerate(tensors):
        if tensor.dim() == 0:
            raise ValueError(
                f"{name}: expected a sequence (it has a pad value), got {values[i]} in example {first + i}"
            )
        if isinstance(values[i], Sequence) and not values[i]:
            tensors[i] = like.new_empty((0, *like.shape[1:]))
        elif (tensor.dtype, tensor.device, tensor.shape[1:]) != (like.dtype, like.device, like.shape[1:]):
            shape = ", ".join(["length", *map(str, like.shape[1:])])
            raise ValueError(
                f"{name}: expected {dtype_name(like.dtype)} [{shape}] on {like.device} as in the others, "
                f"got {described(tensor)} on {tensor.device} in example {first + i}"
            )
    return tensors


def _single_values(name, values, first) -> torch.Tensor | list[str]:
    if all(isinstance(value, str) for value in values):
        return values
    for i, value in enumerate(values, first):
        if isinstance(value, Sequence) or (isinstance(value, torch.Tensor) and value.dim() > 0):
            raise ValueError(f"pad_values: expected a value for {name!r}, a sequence in example {i}, got none")
    return torch.stack(list(map(as_tensor, values)))


# --- registration: shapes for torch.compile, gradients ---


@_ops.register_fake("unpad_layout")
def _(attention_mask, unused_mask, host_totals):
    batch = attention_mask.shape[0]
    return (
        attention_mask.new_empty(attention_mask.numel(), dtype=torch.int64),
        attention_mask.new_empty(batch + 1, dtype=torch.int32),
        attention_mask.new_empty(batch, dtype=torch.int32),
        torch.empty(2, dtype=torch.int64, device="cpu" if host_totals else attention_mask.device),
    )


@_ops.register_fake("unpad_rows")
def _(inputs, attention_mask, unused_mask):
    total = torch.library.get_ctx().new_dynamic_size()
    batch = attention_mask.shape[0]
    return (
        [tensor.new_empty((total, *tensor.shape[2:])) for tensor in inputs],
        attention_mask.new_empty(total, dtype=torch.int64),
        attention_mask.new_empty(batch + 1, dtype=torch.int32),
        attention_mask.new_empty(batch, dtype=torch.int32),
        torch.empty(2, dtype=torch.int64, device="cpu"),
    )


@_ops.register_fake("gather_rows")
def _(input, indices, total):
    return input.new_empty((total, *input.shape[2:]))


@_ops.register_fake("gather_rows_many")
def _(inputs, indices, total):
    return [input.new_empty((total, *input.shape[2:])) for input in inputs]


@_ops.register_fake("scatter_rows")
def _(packed, indices, batch, seqlen):
    return packed.new_empty((batch, seqlen, *packed.shape[1:]))


@_ops.register_fake("scatter_rows_many")
def _(packed, indices, batch, seqlen):
    return [tensor.new_empty((batch, seqlen, *tensor.shape[1:])) for tensor in packed]


def _first(tensors):
    return tensors[0] if isinstance(tensors, Sequence) else tensors


def _gather_context(ctx, inputs, output):
    tensors, indices, _ = inputs
    ctx.save_for_backward(indices)
    ctx.batch, ctx.seqlen = _first(tensors).shape[:2]


def _unpad_context(ctx, inputs, output):
    ctx.save_for_backward(output[1])
    ctx.batch, ctx.seqlen = inputs[0][0].shape[:2]


def _scatter_context(ctx, inputs, output):
    tensors, indices, _, _ = inputs
    ctx.save_for_backward(indices)
    ctx.total = _first(tensors).shape[0]


def _gather_backward(ctx, grad):
    (indices,) = ctx.saved_tensors
    return None if grad is None else _ops.scatter_rows(grad, indices, ctx.batch, ctx.seqlen), None, None


def _scatter_backward(ctx, grad):
    (indices,) = ctx.saved_tensors
    return None if grad is None else _ops.gather_rows(grad, indices, ctx.total), None, None, None


def _gather_many_backward(ctx, grads, *others):
    """Of gather_rows_many, and of unpad_rows, whose other outputs are integers."""
    (indices,) = ctx.saved_tensors
    return _needed(ctx, grads, _ops.scatter_rows_many, indices, ctx.batch, ctx.seqlen), None, None


def _scatter_many_backward(ctx, grads):
    (indices,) = ctx.saved_tensors
    return _needed(ctx, grads, _ops.gather_rows_many, indices, ctx.total), None, None, None


def _needed(ctx, grads, op, *arguments):
    """op over the grads that someone asks for, None for the others (integer tensors, constants)."""
    needed = [need and grad is not None for grad, need in zip(grads, ctx.needs_input_grad[0], strict=True)]
    moved = iter(op([grad for grad, need in zip(grads, needed, strict=True) if need], *arguments))
    return [next(moved) if need else None for need in needed]


register_autograd("unpad_rows", _gather_many_backward, setup_context=_unpad_context, linear=1)
register_autograd("gather_rows", _gather_backward, setup_context=_gather_context, linear=1)
register_autograd("gather_rows_many", _gather_many_backward, setup_context=_gather_context, linear=1)
register_autograd("scatter_rows", _scatter_backward, setup_context=_scatter_context, linear=1)
register_autograd("scatter_rows_many", _scatter_many_backward, setup_context=_scatter_context, linear=1)
