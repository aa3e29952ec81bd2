"""Numbers per document of a packed row: sums and means of what its slots hold, each feature on its own.

cu_seqlens is as in packing_ops.boundaries.
"""

import torch

from packing_ops import _ops
from packing_ops._args import is_set
from packing_ops._autograd import past_autograd, register_autograd


def segment_sum(
    values: torch.Tensor, cu_seqlens: torch.Tensor, mask: torch.Tensor | None = None, average: bool = False
) -> torch.Tensor:
    """Sum of values per document: token log-probs to sequence log-probs, hidden states to one vector. Differentiable.

    Args:
        values: float32, float64, bfloat16 or float16 ``[total, ...]``; each number of a slot is summed on its own. A
            packed row ``[1, total]`` is ``values[0]``.
        cu_seqlens: int32 ``[num_documents + 1]``.
        mask: ``[total]``, bool, integer or floating; slots where it is 0 are left out, whatever they hold.
        average: divide by the number of slots kept, as segment_mean does.

    Returns:
        ``[num_documents, ...]``, float64 for float64 values, else float32; 0 for a document without slots. Slots after
        the last document are in none. No synchronisation. Deterministic: the order of additions depends on the
        document's own length alone, and on whether a slot is one number or several.

    Example:
        >>> segment_sum(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 3], dtype=torch.int32))
        tensor([3., 3.])
        >>> segment_sum(torch.tensor([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0]]), torch.tensor([0, 2, 3])).tolist()
        [[3.0, 11.0], [3.0, 7.0]]

    Raises:
        ValueError: values, a mask or cu_seqlens of another dtype, device or shape; cu_seqlens past the values.
    """
    return _ops.segment_sum(values, cu_seqlens, None if mask is None else is_set(mask, "mask"), average)


def segment_mean(values: torch.Tensor, cu_seqlens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Mean of values per document: the pooling of reward and embedding models. Differentiable.

    Args:
        values, cu_seqlens: as segment_sum.
        mask: as segment_sum; the mean is over the slots that are kept.

    Returns:
        As segment_sum; 0 for a document without slots, or with none kept.

    Example:
        >>> hidden = torch.tensor([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0]])
        >>> segment_mean(hidden, torch.tensor([0, 2, 2, 3], dtype=torch.int32)).tolist()
        [[1.5, 5.5], [0.0, 0.0], [3.0, 7.0]]

    Raises:
        ValueError: as segment_sum.
    """
    return segment_sum(values, cu_seqlens, mask, average=True)


# --- registration: shapes for torch.compile, gradients ---


@torch.library.register_fake("packing_ops::segment_sum")
def _(values, cu_seqlens, mask, average):
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    return values.new_empty((cu_seqlens.numel() - 1, *values.shape[1:]), dtype=dtype)


@torch.library.register_fake("packing_ops::segment_sum_backward")
def _(grad, cu_seqlens, mask, average, total, dtype):
    return grad.new_empty((total, *grad.shape[1:]), dtype=dtype)


def _segment_sum_context(ctx, inputs, output):
    values, cu_seqlens, mask, ctx.average = inputs
    ctx.save_for_backward(cu_seqlens, mask)
    ctx.total, ctx.dtype = values.shape[0], values.dtype


def _segment_sum_backward(ctx, grad):
    cu_seqlens, mask = ctx.saved_tensors
    if grad is not None:
        grad = past_autograd(_ops.segment_sum_backward, grad, cu_seqlens, mask, ctx.average, ctx.total, ctx.dtype)
    return grad, None, None, None


def _segment_sum_backward_context(ctx, inputs, output):
    _, cu_seqlens, mask, ctx.average, _, _ = inputs
    ctx.save_for_backward(cu_seqlens, mask)


def _segment_sum_backward_backward(ctx, grad):
    cu_seqlens, mask = ctx.saved_tensors
    return None if grad is None else _ops.segment_sum(grad, cu_seqlens, mask, ctx.average), *[None] * 5


register_autograd("segment_sum", _segment_sum_backward, setup_context=_segment_sum_context, linear=1)
register_autograd(
    "segment_sum_backward", _segment_sum_backward_backward, setup_context=_segment_sum_backward_context, linear=1
)
