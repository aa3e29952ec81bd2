"""flash_attn.bert_padding: padding out of a batch and back, under flash-attn's names."""

from typing import Any

import torch

import packing_ops
from packing_ops import unpad_input
from packing_ops._runtime.arguments import described

try:
    from einops import rearrange  # flash-attn needs einops, and its bert_padding shows this name
except ModuleNotFoundError:

    def rearrange(*args: Any, **kwargs: Any) -> Any:
        """Call einops.rearrange. Hosts import this name with the others; only a call needs einops.

        Raises:
            ImportError: always, and names einops.
        """
        raise ImportError("rearrange: expected einops to be installed, got none: pip install einops")


__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "rearrange", "unpad_input"]


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Call packing_ops.pad_input; indices may be int32 too, as transformers passes them when it decodes.

    Args:
        hidden_states: ``[total, ...]``.
        indices: int32 or int64 ``[total]``, strictly increasing below ``batch * seqlen``.

    Returns:
        ``[batch, seqlen, ...]``, zeros where no index points. Differentiable.

    Example:
        >>> pad_input(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 4]), 2, 3).tolist()
        [[1.0, 2.0, 0.0], [0.0, 3.0, 0.0]]

    Raises:
        ValueError: as packing_ops.pad_input.
    """
    return packing_ops.pad_input(hidden_states, _int64(indices), batch, seqlen)


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return ``input[indices]``. Differentiable; a row that is taken twice gets both gradients.

    Args:
        input: ``[rows, ...]``, any dtype.
        indices: int32 or int64 ``[total]``, any order, 0 to rows - 1.

    Returns:
        ``[total, ...]``, a new tensor.

    Example:
        >>> index_first_axis(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0])).tolist()
        [[3.0], [1.0]]

    Raises:
        ValueError: indices that are not one row of integers. IndexError: one outside of input (CUDA: an assertion).
    """
    return input.index_select(0, _int64(indices))


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """Return zeros ``[first_axis_dim, ...]`` with ``out[indices] = values``. Differentiable.

    Args:
        values: ``[total, ...]``, any dtype.
        indices: int32 or int64 ``[total]``, any order, each at most once, 0 to first_axis_dim - 1.
        first_axis_dim: rows of the result.

    Returns:
        ``[first_axis_dim, ...]``, a new tensor.

    Example:
        >>> index_put_first_axis(torch.tensor([[1.0], [2.0]]), torch.tensor([2, 0]), 3).tolist()
        [[2.0], [0.0], [1.0]]

    Raises:
        ValueError: indices that are not one per row of values. IndexError: one past the result (CUDA: an assertion).
    """
    indices = _int64(indices)
    if indices.shape[0] != values.shape[0]:
        raise ValueError(f"indices: expected one per row of values = {values.shape[0]}, got {indices.shape[0]}")
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def _int64(indices: torch.Tensor) -> torch.Tensor:
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"indices: expected int32 or int64 [total], got {described(indices)}")
    return indices.long()
