"""Keys in pages on a GPU: plans of a decoding step, graphs whose lengths and pages change, what is found on the GPU."""

import contextlib

import pytest
import torch
from helpers import assert_same, captured, cu_seqlens_of
from helpers.attention_case import Case
from helpers.pages_case import Pages, paged_case

import packing_ops as po
from packing_ops._runtime import batch_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SIZES = {"heads": (8, 2), "dim": 128, "dtype": torch.bfloat16, "device": "cuda"}


def paged(case, pages, **others):
    return po.varlen_attention(case.q, pages.k, pages.v, case.cu_seqlens[0], **pages.keywords(), **others)


def contiguous(case):
    return po.varlen_attention(case.q, case.k, case.v, *case.cu_seqlens)


def test_layers_of_a_step_share_a_plan(monkeypatch):
    monkeypatch.setenv("PACKING_OPS_CHECK", "0")
    case, pages = paged_case([(1, 300), (1, 20)], **SIZES)
    made = []
    plan_op = batch_cache.gate.paged_attention_plan
    monkeypatch.setattr(
        "packing_ops._runtime.gate.paged_attention_plan", lambda *args: made.append(1) or plan_op(*args)
    )
    for _ in range(3):
        assert_same(paged(case, pages), contiguous(case))
    assert len(made) == 1
    pages.seqused_k -= 1  # a step
    for _ in range(3):
        paged(case, pages)
    assert len(made) == 2


def test_a_graph_replays_with_other_lengths_and_pages():
    most, heads = [700, 300, 513], SIZES["heads"]
    case = Case([1, 1, 1], most, **SIZES)
    pages = Pages(case)
    table, used = pages.block_table.clone(), pages.seqused_k.clone()
    k, v, q = pages.k.clone(), pages.v.clone(), case.q.clone()

    def step():
        return po.varlen_attention(q, k, v, case.cu_seqlens[0], block_table=table, seqused_k=used)

    graph, replayed = captured(step)
    for lengths in (most, [1, 128, 129], [0, 300, 512], [640, 1, 0]):
        other = Case([1, 1, 1], lengths, **SIZES)
        given = Pages(other, spare_pages=k.shape[0] - sum(-(-n // 128) for n in lengths))
        table.fill_(-1)
        width = min(table.shape[1], given.block_table.shape[1])
        table[:, :width] = given.block_table[:, :width]
        for static, values in ((used, given.seqused_k), (k, given.k), (v, given.v), (q, other.q)):
            static.copy_(values)
        graph.replay()
        assert_same(replayed, contiguous(other))
    assert replayed.shape == (3, heads[0], SIZES["dim"])


def test_a_wrong_page_is_raised_in_the_next_call(monkeypatch):
    monkeypatch.setenv("PACKING_OPS_CHECK", "0")
    case, pages = paged_case([(1, 300), (3, 200)], **SIZES)
    expected = contiguous(case)
    right = pages.block_table.clone()
    for page in (-1, len(pages.k), 2**31 - 1, -(2**31)):
        pages.block_table[1, 0] = page
        out = paged(case, pages)
        torch.cuda.synchronize()
        assert_same(out[:1], expected[:1])  # the other document
        with pytest.raises(ValueError, match=r"block_table: expected pages of k .* wrong value at index 1"):
            paged(case, pages)
        pages.block_table.copy_(right)
        torch.cuda.synchronize()
        assert_same(paged(case, pages), expected)


def test_wrong_lengths_give_zeros_and_an_error(monkeypatch):
    monkeypatch.setenv("PACKING_OPS_CHECK", "0")
    case, pages = paged_case([(1, 300), (3, 200)], **SIZES)
    right = pages.seqused_k.clone()
    for keys in (-1, 513, 2**31 - 1):
        pages.seqused_k[0] = keys
        sizes = {"total_q": 4, "total_k": 512, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
        plan = po.attention_plan(case.cu_seqlens[0], seqused_k=pages.seqused_k, **sizes)
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match=r"seqused_k: expected 0 up to the keys .* wrong value at index 0"):
            paged(case, pages, plan=plan)
        out = paged(case, pages, plan=plan)
        torch.cuda.synchronize()
        assert not out.any()
        pages.seqused_k.copy_(right)
        with contextlib.suppress(ValueError):  # what the kernel saw
            paged(case, pages)
        assert_same(paged(case, pages), contiguous(case))


def test_a_plan_of_other_lengths_is_an_error():
    case, pages = paged_case([(1, 300), (3, 200)], **SIZES)
    sizes = {"total_q": 4, "total_k": 512, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    plan = po.attention_plan(case.cu_seqlens[0], seqused_k=pages.seqused_k, **sizes)
    assert_same(paged(case, pages, plan=plan), contiguous(case))
    pages.seqused_k[0] -= 1
    with pytest.raises(ValueError, match="plan: expected one made for these cu_seqlens and seqused_k"):
        paged(case, pages, plan=plan)
    with pytest.raises(ValueError, match="plan: expected what attention_plan made"):
        paged(case, pages, plan=po.attention_plan(cu_seqlens_of([1, 3], "cuda"), **{**sizes, "total_k": 4}))


def test_kvcache_grows_in_a_graph():
    """A step of flash_attn_with_kvcache, replayed: keys are written and lengths counted in the graph."""
    heads, kv_heads, dim = 8, 2, 64
    k, v = torch.randn(2, 2, 200, kv_heads, dim, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(2, 200, heads, dim, dtype=torch.bfloat16, device="cuda")
    expected = po.flash_attn_func(q, k, v, causal=True)
    caches = torch.full((2, 2, 256, kv_heads, dim), torch.nan, dtype=torch.bfloat16, device="cuda")
    step = [t[:, :1].clone() for t in (q, k, v)]
    lengths = torch.zeros(2, dtype=torch.int32, device="cuda")

    def decode():
        out = po.flash_attn_with_kvcache(step[0], *caches, *step[1:], cache_seqlens=lengths, causal=True)
        lengths.add_(1)
        return out

    graph, replayed = captured(decode)
    lengths.zero_()
    for i in range(200):
        for static, values in zip(step, (q, k, v), strict=True):
            static.copy_(values[:, i : i + 1])
        graph.replay()
        assert_same(replayed, expected[:, i : i + 1])


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (512, 512)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_pass_for_the_sanitizer(dtype, dims):
    """Pages whose neighbours in memory are not of the tensor; tests/ops/test_attention_pages.py looks at the values."""
    sizes = {"heads": (4, 2), "dim": dims[0], "dim_v": dims[1], "dtype": dtype, "device": "cuda"}
    case, pages = paged_case([(3, 130), (0, 5), (64, 257), (1, 128), (2, 0)], spare_pages=0, tail=2, **sizes)
    assert not paged(case, pages).isnan().any()
