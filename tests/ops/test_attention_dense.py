"""flash_attn_func: dense batches through the op of packed documents."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same
from helpers.attention_case import INF, Case, assert_close
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import packing_ops as po
from packing_ops._runtime import batch_cache


def dense_results(case, batch):
    """The results of ``case``, whose documents are of one length, by way of a dense batch."""

    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, *, sinks, **options):
        q, k, v = (t.view(batch, t.shape[0] // max(batch, 1), *t.shape[1:]) for t in (q, k, v))
        out, lse, nothing = po.flash_attn_func(q, k, v, return_attn_probs=True, **options)
        assert nothing is None
        assert out.shape == q.shape
        assert lse.shape == (batch, q.shape[2], q.shape[1])
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)

    return case.results_of(attend)


def with_gradients(attend, given, dout):
    leaves = [t.detach().requires_grad_() for t in given]
    out = attend(*leaves)
    return [out, *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_equals_torch(device, causal, heads):
    shapes = [(3, 70, count, 32) for count in (heads[0], heads[1], heads[1], heads[0])]
    *given, dout = (torch.randn(shape, device=device) for shape in shapes)

    def sdpa(*tensors):
        rows = (t.transpose(1, 2) for t in tensors)
        return F.scaled_dot_product_attention(*rows, is_causal=causal, enable_gqa=True).transpose(1, 2)

    ours = with_gradients(lambda *tensors: po.flash_attn_func(*tensors, causal=causal), given, dout)
    for actual, expected in zip(ours, with_gradients(sdpa, given, dout), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": False},
        {"causal": False, "window_size": (5, 2), "softcap": 3.0, "softmax_scale": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(33, 33), (5, 70), (70, 5), (1, 70)])
def test_equals_the_oracle_and_the_packed_call(device, seqlen_q, seqlen_k, options):
    """Causal is bottom-right aligned: the last query is at the last key."""
    case = Case([seqlen_q] * 3, [seqlen_k] * 3, heads=(4, 2), device=device, **options)
    dense = dense_results(case, 3)
    assert_close(dense, case.exact(), 1e-4)
    packed = case.results_of(
        lambda *args, sinks, **options: po.flash_attn_varlen_func(
            *args, seqlen_q, seqlen_k, return_attn_probs=True, **options
        )[:2]
    )
    for name, value in packed.items():
        assert_same(dense[name], value)


class Calls(TorchDispatchMode):
    """Names of the ops that ran, and where q, k and v of the attention began."""

    def __init__(self):
        super().__init__()
        self.names, self.starts = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        if func._schema.name == "packing_ops::varlen_attention":
            self.starts = [t.data_ptr() for t in args[:3]]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_fused_projection_is_not_copied(device, batch):
    qkv = torch.randn(batch, 20, 3, 2, 16, device=device)
    with Calls() as calls:
        out = po.flash_attn_func(*qkv.unbind(2), causal=True)
    assert calls.starts == [t.data_ptr() for t in qkv.unbind(2)]
    assert not {"aten::clone", "aten::copy_", "aten::_to_copy"} & set(calls.names)
    assert_same(out, po.flash_attn_func(*(t.contiguous() for t in qkv.unbind(2)), causal=True))


def test_rows_apart_are_copied(device):
    heads_first = torch.randn(3, 2, 2, 20, 16, device=device)
    views = [t.transpose(1, 2) for t in heads_first]
    dout = torch.randn(2, 20, 2, 16, device=device)
    found = with_gradients(po.flash_attn_func, views, dout)
    expected = with_gradients(po.flash_attn_func, [t.contiguous() for t in views], dout)
    for actual, wanted in zip(found, expected, strict=True):
        assert_same(actual, wanted)


@pytest.mark.parametrize(("batch", "seqlens"), [(0, (0, 0)), (2, (0, 0)), (2, (0, 4)), (2, (4, 0))])
def test_nothing_to_see(device, batch, seqlens):
    case = Case(*([seqlen] * batch for seqlen in seqlens), device=device, causal=False)
    results = dense_results(case, batch)
    assert all((results[name] == 0).all() for name in ("out", "dq", "dk", "dv"))
    assert (results["lse"] == -INF).all()


def test_an_empty_batch_of_some_length(device):
    given = [torch.randn(0, 9, heads, 16, device=device) for heads in (4, 2, 2)]
    for result, tensor in zip(with_gradients(po.flash_attn_func, given, given[0]), [given[0], *given], strict=True):
        assert result.shape == tensor.shape


def bad_calls():
    q, k = torch.zeros(2, 5, 4, 16), torch.zeros(2, 7, 2, 16)
    many = torch.zeros(1).expand(2**16, 2**15, 1, 8)
    return {
        "q rank": ((q[0], k, k), r"q: expected \[batch, seqlen, num_heads, head_dim\], got \[5, 4, 16\]"),
        "k rank": ((q, k[0], k), r"k: expected \[batch, seqlen, num_heads, head_dim\], got \[7, 2, 16\]"),
        "v rank": ((q, k, k[..., 0]), r"v: expected \[batch, seqlen, num_heads, head_dim\], got \[2, 7, 2\]"),
        "k batch": ((q, k[:1], k[:1]), r"k: expected a batch of 2 like q, got \[1, 7, 2, 16\]"),
        # As many rows in all, so that only the dense call can tell.
        "v batch": (
            (q, k, k.view(7, 2, 2, 16)),
            r"v: expected \[2, 7, 2, 16\] like k \(but for head_dim\), got \[7, 2, 2, 16\]",
        ),
        "v heads": ((q, k, k[:, :, :1]), r"v: expected \[2, 7, 2, 16\] like k"),
        "heads": ((q[:, :, :3], k, k), "k: expected a number of heads that divides the 3 heads of q"),
        "k head_dim": ((q, k[..., :8], k[..., :8]), "k: expected head_dim 16 like q"),
        "k dtype": ((q, k.double(), k.double()), "k: expected float32 like q, got float64"),
        "q tokens": (
            (many, many, many),
            r"q: expected batch \* seqlen below 2\*\*31, got batch 65536 and seqlen 32768",
        ),
    }


@pytest.mark.parametrize("case", bad_calls())
def test_bad_input_is_named(device, case):
    tensors, message = bad_calls()[case]
    with pytest.raises(ValueError, match=message):
        po.flash_attn_func(*(t if t.stride(0) == 0 else t.to(device) for t in tensors))


@pytest.mark.parametrize(("name", "value"), [("dropout_p", 0.1), ("alibi_slopes", torch.zeros(2))])
def test_features_that_are_not_there(name, value):
    q = torch.zeros(1, 3, 2, 16)
    with pytest.raises(NotImplementedError, match=f"{name}: expected"):
        po.flash_attn_func(q, q, q, **{name: value})


def test_signature_is_that_of_flash_attn():
    parameters = inspect.signature(po.flash_attn_func).parameters.values()
    assert [(p.name, p.default) for p in parameters if p.default is not p.empty] == [
        ("dropout_p", 0.0),
        ("softmax_scale", None),
        ("causal", False),
        ("window_size", (-1, -1)),
        ("softcap", 0.0),
        ("alibi_slopes", None),
        ("deterministic", False),
        ("return_attn_probs", False),
        ("s_aux", None),
    ]
    q = torch.randn(2, 9, 2, 16)
    options = {"softmax_scale": 0.3, "window_size": (4, 0), "softcap": 2.0, "causal": True}
    by_place = po.flash_attn_func(q, q, q, 0.0, 0.3, True, (4, 0), 2.0, None, True, False)
    assert_same(by_place, po.flash_attn_func(q, q, q, **options))


def test_layers_share_cu_seqlens(device):
    """One tensor for all layers, since a plan is found again by its cu_seqlens."""
    first = torch.zeros(3, 5, 2, 8, device=device)
    cu_seqlens = batch_cache.dense_cu_seqlens(*first.shape[:2], first, "q")
    assert_same(cu_seqlens, torch.tensor([0, 5, 10, 15], dtype=torch.int32, device=device))
    assert batch_cache.dense_cu_seqlens(*first.shape[:2], first + 1, "q") is cu_seqlens
    assert batch_cache.dense_cu_seqlens(first.shape[0], 4, first, "q").tolist() == [0, 4, 8, 12]
    with FakeTensorMode() as mode:
        fake = batch_cache.dense_cu_seqlens(*first.shape[:2], mode.from_tensor(first), "q")
    assert isinstance(fake, FakeTensor)
    assert batch_cache.dense_cu_seqlens(*first.shape[:2], first, "q") is cu_seqlens


def test_training_after_inference(device):
    """What inference keeps for the next call is no inference tensor."""
    case = Case([9] * 2, heads=(2, 1), dim=24, device=device, causal=True)
    expected = case.ours()
    batch_cache._kept_cu_seqlens.cache_clear()
    with torch.inference_mode():
        out = po.flash_attn_func(*(t.view(2, 9, -1, 24) for t in (case.q, case.k, case.v)), causal=True)
    assert_same(out.flatten(0, 1), expected["out"])
    for name, value in dense_results(case, 2).items():
        assert_same(value, expected[name])


@pytest.mark.filterwarnings("error:.*lru_cache")
@torch._dynamo.config.patch(error_on_recompile=True)  # one graph for all sizes
def test_compiles_fullgraph_with_dynamic_sizes(device, fresh_compile):
    def step(q, k, v):
        return po.flash_attn_func(q * 2, k, v, causal=True, return_attn_probs=True)[:2]

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, seqlen_q, seqlen_k in ((3, 5, 9), (5, 40, 70), (7, 11, 6)):
        shapes = [(batch, seqlen, heads, 24) for seqlen, heads in ((seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2))]
        given = [torch.randn(shape, device=device) for shape in shapes]
        results = []
        for call in (step, compiled):
            leaves = [t.clone().requires_grad_() for t in given]
            out, lse = call(*leaves)
            visible = lse.masked_fill(lse == -INF, 0)
            results.append([out, lse, *torch.autograd.grad(out.square().sum() + visible.sum(), leaves)])
        for traced, eager in zip(*reversed(results), strict=True):
            assert_same(traced, eager)
