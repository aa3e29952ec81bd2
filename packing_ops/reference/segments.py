"""Oracles of packing_ops.segments, beside those of boundaries."""

import torch

from packing_ops.reference.boundaries import documents


def segment_std(values, cu_seqlens, mask=None, correction=1):
    flat = values.reshape(-1)
    keep = torch.ones_like(flat, dtype=torch.bool) if mask is None else mask.reshape(-1) != 0
    found = [flat[start:end][keep[start:end]] for start, end in documents(cu_seqlens)]
    stds = [kept.std(correction=correction) if kept.numel() > correction else flat.new_zeros(()) for kept in found]
    return torch.stack(stds) if stds else flat.new_zeros(0)


def segment_broadcast(values, cu_seqlens, total):
    out = values.new_zeros(total, *values.shape[1:])
    for value, (start, end) in zip(values, documents(cu_seqlens), strict=True):
        out[start:end] = value
    return out
