"""What attn_implementation="packing_ops" costs the host in every layer, beside the attention that it calls."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from harness import time_cpu

import packing_ops as po
from packing_ops.integrations.transformers.attention import packing_ops_attention
from packing_ops.integrations.transformers.masks import MaskPattern

LENGTHS, HEADS, HEAD_DIM = [9, 4, 11], (4, 2, 2), 16  # so small that little but the host's time is left
INNER, RUNS = 50, 41  # calls in a row, few enough that a GPU's queue never fills


def pair(kind: str, device: str) -> tuple[Callable, Callable]:
    """(the interface as a layer of a model calls it, varlen_attention on the packed rows), both as in training."""
    metadata = po.PackedMetadata.from_lengths(LENGTHS, device=device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = [torch.randn(metadata.total, n, HEAD_DIM, device=device, dtype=dtype, requires_grad=True) for n in HEADS]
    heads_first = [row.detach()[None].transpose(1, 2).requires_grad_() for row in rows]
    position_ids = metadata.position_ids[None]
    explicit = metadata.to_transformers() if kind == "cu_seq_lens" else {}
    pattern = MaskPattern(True, (-1, -1), metadata.total, None, position_ids)  # one per forward of the model
    options = {"dropout": 0.0, "scaling": HEAD_DIM**-0.5, "sliding_window": None, "position_ids": position_ids}
    module, cu_seqlens = SimpleNamespace(is_causal=True), metadata.cu_seqlens

    def adapter():
        return packing_ops_attention(module, *heads_first, pattern, **options, **explicit)

    def bare():
        return po.varlen_attention(*rows, cu_seqlens, softmax_scale=HEAD_DIM**-0.5)

    return adapter, bare


def overhead_us(kind: str, device: str) -> float:
    """The interface's host time less that of varlen_attention, in microseconds; documents told by ``kind``.

    Of each the fastest of its runs, which other processes disturbed least. The layout is found before.
    """
    calls = pair(kind, device)
    samples = ([], [])
    for _ in range(RUNS):
        for call, taken in zip(calls, samples, strict=True):
            call()
            taken.append(time_cpu(call, INNER))
            if device == "cuda":
                torch.cuda.synchronize()
    adapter, bare = map(min, samples)
    return adapter - bare
