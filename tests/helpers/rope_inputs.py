"""Inputs of the rope tests: heads in every layout, tables."""

import torch

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LAYOUTS = ["heads_first", "heads_first_view", "tokens_first", "fused", "packed"]


def heads(layout, batch, seqlen, num_heads, head_dim, *, device="cpu", dtype=torch.float32):
    """Random heads in one of the layouts that callers have."""
    if layout == "packed":
        return torch.randn(batch * seqlen, num_heads, head_dim, device=device).to(dtype)
    if layout == "heads_first":
        return torch.randn(batch, num_heads, seqlen, head_dim, device=device).to(dtype)
    if layout == "fused":  # a slice of the qkv projection
        return torch.randn(batch, seqlen, num_heads + 3, head_dim, device=device).to(dtype)[:, :, 1 : num_heads + 1]
    x = torch.randn(batch, seqlen, num_heads, head_dim, device=device).to(dtype)
    return x.transpose(1, 2) if layout == "heads_first_view" else x


def dim_of_heads(layout):
    return 1 if layout.startswith("heads_first") else 2


def tables(max_positions, entries, *, device="cpu", dtype=torch.float32):
    """Random caches: in a full one the two entries of a pair differ."""
    return [torch.randn(max_positions, entries, device=device).to(dtype) for _ in range(2)]
