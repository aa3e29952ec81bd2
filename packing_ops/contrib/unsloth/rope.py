"""Unsloth's rotation of queries and keys by apply_rotary_qk."""

from typing import Any

import torch

from packing_ops import apply_rotary_qk


def fast_rope_embedding(
    Q: torch.Tensor,
    K: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rope_embedding_indices: torch.Tensor | None = None,
    *,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate as unsloth.kernels.fast_rope_embedding, under its name and with its arguments. Differentiable.

    Args:
        Q: ``[batch, num_heads, seqlen, head_dim]``, any strides with a contiguous last dimension.
        K: as Q, but the number of heads may differ.
        cos, sin: cache ``[max_positions, head_dim or head_dim / 2]``; dimensions of 1 in front are dropped.
        rope_embedding_indices: int32 or int64 positions, ``[batch, seqlen]`` or anything with as many elements, or
            ``[seqlen]`` for all rows of the batch. Without them token s of each row is at s.
        inplace: write into Q and K, as Unsloth does; gradients work. Where something before saved one of them for its
            backward, backward raises torch's error of a tensor that was modified in place.

    Returns:
        (Q, K) rotated: new tensors, or with ``inplace`` in the memory of the arguments. Computed in float32. Half-split
        pairs.

    Example:
        >>> Q, K, angles = torch.ones(1, 4, 3, 2), torch.ones(1, 2, 3, 2), torch.arange(8.0)[:, None]
        >>> Q, K = fast_rope_embedding(Q, K, angles.cos(), angles.sin(), torch.tensor([[0, 1, 0]]))
        >>> K[0, 0]
        tensor([[ 1.0000,  1.0000],
                [-0.3012,  1.3818],
                [ 1.0000,  1.0000]])

    Raises:
        ValueError: shapes that do not fit; a position outside of cos.

    Determinism: as apply_rotary_qk.
    Synchronises: never.
    Memory: the results; with ``inplace`` nothing.
    Gradients: of Q and K.
    """
    if Q.dim() != 4:
        raise ValueError(f"Q: expected [batch, num_heads, seqlen, head_dim], got {list(Q.shape)}")
    batch, seqlen = Q.shape[0], Q.shape[2]
    cos, sin = _cache("cos", cos), _cache("sin", sin)
    if rope_embedding_indices is None:
        if seqlen > cos.shape[0]:
            raise ValueError(f"cos: expected rows for {seqlen} positions, got {list(cos.shape)}")
        cos, sin, positions = cos[:seqlen], sin[:seqlen], None
    else:
        positions = rope_embedding_indices.to(Q.device)
        if positions.numel() not in (batch * seqlen, seqlen):
            raise ValueError(
                f"rope_embedding_indices: expected [batch={batch}, seqlen={seqlen}], got {list(positions.shape)}"
            )
        positions = positions.reshape((batch, seqlen) if positions.numel() == batch * seqlen else (seqlen,))
    return (_InPlace.apply if inplace else apply_rotary_qk)(Q, K, cos, sin, positions)


class _InPlace(torch.autograd.Function):
    """Q and K in separate memory. Their gradients are rotated into new tensors: they may belong to others."""

    @staticmethod
    def forward(
        ctx: Any, Q: torch.Tensor, K: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin, positions)
        return apply_rotary_qk(Q, K, cos, sin, positions, inplace=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin, positions = ctx.saved_tensors
        grad_Q, grad_K = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        return *apply_rotary_qk(grad_Q, grad_K, cos, -sin, positions), None, None, None


def _cache(name: str, table: torch.Tensor) -> torch.Tensor:
    if table.dim() < 2 or any(size != 1 for size in table.shape[:-2]):
        raise ValueError(f"{name}: expected [max_positions, head_dim or head_dim / 2], got {list(table.shape)}")
    return table.reshape(table.shape[-2:])
