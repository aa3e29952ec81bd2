"""Attention that bench_attention.py compares ours with on a GPU: of each its forward and its backward, apart."""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

import packing_ops as po

FLASH_2, FLASH_3, FLASH_4, FLEX = (
    "torch FlashAttention-2", "FlashAttention-3", "FlashAttention-4", "FlexAttention",
)  # fmt: skip


class Batch(NamedTuple):
    """Packed documents: q, k, v and dout ``[total, num_heads, head_dim]``, without gradients."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    cu_seqlens: torch.Tensor
    longest: int


class Calls(NamedTuple):
    """forward gives out, or a tuple that begins with it; backward gives dq, dk, dv. ``more``: what is made before."""

    forward: Callable | None
    backward: Callable | None
    more: dict[str, Callable] = {}  # noqa: RUF012 (nobody writes to it)


def by_autograd(attend: Callable, batch: Batch, shape: Callable = lambda t: t) -> Calls:
    """Of a function of q, k, v that autograd differentiates. ``shape``: its rows as ours, and back."""
    rows = [shape(t).detach().requires_grad_() for t in batch[:3]]
    out, dout = attend(*rows), shape(batch.dout)
    return Calls(
        torch.no_grad()(lambda: shape(attend(*rows))),
        lambda: [shape(grad) for grad in torch.autograd.grad(out, rows, dout, retain_graph=True)],
    )


def heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """A view: ``[total, num_heads, head_dim]`` as ``[1, num_heads, total, head_dim]``, and back."""
    return tensor.transpose(0, 1)[None] if tensor.dim() == 3 else tensor[0].transpose(0, 1)


def sdpa_block_mask(q, k, v, mask):
    return heads_first(F.scaled_dot_product_attention(*map(heads_first, (q, k, v)), attn_mask=mask, enable_gqa=True))


def flash_2(batch: Batch) -> Iterator[tuple[str, Calls]]:
    """torch's own, the ops under varlen_attn."""
    q, k, v, dout, cu_seqlens, longest = batch
    options = (cu_seqlens, cu_seqlens, longest, longest, 0.0, True)
    ops = torch.ops.aten
    out, lse, seed, offset, _ = ops._flash_attention_forward(q, k, v, *options, False)
    yield (
        FLASH_2,
        Calls(
            lambda: ops._flash_attention_forward(q, k, v, *options, False),
            lambda: ops._flash_attention_backward(dout, q, k, v, out, lse, *options, seed, offset),
        ),
    )


def by_both_backwards(name: str, attend: Callable, batch: Batch) -> Iterator[tuple[str, Calls]]:
    """Of ``attend(q, k, v, deterministic=)``: also the backward with sums in one order, as ours always has."""
    yield name, by_autograd(lambda *rows: out_of(attend(*rows, deterministic=False)), batch)
    ordered = by_autograd(lambda *rows: out_of(attend(*rows, deterministic=True)), batch)
    yield f"{name}, deterministic", ordered._replace(forward=None)


def out_of(result):
    return result[0] if isinstance(result, tuple) else result


def flash_3(batch: Batch) -> Iterator[tuple[str, Calls]]:
    """Dao-AILab's for Hopper, where it is installed: built from its repository, or its forward as the package
    fa3-fwd.
    """
    documents = (batch.cu_seqlens, batch.cu_seqlens, batch.longest, batch.longest)
    if importlib.util.find_spec("flash_attn_interface") is not None:
        from flash_attn_interface import flash_attn_varlen_func

        attend = functools.partial(flash_attn_varlen_func, causal=True)
        yield from by_both_backwards(FLASH_3, lambda *rows, **options: attend(*rows, *documents, **options), batch)
    elif importlib.util.find_spec("fa3_fwd_interface") is not None:
        from fa3_fwd_interface import flash_attn_varlen_func

        yield FLASH_3, Calls(lambda: out_of(flash_attn_varlen_func(*batch[:3], *documents, causal=True)), None)


def flash_4(batch: Batch) -> Iterator[tuple[str, Calls]]:
    """Dao-AILab's in CuTe DSL, where flash-attn-4 is installed."""
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return
    from flash_attn.cute import flash_attn_varlen_func

    attend = functools.partial(
        flash_attn_varlen_func,
        **{"cu_seqlens_q": batch.cu_seqlens, "cu_seqlens_k": batch.cu_seqlens},
        **{"max_seqlen_q": batch.longest, "max_seqlen_k": batch.longest, "causal": True},
    )
    yield from by_both_backwards(FLASH_4, attend, batch)


def flex(batch: Batch) -> Iterator[tuple[str, Calls]]:
    """Compiled, under a mask of documents that is made before."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    total = len(batch.q)
    document = po.seq_idx_from_cu_seqlens(batch.cu_seqlens, total)

    def sees(b, h, row, key):
        return (document[row] == document[key]) & (row >= key)

    def block_mask():
        return make(sees, None, None, total, total, device=batch.q.device)

    make = torch.compile(create_block_mask)
    attend = torch.compile(flex_attention, fullgraph=True)  # an error where it would run uncompiled
    mask = block_mask()
    calls = by_autograd(lambda q, k, v: attend(q, k, v, block_mask=mask, enable_gqa=True), batch, heads_first)
    yield FLEX, calls._replace(more={f"{FLEX}, its block mask": block_mask})


def sdpa_mask(batch: Batch) -> Iterator[tuple[str, Calls]]:
    """torch's SDPA under the mask of all pairs, which fits short rows only."""
    mask = po.block_causal_mask(batch.cu_seqlens, len(batch.q))
    yield "torch SDPA block mask", by_autograd(lambda *rows: sdpa_block_mask(*rows, mask), batch)
