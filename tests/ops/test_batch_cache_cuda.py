"""What is kept between calls on a GPU: changes that torch does not count are a fault of a later call."""

import gc

import pytest
import torch
from helpers import cu_seqlens_of

import packing_ops as po
from packing_ops._runtime import batch_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def then_another_call(call):
    """The call, which leaves its fault, and one that finds it."""
    call()
    torch.cuda.synchronize()
    po.position_ids_from_cu_seqlens(cu_seqlens_of([1], "cuda"), 1)


@pytest.fixture(autouse=True)
def _faults_of_a_later_call(monkeypatch):
    monkeypatch.setenv("PACKING_OPS_CHECK", "0")
    yield
    torch.cuda.synchronize()


def test_uncounted_writes_are_a_fault_on_cuda():
    values = torch.tensor([1, 2, 3], device="cuda")
    batch_cache.kept_with([values], ("twice",), lambda: values * 2)
    values.data[2] = 5
    batch_cache.kept_with([values], ("twice",), lambda: values * 2)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"values: expected a tensor as it was .* index 2"):
        batch_cache.kept_with([values], ("twice",), lambda: values * 2)
    assert batch_cache.kept_with([values], ("twice",), lambda: values * 2).tolist() == [2, 4, 10]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_plan_of_other_documents_is_a_fault(dtype):
    q = torch.randn(512, 4, 64, device="cuda", dtype=dtype, requires_grad=True)
    cu_seqlens = cu_seqlens_of([256, 256], "cuda")
    po.varlen_attention(q, q, q, cu_seqlens)
    cu_seqlens.data[1] = 100
    po.varlen_attention(q, q, q, cu_seqlens)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"plan: expected one made for these cu_seqlens .* index 1"):
        po.varlen_attention(q, q, q, cu_seqlens)
    again = po.varlen_attention(q, q, q, cu_seqlens)  # what was kept is gone
    torch.testing.assert_close(again, po.varlen_attention(q, q, q, cu_seqlens.clone()), rtol=0, atol=0)
    cu_seqlens.data[1] = 101  # between forward and backward
    with pytest.raises(ValueError, match=r"plan: expected one made for these cu_seqlens .* index 1"):
        then_another_call(again.sum().backward)


@pytest.mark.parametrize("other", [{"num_heads": 8, "num_kv_heads": 8}, {"window_size": (3, 0)}, {"head_dim": 256}])
def test_a_plan_of_other_heads_is_an_error_or_a_fault(other):
    q = torch.randn(64, 4, 64, device="cuda", dtype=torch.bfloat16)
    cu_seqlens = cu_seqlens_of([40, 24], "cuda")
    heads = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 64} | other
    plan = po.attention_plan(cu_seqlens, total_q=64, **heads)
    with pytest.raises(ValueError, match="plan: expected"):
        then_another_call(lambda: po.varlen_attention(q, q, q, cu_seqlens, plan=plan))


def test_decoding_keeps_no_plan_for_each_length():
    """A cache that grows by a key each step."""
    q = torch.randn(8, 1, 8, 128, device="cuda", dtype=torch.bfloat16)

    def decode(steps):
        for keys in steps:
            k = torch.zeros(8, keys, 2, 128, device="cuda", dtype=torch.bfloat16)
            po.flash_attn_func(q, k, k, causal=True)
        del k
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    few = decode(range(1, 60))
    assert decode(range(60, 400)) <= few + 64 * 1024
