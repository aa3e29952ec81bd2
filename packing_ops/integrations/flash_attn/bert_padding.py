"""flash_attn.bert_padding: padding out of a batch and back, under flash-attn's names."""

import math
import re

import torch

import packing_ops
from packing_ops import unpad_input
from packing_ops._arguments import described

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "rearrange", "unpad_input"]


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """packing_ops.pad_input; indices may be int32 too, as transformers passes them when it decodes.

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
    """``input[indices]``. Differentiable; a row that is taken twice gets both gradients.

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
    """Zeros ``[first_axis_dim, ...]`` with ``out[indices] = values``. Differentiable.

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


def rearrange(tensor: torch.Tensor, pattern: str, **axes_lengths: int) -> torch.Tensor:
    """einops' rearrange for one tensor, so that ``from flash_attn.bert_padding import rearrange`` needs no einops.

    Args:
        tensor: any.
        pattern: ``"left -> right"`` with the same names on both sides, parentheses for joined axes, ``...`` for any
            number of axes (not inside parentheses on the left).
        axes_lengths: sizes of names inside parentheses on the left; one per pair of parentheses may be left out.

    Returns:
        The tensor permuted and reshaped; a view where it can be. Differentiable.

    Example:
        >>> rearrange(torch.zeros(2, 3, 5), "b s ... -> (b s) ...").shape
        torch.Size([6, 5])

    Raises:
        ValueError: a pattern that does not fit the tensor or uses more of einops than this; the message has it.
    """
    left, right = _sides(pattern)
    names = [name for group in left for name in group]
    if sorted(names) != sorted(name for group in right for name in group) or len(set(names)) != len(names):
        raise ValueError(f"pattern: expected the same names once on both sides, got {pattern!r}")
    dims = tensor.dim() - len(left) + 1  # of "..."
    if dims < 0 or (["..."] not in left and dims != 1):
        raise ValueError(f"tensor: expected the dimensions of {pattern!r}, got {list(tensor.shape)}")
    sizes, shape = {}, list(tensor.shape)
    for group in left:
        if group == ["..."]:
            sizes["..."] = [shape.pop(0) for _ in range(dims)]
        else:
            sizes.update(_split(group, shape.pop(0), axes_lengths, pattern))
    start, place = 0, {}
    for name in names:
        place[name] = list(range(start, start + len(sizes[name])))
        start += len(sizes[name])
    order = [dim for group in right for name in group for dim in place[name]]
    apart = tensor.reshape([size for name in names for size in sizes[name]]).permute(order)
    joined = [
        sizes["..."] if group == ["..."] else [math.prod([s for n in group for s in sizes[n]])] for group in right
    ]
    return apart.reshape([size for group in joined for size in group])


@torch.compiler.assume_constant_result  # regular expressions are not traced by every torch
def _sides(pattern: str) -> list[list[list[str]]]:
    """Both sides of a pattern as groups of names."""
    sides = pattern.split("->")
    atom = r"\(\s*[^()]*\)|\.\.\.|[a-zA-Z_]\w*"
    if len(sides) != 2 or any(re.sub(atom, "", side).strip() for side in sides):
        raise ValueError(f"pattern: expected 'names -> names' with parentheses and '...', got {pattern!r}")
    groups = [[atom.strip("()").split() for atom in re.findall(atom, side)] for side in sides]
    if any("..." in group and len(group) > 1 for group in groups[0]):
        raise ValueError(f"pattern: expected '...' outside of parentheses on the left, got {pattern!r}")
    return groups


def _split(group: list[str], size: int, given: dict[str, int], pattern: str) -> dict[str, list[int]]:
    """Sizes of the names that one dimension is made of."""
    unknown = [name for name in group if name not in given]
    known = math.prod([given[name] for name in group if name in given])
    if len(unknown) > 1 or (unknown and (known == 0 or size % known)) or (not unknown and known != size):
        raise ValueError(f"axes_lengths: expected lengths of {group} that make {size} for {pattern!r}, got {given}")
    return {name: [given.get(name, size // max(known, 1))] for name in group}


def _int64(indices: torch.Tensor) -> torch.Tensor:
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"indices: expected int32 or int64 [total], got {described(indices)}")
    return indices.long()
