"""flash_attn.layers.rotary: rotary embedding of one tensor, under flash-attn's name."""

import torch

from packing_ops import apply_rotary_qk, position_ids_from_cu_seqlens, seq_idx_from_cu_seqlens

__all__ = ["apply_rotary", "apply_rotary_emb", "apply_rotary_emb_func"]


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Rotate the first ``2 * cos.shape[1]`` elements of every head by the angle of its token. Differentiable in x.

    Args:
        x: ``[batch, seqlen, num_heads, head_dim]``, or with cu_seqlens ``[total, num_heads, head_dim]``.
        cos, sin: ``[seqlen_rotary, rotary_dim / 2]``; row p is position p.
        interleaved: pairs are elements 2i and 2i + 1 instead of i and i + rotary_dim / 2.
        inplace: write into x, which is also returned. Where x needs a gradient, one copy more, and not a leaf.
        seqlen_offsets: an int, or int32 or int64 ``[batch]``: position of the first token of each sequence.
        cu_seqlens: int32 ``[batch + 1]``, sequences of a packed x; rows past the last one count from 0.
        max_seqlen: not needed.

    Returns:
        Like x. Computed in float32 (float64 for float64). No synchronisation.

    Example:
        >>> angle = torch.tensor([[0.0], [torch.pi / 2]])
        >>> apply_rotary_emb(torch.ones(1, 2, 1, 2), angle.cos(), angle.sin()).round().tolist()
        [[[[1.0, 1.0]], [[-1.0, 1.0]]]]

    Raises:
        ValueError: shapes that do not fit; a position outside of cos.
    """
    if cos.dim() != 2:
        raise ValueError(f"cos: expected [seqlen_rotary, rotary_dim / 2], got {list(cos.shape)}")
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    if positions is None:
        cos, sin = _rows("cos", cos, x, seqlen_offsets), _rows("sin", sin, x, seqlen_offsets)
    # interleaved: tables of rotary_dim / 2 entries have one per pair in both layouts.
    options = {"interleaved": interleaved, "unsqueeze_dim": 2, "rotary_dim": 2 * cos.shape[-1]}
    in_op = inplace and not (torch.is_grad_enabled() and x.requires_grad)
    out = apply_rotary_qk(x, None, cos, sin, positions, **options, inplace=in_op)[0]
    return x.copy_(out) if inplace and not in_op else out


apply_rotary_emb_func = apply_rotary_emb  # flash-attn's older name


def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:
    """Compute flash_attn.ops.triton.rotary.apply_rotary: apply_rotary_emb, or its inverse with ``conjugate``.

    Example:
        >>> x, angle = torch.ones(1, 2, 1, 2), torch.tensor([[0.0], [1.0]])
        >>> rotated = apply_rotary(x, angle.cos(), angle.sin())
        >>> apply_rotary(rotated, angle.cos(), angle.sin(), conjugate=True).allclose(x)
        True

    Raises:
        ValueError: as apply_rotary_emb.
    """
    sin = -sin if conjugate else sin
    return apply_rotary_emb(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)


def _positions(x, seqlen_offsets, cu_seqlens) -> torch.Tensor | None:
    """Return int64 rows of the tables, or None if they are consecutive rows for all sequences."""
    dims = 4 if cu_seqlens is None else 3
    if x.dim() != dims:
        wanted = "[batch, seqlen, num_heads, head_dim]" if dims == 4 else "[total, num_heads, head_dim] with cu_seqlens"
        raise ValueError(f"x: expected {wanted}, got {list(x.shape)}")
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    per_sequence = isinstance(seqlen_offsets, torch.Tensor)
    if per_sequence and seqlen_offsets.shape != (batch,):
        raise ValueError(f"seqlen_offsets: expected an int or [batch={batch}], got {list(seqlen_offsets.shape)}")
    if cu_seqlens is None:
        return torch.arange(x.shape[1], device=x.device) + seqlen_offsets[:, None] if per_sequence else None
    positions = position_ids_from_cu_seqlens(cu_seqlens, x.shape[0])
    if per_sequence:
        after_the_last = seqlen_offsets.new_zeros(1)
        seqlen_offsets = torch.cat([seqlen_offsets, after_the_last])[seq_idx_from_cu_seqlens(cu_seqlens, x.shape[0])]
    return positions + seqlen_offsets


def _rows(name, table, x, offset) -> torch.Tensor:
    if not 0 <= offset <= table.shape[0] - x.shape[1]:
        raise ValueError(
            f"{name}: expected rows for positions {offset} to {offset + x.shape[1] - 1}, got {list(table.shape)}"
        )
    return table[offset : offset + x.shape[1]]
