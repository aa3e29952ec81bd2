"""python benchmarks/bench_pages.py [--device cpu|cuda]: varlen_attention over keys in pages.

Beside it the same call over keys end to end, torch's FlashAttention-2 over the same pages (torch.nn.attention.varlen,
where it has block_table) and torch's SDPA over dense keys, all of one length. Of decoding the bytes are those of K and
V, read once.
"""

import inspect

import torch
import torch.nn.functional as F
from harness import Case, run

import packing_ops as po

PAGE = 256


def paged_keys(batch, length, heads, dim, device, dtype):
    """Dense k and v [batch, length, heads, dim], the same in pages in any order, and their block_table."""
    k, v = (torch.randn(batch, length, heads, dim, device=device).to(dtype) for _ in range(2))
    pages = -(-length // PAGE)
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0)).to(device)
    table = torch.empty(batch * pages, dtype=torch.int64, device=device)
    table[order] = torch.arange(batch * pages, device=device)
    in_pages = []
    for dense in (k, v):
        padded = F.pad(dense, (0, 0, 0, 0, 0, pages * PAGE - length))
        in_pages.append(padded.view(batch * pages, PAGE, heads, dim)[order])
    return k, v, *in_pages, table.view(batch, pages).int()


def torch_varlen():
    """torch's varlen_attn where it takes a block_table, else None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "block_table" in inspect.signature(varlen_attn).parameters else None


def case(op, batch, queries, length, heads, dim, device, dtype, runs=21):
    """``queries`` of each of ``batch`` sequences that have ``length`` keys."""
    q = torch.randn(batch * queries, heads[0], dim, device=device).to(dtype)
    k, v, k_pages, v_pages, table = paged_keys(batch, length, heads[1], dim, device, dtype)
    cu_q = torch.arange(batch + 1, dtype=torch.int32, device=device) * queries
    cu_k = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    used = torch.full((batch,), length, dtype=torch.int32, device=device)
    flat_k, flat_v, dense_q = k.flatten(0, 1), v.flatten(0, 1), q.view(batch, queries, *q.shape[1:])

    def paged():
        return po.varlen_attention(q, k_pages, v_pages, cu_q, block_table=table, seqused_k=used)

    def contiguous():
        return po.varlen_attention(q, flat_k, flat_v, cu_q, cu_k)

    def sdpa():
        rows = (t.transpose(1, 2) for t in (dense_q, k, v))
        return F.scaled_dot_product_attention(*rows, is_causal=queries == length, enable_gqa=True)

    def flash():
        options = {"window_size": (-1, 0), "enable_gqa": True, "seqused_k": used, "block_table": table}
        return torch_varlen()(q, k_pages, v_pages, cu_q, cu_k, queries, length, **options)

    calls = {"packing_ops": paged, "packing_ops, keys end to end": contiguous}
    if device == "cuda" and torch_varlen():
        calls["torch FlashAttention-2, pages"] = flash
    if queries in (1, length):
        calls["torch SDPA, dense keys"] = sdpa
    expected = contiguous().float()
    if not torch.equal(paged().float(), expected):
        raise ValueError("results of pages are not those of keys end to end")
    shape = f"batch={batch} queries={queries} keys={length} heads={heads[0]}/{heads[1]} D={dim} pages of {PAGE}"
    size = 2 * k.numel() * k.element_size() if queries == 1 else 0
    name = str(dtype).removeprefix("torch.")
    return Case(op, shape, name, {n: torch.no_grad()(call) for n, call in calls.items()}, bytes=size, runs=runs)


def cases(device):
    if device == "cuda":
        for heads, dim in (((32, 8), 128), ((32, 8), 64), ((16, 4), 256)):
            yield case("prefill", 64, 1024, 1024, heads, dim, device, torch.bfloat16)
            yield case("decode", 256, 1, 4096, heads, dim, device, torch.bfloat16)
        yield case("decode", 64, 1, 4096, (32, 8), 128, device, torch.bfloat16)
        yield case("chunk", 64, 128, 4096, (32, 8), 128, device, torch.bfloat16)
        return
    for dtype in (torch.float32, torch.bfloat16):
        yield case("prefill", 4, 256, 256, (8, 2), 64, device, dtype)
        yield case("decode", 16, 1, 1024, (8, 2), 64, device, dtype)
    yield case("chunk", 4, 32, 1024, (8, 2), 64, device, torch.float32)


if __name__ == "__main__":
    run("pages", cases)
