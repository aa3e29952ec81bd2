"""Oracle of packing_ops.rope: every pair by its formula, gradients by torch's autograd."""

import torch


def rotary_tables(max_positions, rotary_dim, theta=10_000.0, *, dtype=torch.float64, device="cpu"):
    """cos and sin caches ``[max_positions, rotary_dim / 2]``: position times theta ** (-2 i / rotary_dim)."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / max(rotary_dim, 1)
    angles = torch.arange(max_positions, dtype=torch.float64, device=device)[:, None] / theta**exponent
    return angles.cos().to(dtype), angles.sin().to(dtype)


def full_table(table, interleaved=False):
    """``[..., rotary_dim / 2]`` as an entry per element: transformers' cat, or repeated for interleaved pairs."""
    return table.repeat_interleave(2, -1) if interleaved else torch.cat([table, table], -1)


def pick_sections(table, sections):
    """``[rows, ..., entries]`` to ``[..., entries]``: chunk i of each run of pairs comes from row ``i % rows``."""
    half = sum(sections)
    runs = table.split(half, -1)  # one run of pairs, or two in a half-split full table
    chunks = [c[i % table.shape[0]] for run in runs for i, c in enumerate(run.split(list(sections), -1))]
    return torch.cat(chunks, -1)


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def rotate_interleaved(x):
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack([-second, first], -1).flatten(-2)


def transformers_rotary(q, k, cos, sin, unsqueeze_dim=1):
    """The formula of transformers' models, in the dtypes given: full tables ``[batch, seqlen, rotary_dim]``."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def apply_rotary_qk(
    q, k, cos, sin, position_ids=None, *, interleaved=False, unsqueeze_dim=1, sections=None, rotary_dim=None
):
    width = cos.shape[-1]
    if rotary_dim is None:
        rotary_dim = q.shape[-1] if 2 * width == q.shape[-1] else width
    # [total, heads, head_dim] has its heads after the tokens, as has unsqueeze_dim=2.
    heads = -2 if q.dim() == 3 or unsqueeze_dim == 2 else -3

    def per_head(table):
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

    def rotated(x):
        turning, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        turned = (turning * cos + rotate(turning) * sin).reshape(turning.shape)
        return torch.cat([turned, rest], -1)

    return rotated(q), None if k is None else rotated(k)
