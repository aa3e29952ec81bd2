"""Take padding out of a batch and put it back.

A slot of a padded batch ``[batch, seqlen]`` is real where attention_mask is not zero: padding may be left, right, on
both sides or in between. ``indices`` int64 ``[total]`` has the numbers of the real slots, row by row, in
``[0, batch * seqlen)``: packed slot ``i`` is slot ``indices[i]`` of the padded batch.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import check_names, check_tensor, index_tensor, integer
from packing_ops._runtime.autograd import call_below_autograd, register_autograd
from packing_ops.padding_batches import check_padded

Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]
Layout = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]
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
    """Pack the real rows of a padded batch, and return the 5-tuple of flash_attn.bert_padding.unpad_input.
    Differentiable.

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
        packed ``[total, ...]``; indices int64 ``[total]``; cu_seqlens int32 ``[batch + 1]``; max_seqlen, a Python int;
        seqused int32 ``[batch]``, real slots of attention_mask only. New tensors. One synchronisation on CUDA, no
        synchronisation with ``lengths`` or ``total`` (torch.compile needs one of those, or capture_scalar_outputs).
        Reads and writes ``total`` rows once.

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

    Determinism: the same bits in every call, backward too: nothing is added up.
    Synchronises: once on CUDA; with ``lengths`` or ``total`` never.
    Memory: the results; a copy of hidden_states if its rows are not contiguous.
    Gradients: of hidden_states, of any order; forward mode too.
    """
    check_padded("hidden_states", hidden_states, attention_mask)
    if lengths is None and total is None and not torch.compiler.is_compiling():
        (packed,), indices, cu_seqlens, seqused, totals = call_below_autograd(
            gate.unpad_rows, [hidden_states], attention_mask, unused_mask
        )
        return packed, indices, cu_seqlens, int(totals[1]), seqused
    indices, cu_seqlens, seqused, total, max_seqlen = _layout(attention_mask, unused_mask, lengths, total, max_seqlen)
    packed = gate.gather_rows(hidden_states, indices, total)
    return packed, indices[:total], cu_seqlens, max_seqlen, seqused


def pad_input(packed: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Put packed rows back into a padded batch: the inverse of unpad_input. Differentiable.

    Args:
        packed: ``[total, ...]``, any dtype.
        indices: int64 ``[total]`` from unpad_input: strictly increasing below ``batch * seqlen``; -1 skips a row.
        batch, seqlen: of the result.

    Returns:
        ``[batch, seqlen, ...]``, a new tensor; zeros where no index points. Every element is written once, no
        synchronisation.

    Example:
        >>> pad_input(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 4]), batch=2, seqlen=3).tolist()
        [[1.0, 2.0, 0.0], [0.0, 3.0, 0.0]]

    Raises:
        ValueError: indices that are not int64 ``[total]``, do not increase or name a row outside the batch.

    Determinism: the same bits in every call, backward too: nothing is added up.
    Synchronises: never; wrong indices on CUDA raise in a later call.
    Memory: the result.
    Gradients: of packed, of any order; forward mode too.
    """
    return gate.scatter_rows(packed, indices, batch, seqlen)


def unpad_inputs(
    tensors: Mapping[str, torch.Tensor],
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
    *,
    lengths: torch.Tensor | Sequence[int] | None = None,
    total: int | None = None,
    max_seqlen: int | None = None,
) -> PackedDict:
    """Pack several tensors (ids, positions, labels, hidden states) with one layout, as unpad_input does.
    Differentiable.

    Args:
        tensors: name to ``[batch, seqlen, ...]``; dtypes and trailing dimensions may differ.
        Others: as unpad_input.

    Returns:
        As unpad_input, with a dict of ``[total, ...]`` tensors in front. At most one synchronisation on CUDA, zero
        with ``lengths`` or ``total``.

    Example:
        >>> batch = {"input_ids": torch.tensor([[7, 8, 0]]), "labels": torch.tensor([[-100, 8, -100]])}
        >>> packed, *_ = unpad_inputs(batch, torch.tensor([[1, 1, 0]]))
        >>> {name: values.tolist() for name, values in packed.items()}
        {'input_ids': [7, 8], 'labels': [-100, 8]}

    Raises:
        ValueError: as unpad_input, with the tensor's name.

    Determinism: as unpad_input.
    Synchronises: once on CUDA for all tensors; with ``lengths`` or ``total`` never.
    Memory: as unpad_input.
    Gradients: of floating tensors, of any order; forward mode too.
    """
    check_names(tensors, "tensors")
    for name, tensor in tensors.items():
        check_padded(name, tensor, attention_mask)
    if lengths is None and total is None and tensors and not torch.compiler.is_compiling():
        # One call for the layout and the first group of tensors, and one more if only some of them require grad
        first = next(iter(tensors.values())).requires_grad
        now = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad == first}
        moved, indices, cu_seqlens, seqused, totals = call_below_autograd(
            gate.unpad_rows, [*now.values()], attention_mask, unused_mask
        )
        packed = dict(zip(now, moved, strict=True))
        if later := [name for name in tensors if name not in packed]:
            moved = gate.gather_rows_many([tensors[name] for name in later], indices, indices.shape[0])
            packed.update(zip(later, moved, strict=True))
        return {name: packed[name] for name in tensors}, indices, cu_seqlens, int(totals[1]), seqused
    indices, cu_seqlens, seqused, total, max_seqlen = _layout(attention_mask, unused_mask, lengths, total, max_seqlen)
    packed = _many(gate.gather_rows_many, tensors, indices, total)
    return packed, indices[:total], cu_seqlens, max_seqlen, seqused


def pad_inputs(
    packed: Mapping[str, torch.Tensor], indices: torch.Tensor, batch: int, seqlen: int
) -> dict[str, torch.Tensor]:
    """Pad several tensors as pad_input does; padding is zero in all of them. Differentiable.

    Args:
        packed: name to ``[total, ...]``.
        indices, batch, seqlen: as pad_input.

    Returns:
        name to ``[batch, seqlen, ...]``, new tensors.

    Example:
        >>> pad_inputs({"input_ids": torch.tensor([7, 8])}, torch.tensor([0, 1]), batch=1, seqlen=3)
        {'input_ids': tensor([[7, 8, 0]])}

    Raises:
        ValueError: as pad_input.
        TypeError: packed is no dict of tensors.

    Determinism: as pad_input.
    Synchronises: as pad_input.
    Memory: the results.
    Gradients: of floating tensors, of any order; forward mode too.
    """
    check_names(packed, "packed")
    return _many(gate.scatter_rows_many, packed, indices, batch, seqlen)


def _layout(
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None,
    lengths: torch.Tensor | Sequence[int] | None,
    total: int | None,
    max_seqlen: int | None,
) -> Layout:
    """Return indices [batch * seqlen] (-1 after total), cu_seqlens, seqused, total, max_seqlen."""
    indices, cu_seqlens, seqused, totals = gate.unpad_layout(
        attention_mask, unused_mask, lengths is None and total is None
    )
    if lengths is not None:
        values = index_tensor(lengths, "lengths").tolist()
        if len(values) != cu_seqlens.shape[0] - 1:
            raise ValueError(f"lengths: expected one per batch row = {cu_seqlens.shape[0] - 1}, got {len(values)}")
        if cu_seqlens.is_cpu and not torch.compiler.is_compiling() and [0, *accumulate(values)] != cu_seqlens.tolist():
            raise ValueError(f"lengths: expected the masks' {cu_seqlens.diff().tolist()}, got {values}")
        total, max_seqlen = sum(values), max(values, default=0)
    elif total is None:
        total, max_seqlen = totals.tolist()
    else:
        slots, seqlen = indices.shape[0], attention_mask.shape[1]
        if not 0 <= integer(total, "total") <= slots:
            raise ValueError(f"total: expected 0 to batch * seqlen = {slots}, got {total}")
        max_seqlen = seqlen if max_seqlen is None else max_seqlen
        if max_seqlen < seqlen and totals.is_cpu and not torch.compiler.is_compiling() and max_seqlen < totals[1]:
            raise ValueError(f"max_seqlen: expected at least the longest row = {int(totals[1])}, got {max_seqlen}")
    return indices, cu_seqlens, seqused, total, max_seqlen


def _many(
    op: Callable[..., Sequence[torch.Tensor]], tensors: Mapping[str, torch.Tensor], *arguments: Any
) -> dict[str, torch.Tensor]:
    """Run op over a dict. Outputs of one call require grad together, so tensors without grad go in a separate call."""
    for name, tensor in tensors.items():
        check_tensor(tensor, name)
    moved: dict[str, torch.Tensor] = {}
    for requires_grad in (False, True):
        names = [name for name, tensor in tensors.items() if tensor.requires_grad == requires_grad]
        if names:
            moved.update(zip(names, op([tensors[name] for name in names], *arguments), strict=True))
    return {name: moved[name] for name in tensors}


# --- gradients ---


def _register(name: str, inverse: str) -> None:
    """Register the gradient of gather_rows, scatter_rows or unpad_rows, of one tensor or many: it is the other way."""
    scatters = name.startswith("scatter")

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        first = inputs[0] if isinstance(inputs[0], torch.Tensor) else inputs[0][0]
        ctx.save_for_backward(output[1] if name == "unpad_rows" else inputs[1])
        ctx.sizes, ctx.others = first.shape[: 1 if scatters else 2], len(inputs) - 1

    def backward(ctx: Any, grads: Any, *_: Any) -> tuple[Any, ...]:
        (indices,), op = ctx.saved_tensors, getattr(gate, inverse)
        if inverse.endswith("many"):
            # Those that someone asks for: not integer tensors and constants
            needed = [need and grad is not None for grad, need in zip(grads, ctx.needs_input_grad[0], strict=True)]
            moved = iter(op([grad for grad, need in zip(grads, needed, strict=True) if need], indices, *ctx.sizes))
            found: Any = [next(moved) if need else None for need in needed]
        else:
            found = None if grads is None else op(grads, indices, *ctx.sizes)
        return found, *[None] * ctx.others

    register_autograd(name, backward, setup_context=setup_context, linear=1)


_register("unpad_rows", "scatter_rows_many")
_register("gather_rows", "scatter_rows")
_register("gather_rows_many", "scatter_rows_many")
_register("scatter_rows", "gather_rows")
_register("scatter_rows_many", "gather_rows_many")
