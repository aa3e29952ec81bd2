"""Oracle of packing_ops.rope: every pair by its formula, gradients by torch's autograd."""

from collections.abc import Sequence

import torch


def rotary_tables(
    max_positions: int,
    rotary_dim: int,
    theta: float = 10_000.0,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin caches ``[max_positions, rotary_dim / 2]``: position times theta ** (-2 i / rotary_dim)."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / max(rotary_dim, 1)
    angles = torch.arange(max_positions, dtype=torch.float64, device=device)[:, None] / theta**exponent
    return angles.cos().to(dtype), angles.sin().to(dtype)


def full_table(table: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Return ``[..., rotary_dim / 2]`` as an entry per element: transformers' cat, or repeated for interleaved
    pairs.
    """
    return table.repeat_interleave(2, -1) if interleaved else torch.cat([table, table], -1)


def pick_sections(table: torch.Tensor, sections: Sequence[int]) -> torch.Tensor:
    """Return ``[..., entries]`` of ``[rows, ..., entries]``: chunk i of each run of pairs is from row ``i % rows``."""
    half = sum(sections)
    runs = table.split(half, -1)  # one run of pairs, or two in a half-split full table
    chunks = [c[i % table.shape[0]] for run in runs for i, c in enumerate(run.split(list(sections), -1))]
    return torch.cat(chunks, -1)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def rotate_interleaved(x: torch.Tensor) -> torch.Tensor:
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack([-second, first], -1).flatten(-2)


def transformers_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate by the formula of transformers' models, in the dtypes given: full tables ``[batch, seqlen,
    rotary_dim]``.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def apply_rotary_qk(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    unsqueeze_dim: int = 1,
    sections: Sequence[int] | None = None,
    rotary_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    width = cos.shape[-1]
    if rotary_dim is None:
        rotary_dim = q.shape[-1] if 2 * width == q.shape[-1] else width
    # [total, heads, head_dim] has its heads after the tokens, as has unsqueeze_dim=2.
    heads = -2 if q.dim() == 3 or unsqueeze_dim == 2 else -3

    def per_head(table: torch.Tensor) -> torch.Tensor:
        if position_ids is not None:
            table = table[position_ids.long()]
        if sections is not None:
            entries = 2 if interleaved and width == rotary_dim else 1
            table = pick_sections(table, [entries * pairs for pairs in sections])
        if width != rotary_dim:
            table = full_table(table, interleaved)
        return table.unsqueeze(heads)

    cos, sin = per_head(cos), per_head(sin)
    rotate = rotate_interleaved if interleaved else rotate_half

    def rotated(x: torch.Tensor) -> torch.Tensor:
        turning, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        turned = (turning * cos + rotate(turning) * sin).reshape(turning.shape)
        return torch.cat([turned, rest], -1)

    return rotated(q), None if k is None else rotated(k)
