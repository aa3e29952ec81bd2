"""Numbers per token and per document of a packed row: to the slot that predicts, to statistics, and back to tokens.

cu_seqlens is int32 or int64 ``[num_documents + 1]``: document ``i`` owns slots ``cu_seqlens[i] : cu_seqlens[i + 1]``.
A group of documents is the same one level up: the boundaries of prompts among samples, say, over one reward a sample.
"""

from numbers import Real

import torch

from packing_ops._args import check_cu_seqlens, holds, integer
from packing_ops.boundaries import seq_idx_from_cu_seqlens, shift_labels

_ops = torch.ops.packing_ops


def shift_values(values: torch.Tensor, cu_seqlens: torch.Tensor, *, fill_value: float = 0.0) -> torch.Tensor:
    """shift_labels for everything else that a token has: loss masks, advantages, rewards, old log-probs. Differentiable.

    Args:
        values: ``[total]`` or ``[1, total]``, any dtype, one for each token, at the token's own slot.
        cu_seqlens: int32 or int64 ``[num_documents + 1]``.
        fill_value: what a slot gets that predicts no token.

    Returns:
        Like ``values``: slot t holds the value of token t + 1, or ``fill_value`` at the last slot of each document and
        in the padding after them. No synchronisation. The value of a document's first token, which nothing predicts,
        is in no slot, and its gradient is 0. Any derivative, deterministic.

    Example:
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> shift_values(torch.tensor([0.0, 1.0, 0.0, 0.5, 1.0]), cu_seqlens)
        tensor([1.0000, 0.0000, 0.5000, 1.0000, 0.0000])
        >>> shift_values(torch.tensor([[5, 6, 7, 8, 9]]), cu_seqlens, fill_value=-1)
        tensor([[ 6, -1,  8,  9, -1]])

    Raises:
        ValueError: values of another shape, cu_seqlens that are none or end past the values, a fill_value that the
            dtype of the values does not hold.
    """
    cu_seqlens = _documents(cu_seqlens)
    _check_row("values", values)
    if fill_value and not torch.compiler.is_compiling() and not holds(values.dtype, fill_value):
        raise ValueError(
            f"fill_value: expected a number that {_dtype_name(values.dtype)} holds like values, got {fill_value}"
        )
    last = shift_labels(values.new_zeros(values.shape, dtype=torch.int32), cu_seqlens, ignore_index=1) != 0
    return values.roll(-1, dims=-1).masked_fill(last, fill_value)


def segment_std(
    values: torch.Tensor, cu_seqlens: torch.Tensor, mask: torch.Tensor | None = None, *, correction: float = 1
) -> torch.Tensor:
    """Standard deviation per document, or of the rewards of each group of samples. Differentiable.

    Args:
        values: float32, float64, bfloat16 or float16, ``[total]`` or ``[1, total]``.
        cu_seqlens: int32 or int64 ``[num_documents + 1]``.
        mask: as many elements as ``values``, 0 = left out, whatever the value is there.
        correction: the sum of squares is divided by the number of values less this: 1 as torch.std has it, 0 for the
            population.

    Returns:
        ``[num_documents]``, float64 for float64 values, else float32. 0 where no more than ``correction`` values are
        kept (torch.std gives NaN), and where all are equal; the gradient is 0 there too. Computed in float64.
        No synchronisation. Deterministic: the order of additions depends on the document's own length alone.

    Example:
        Advantages of GRPO: two prompts of three and two samples, whose rewards are compared in their own group.

        >>> import packing_ops as po
        >>> rewards, groups = torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0]), torch.tensor([0, 3, 5], dtype=torch.int32)
        >>> mean, std = po.segment_sum(rewards, groups, average=True), segment_std(rewards, groups)
        >>> mean, std
        (tensor([2., 5.]), tensor([1., 0.]))
        >>> (rewards - segment_broadcast(mean, groups)) / (segment_broadcast(std, groups) + 1e-6)
        tensor([-1.0000,  0.0000,  1.0000,  0.0000,  0.0000])

    Raises:
        ValueError: values or a mask of another shape or dtype, cu_seqlens that are none or end past the values, a
            correction below 0.
    """
    cu_seqlens = _documents(cu_seqlens)
    _check_row("values", values)
    if not values.is_floating_point():
        raise ValueError(f"values: expected a floating dtype, got {_dtype_name(values.dtype)}")
    if not isinstance(correction, Real) or not correction >= 0:
        raise ValueError(f"correction: expected a number of at least 0, got {correction!r}")
    total = values.numel()
    # Of slots after the documents too: a NaN there would be one in the gradient.
    left_out = segment_broadcast(values.new_ones(cu_seqlens.numel() - 1), cu_seqlens, total) == 0
    if mask is not None:
        left_out = left_out | _left_out(mask, values)
    flat = values.reshape(-1).double().masked_fill(left_out, 0.0)
    count = _ops.segment_sum((~left_out).double(), cu_seqlens, None, False)
    mean = _ops.segment_sum(flat, cu_seqlens, None, False) / count.clamp_min(1)
    deviations = (flat - segment_broadcast(mean, cu_seqlens, total)).masked_fill(left_out, 0.0)
    few = count <= correction
    squares = _ops.segment_sum(deviations.square(), cu_seqlens, None, False)
    variance = squares / (count - correction).masked_fill(few, 1.0)
    # What rounding leaves of equal values is no spread. A square root has no gradient at 0.
    none = few | (variance <= (1e-14 * mean.detach()).square())
    std = variance.masked_fill(none, 1.0).sqrt().masked_fill(none, 0.0)
    return std if values.dtype == torch.float64 else std.float()


def segment_broadcast(values: torch.Tensor, cu_seqlens: torch.Tensor, total: int | None = None) -> torch.Tensor:
    """One value per document to every slot of the document: the way back from segment_sum. Differentiable.

    Args:
        values: ``[num_documents, ...]``, any dtype.
        cu_seqlens: int32 or int64 ``[num_documents + 1]``.
        total: slots of the row; without it ``cu_seqlens[-1]``, which synchronises on CUDA.

    Returns:
        ``[total, ...]`` of the same dtype: slot t holds the value of the document of t, zeros (False) in the padding
        after the last one. Any derivative; the gradient of a document is the sum over its slots, in an order that
        depends on its own length alone.

    Example:
        >>> cu_seqlens = torch.tensor([0, 2, 3], dtype=torch.int32)
        >>> segment_broadcast(torch.tensor([0.5, -1.0]), cu_seqlens, total=4)
        tensor([ 0.5000,  0.5000, -1.0000,  0.0000])
        >>> segment_broadcast(torch.tensor([True, False]), cu_seqlens)  # documents to keep, as a mask of tokens
        tensor([ True,  True, False])

    Raises:
        ValueError: not one value per document, cu_seqlens that are none or end past ``total``, ``[total, ...]`` of
            2**31 elements or more.
    """
    cu_seqlens = _documents(cu_seqlens)
    num_documents = cu_seqlens.numel() - 1
    if not isinstance(values, torch.Tensor) or values.dim() == 0 or values.shape[0] != num_documents:
        raise ValueError(
            f"values: expected [num_documents={num_documents}, ...] like cu_seqlens, got {_described(values)}"
        )
    if not isinstance(total, int):
        total = int(cu_seqlens[-1]) if total is None else integer(total, "total")
    features = values.shape[1:].numel()
    if not values.is_floating_point() or not features:
        padded = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
        return padded.index_select(0, seq_idx_from_cu_seqlens(cu_seqlens, total))
    sums = values if values.dtype == torch.float64 else values.float()  # what segment_sum would have given
    if values.dim() == 1:
        return _ops.segment_sum_backward(sums, cu_seqlens, None, False, total, values.dtype)
    # Features become rows, laid end to end; what pads a row is a document of zeros.
    padded = torch.cat([sums, sums.new_zeros(1, *values.shape[1:])]).reshape(num_documents + 1, features)
    rows = _rows(cu_seqlens, total, features)
    slots = _ops.segment_sum_backward(padded.T.reshape(-1), rows, None, False, features * total, values.dtype)
    return slots.view(features, total).T.reshape(total, *values.shape[1:])


def _rows(cu_seqlens: torch.Tensor, total: int, count: int) -> torch.Tensor:
    """int32: the documents of a row and the padding after them, ``count`` times, one row after another."""
    if count * total >= 2**31:
        raise ValueError(f"values: expected fewer than 2**31 elements in [total, ...], got {total} x {count}")
    ends = torch.nn.functional.pad(cu_seqlens[1:], (0, 1), value=total)
    starts = torch.arange(count, dtype=torch.int32, device=cu_seqlens.device) * total
    return torch.cat([cu_seqlens[:1], (starts[:, None] + ends).reshape(-1)])


def _documents(cu_seqlens: torch.Tensor) -> torch.Tensor:
    check_cu_seqlens(cu_seqlens)
    return cu_seqlens.to(torch.int32)


def _check_row(name: str, values: torch.Tensor) -> None:
    if not isinstance(values, torch.Tensor) or not (values.dim() == 1 or (values.dim() == 2 and values.shape[0] == 1)):
        raise ValueError(f"{name}: expected [total] or [1, total], got {_described(values)}")


def _left_out(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """bool ``[total]``"""
    if not isinstance(mask, torch.Tensor) or mask.numel() != values.numel() or mask.device != values.device:
        wanted = f"{values.numel()} elements on {values.device} like values"
        raise ValueError(f"mask: expected {wanted}, got {_described(mask)}")
    return mask.reshape(-1) == 0


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"{_dtype_name(value.dtype)} {list(value.shape)} on {value.device}"
    return f"{value!r} ({type(value).__name__})"
