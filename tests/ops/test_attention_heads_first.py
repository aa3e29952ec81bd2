"""A packed row heads first, [1, num_heads, total, head_dim]: the bits of [total, num_heads, head_dim], other
strides.
"""

import pytest
import torch
from helpers import assert_same, cu_seqlens_of, non_contiguous
from helpers.attention_case import Case, drawn_case
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops._runtime import gate

ops = torch.ops.packing_ops


def heads_first(rows):
    """The view that a model makes of [1, total, num_heads, head_dim]."""
    return rows[None].transpose(1, 2)


def attend_heads_first(q, k, v, *documents, **options):
    out, lse = po.varlen_attention(*map(heads_first, (q, k, v)), *documents, return_lse=True, layout="bhsd", **options)
    return out[0], lse


def assert_same_results(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(found[name], value)


# --- the bits of rows without a batch ---


@given(
    lengths=st.lists(st.tuples(*[st.sampled_from([0, 1, 5, 16, 17, 64, 65, 129])] * 2), max_size=4),
    cross=st.booleans(),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3), (7, 1)]),
    dim=st.sampled_from([8, 16, 40, 64]),
    causal=st.booleans(),
    window=st.sampled_from([(-1, -1), (0, 0), (5, 0), (70, -1), (3, 9)]),
    softcap=st.sampled_from([0.0, 2.0]),
    sinks=st.booleans(),
    tail=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)
def test_same_bits(device, lengths, cross, heads, dim, causal, window, softcap, sinks, tail, dtype):
    if device == "cuda" and dtype == torch.float64:
        dtype = torch.bfloat16
    case = drawn_case(
        lengths, cross, heads=heads, dim=dim, device=device, dtype=dtype, tail=tail, sinks=sinks, causal=causal,
        window=window, softcap=softcap,
    )  # fmt: skip
    assert_same_results(case.results_of(attend_heads_first), case.ours())


def test_long_documents(device):
    """Backward visits them twice, once by queries and once by keys."""
    case = Case([4200, 100], heads=(2, 1), dim=16, device=device, window_size=(700, 0))
    assert_same_results(case.results_of(attend_heads_first), case.ours())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["fused", "misaligned", "heads outside", "expanded heads", "mixed", "overlapping"])
def test_any_strides(device, layout, dtype):
    """A last dimension that is contiguous is all that is asked for; rows that no 16-byte copy can start at are
    copied.
    """
    fused = torch.randn(77, 3 + 8 * 16, device=device, dtype=dtype)
    fused = fused[:, 3:] if layout in ("misaligned", "expanded heads") else fused[:, : 8 * 16]
    views = [t[None].transpose(1, 2) for t in fused.unflatten(1, (8, 16)).split([4, 2, 2], dim=1)]
    if layout == "heads outside":
        views = [t.contiguous() for t in views]
    if layout == "mixed":
        views[1] = views[1].contiguous()
    if layout == "expanded heads":
        views[1:] = [t[:, :1].expand(-1, 2, -1, -1) for t in views[1:]]
    if layout == "overlapping":  # every row starts one element after the row before
        views[1:] = [t.flatten().as_strided((1, 2, 77, 16), (1, 1, 1, 1)) for t in views[1:]]
    cu_seqlens = cu_seqlens_of([70, 0, 5], device)
    dout = torch.randn(77, 4, 16, device=device, dtype=dtype)
    results = []
    for give, grad in ((lambda t: t, dout[None]), (lambda t: t[0].transpose(0, 1).contiguous(), dout)):
        leaves = [give(t.detach()).requires_grad_() for t in views]
        out = po.varlen_attention(*leaves, cu_seqlens, window_size=(20, 0))
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    (out, *grads), (expected, *expected_grads) = results
    assert_same(out, expected[None])
    for actual, wanted in zip(grads, expected_grads, strict=True):
        assert_same(actual, heads_first(wanted))


@pytest.mark.parametrize("grad", ["heads outside", "expanded", "strided", "misaligned"])
def test_gradients_of_any_strides(device, grad):
    dtype = torch.bfloat16
    cu_seqlens, dout = cu_seqlens_of([40, 9], device), torch.randn(1, 49, 4, 16, device=device, dtype=dtype)
    leaves = [heads_first(torch.randn(49, n, 16, device=device, dtype=dtype)).requires_grad_() for n in (4, 2, 2)]
    other = {
        "heads outside": lambda: dout.transpose(1, 2).contiguous().transpose(1, 2),
        "expanded": lambda: dout[:, :1].expand(-1, 49, -1, -1),
        "strided": lambda: non_contiguous(dout),
        "misaligned": lambda: torch.cat([dout[..., :3], dout], -1)[..., 3:],
    }[grad]()
    assert not other.is_contiguous()
    found, expected = (
        torch.autograd.grad(po.varlen_attention(*leaves, cu_seqlens), leaves, given)
        for given in (other, other.contiguous())
    )
    for actual, wanted in zip(found, expected, strict=True):
        assert_same(actual, wanted)


@pytest.mark.parametrize("total", [0, 1, 9])
def test_out_and_gradients_lie_tokens_first(device, total):
    """What a model's projections read and write: nothing is copied on the way."""
    leaves = [torch.randn(1, n, total, 16, device=device).requires_grad_() for n in (4, 2, 2)]
    out = po.varlen_attention(*leaves, cu_seqlens_of([total], device))
    assert out.shape == (1, total, 4, 16)
    assert out.is_contiguous()
    grads = torch.autograd.grad(out, leaves, torch.randn_like(out))
    for leaf, grad in zip(leaves, grads, strict=True):
        assert grad.shape == leaf.shape
        assert grad.transpose(1, 2).is_contiguous()
        assert grad.stride() == leaf.new_empty(1, total, leaf.shape[1], 16).transpose(1, 2).stride()


# --- which layout four dimensions have ---


def attend_as(layout, rows, cu_seqlens, **options):
    given = [t if layout == "thd" else t[None] if layout == "bshd" else heads_first(t) for t in rows]
    out = po.varlen_attention(*given, cu_seqlens, layout=layout, **options)
    return out if layout == "thd" else out[0]


@pytest.mark.parametrize("heads", [(4, 2), (8, 8), (1, 1)], ids=str)
def test_layouts_that_are_named(device, heads):
    """8 tokens of 8 heads could be either."""
    case = Case([3, 5], heads=heads, dim=16, device=device)
    rows, cu_seqlens = [case.q, case.k, case.v], case.cu_seqlens[0]
    wanted = po.varlen_attention(*rows, cu_seqlens)
    for layout in ("thd", "bhsd", "bshd"):
        leaves = [t.clone().requires_grad_() for t in rows]
        out = attend_as(layout, leaves, cu_seqlens)
        assert_same(out, wanted)
        expected = [t.clone().requires_grad_() for t in rows]
        po.varlen_attention(*expected, cu_seqlens).backward(case.dout)
        out.backward(case.dout)
        for leaf, other in zip(leaves, expected, strict=True):
            assert_same(leaf.grad, other.grad)


def test_four_dimensions_that_may_be_either_need_the_name(device):
    q = torch.randn(1, 8, 8, 16, device=device)
    cu_seqlens = cu_seqlens_of([3, 5], device)
    either = r"layout: expected 'bhsd' .* or 'bshd' .*got None with q float32 \[1, 8, 8, 16\] and k float32 \[1, 8, "
    for k in (q, q[:, :, :2]):  # as many heads; fewer, in tokens first
        with pytest.raises(ValueError, match=either):
            po.varlen_attention(q, k, k, cu_seqlens)
    with pytest.raises(ValueError, match=either):  # other documents: as many tokens tell nothing
        po.varlen_attention(q, q[:, :2].repeat(1, 4, 1, 1), q, cu_seqlens, cu_seqlens.clone())
    assert_same(po.varlen_attention(q, q[:, :2], q[:, :2], cu_seqlens).shape, torch.Size([1, 8, 8, 16]))


def test_layouts_that_are_not_there(device):
    q = torch.randn(1, 8, 8, 16, device=device)
    cu_seqlens = cu_seqlens_of([3, 5], device)
    for layout, rows, message in [
        ("sbhd", q, "layout: expected 'thd', 'bhsd' or 'bshd', got 'sbhd'"),
        ("thd", q, r"q: expected 3 dimensions in layout 'thd', got float32 \[1, 8, 8, 16\]"),
        ("bhsd", q[0], r"q: expected 4 dimensions in layout 'bhsd', got float32 \[8, 8, 16\]"),
        (
            "bshd",
            q.expand(2, 8, 8, 16),
            r"q: expected \[1, total, num_heads, head_dim\] in layout 'bshd', got float32 \[2, ",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            po.varlen_attention(rows, rows, rows, cu_seqlens, layout=layout)


# --- torch.library ---


def op_samples(device):
    def sample(*args, **options):
        case = Case(*args, device=device, dim=8, heads=(4, 2), **options)
        return case, [heads_first(t).detach().requires_grad_() for t in (case.q, case.k, case.v)]

    case, rows = sample([3, 0, 2])
    sunk, of_sunk = sample([3, 2], [5, 1], sinks=True, tail=1)
    options = (True, 0.3, -1, -1, 0.0, None)
    forward = ops.varlen_attention
    with torch.no_grad():
        results = forward(*rows, *case.cu_seqlens, None, *options)
    backward = (*(t.detach() for t in rows), *results, *case.cu_seqlens)
    dout = torch.randn_like(results[0])
    return [
        (forward, (*rows, *case.cu_seqlens, None, *options)),
        (forward, (*of_sunk, *sunk.cu_seqlens, sunk.sinks.requires_grad_(), False, 0.3, 2, 1, 4.0, None)),
        (forward, (*(t.detach().contiguous().requires_grad_() for t in rows), *case.cu_seqlens, None, *options)),
        (ops.varlen_attention_backward, (dout, None, *backward, None, *options)),
        (
            ops.varlen_attention_backward,
            (non_contiguous(dout), case.dlse, *backward, torch.zeros(4, device=device), *options),
        ),
    ]


@pytest.mark.parametrize("sample", range(5))
def test_opcheck(device, sample):
    torch.library.opcheck(*op_samples(device)[sample])


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "sinks": True, "window_size": (2, 0)}], ids=str)
def test_gradcheck(device, options):
    if device == "cuda":
        pytest.skip("float64 has CPU kernels only")
    case = Case([3, 0, 5], heads=(4, 2), dim=3, dtype=torch.float64, **options)
    leaves = [heads_first(t).detach().requires_grad_() for t in (case.q, case.k, case.v)]
    leaves += [] if case.sinks is None else [case.sinks.requires_grad_()]

    def call(q, k, v, sinks=None):
        return po.varlen_attention(q, k, v, case.cu_seqlens[0], sinks=sinks, return_lse=True, **case.options)

    assert torch.autograd.gradcheck(call, leaves)


def test_compiles_fullgraph_with_dynamic_sizes(device, fresh_compile):
    def step(q, k, v, sinks, cu_seqlens):
        rows = (heads_first(t * 2) for t in (q, k, v))
        out, lse = po.varlen_attention(*rows, cu_seqlens, window_size=(9, 0), sinks=sinks, return_lse=True)
        return out.flatten(2).square().sum() + lse.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([3, 5], [2, 9, 4], [1, 1, 1, 20]):
        case = Case(lengths, heads=(4, 2), dim=8, sinks=True, device=device)
        grads = []
        for call in (step, compiled):
            leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v, case.sinks)]
            grads.append(torch.autograd.grad(call(*leaves, case.cu_seqlens[0]), leaves))
        for traced, eager in zip(*grads, strict=True):
            torch.testing.assert_close(traced, eager)


# --- bad input ---


def bad_calls(device):
    case = Case([2, 3], heads=(4, 2), device=device)
    q, k, v = map(heads_first, (case.q, case.k, case.v))
    documents = case.cu_seqlens[0]

    def call(*, q=q, k=k, v=v, attend=po.varlen_attention, **options):
        return lambda: attend(q, k, v, documents, **options)

    def backward(dout):
        out, lse = ops.varlen_attention(q, k, v, documents, documents, None, True, None, -1, -1, 0.0, None)
        options = documents, documents, None, True, None, -1, -1, 0.0, None
        return lambda: gate.varlen_attention_backward(dout, None, q, k, v, out, lse, *options)

    either = r"q: expected \[total_q, num_q_heads, head_dim\] or \[1, num_q_heads, total_q, head_dim\], got float32 "
    of_k = r"expected \[1, num_kv_heads, total_k, head_dim\] like "
    of_rows = of_k.replace("like", "with the rows and heads of")
    return {
        "q rank": (call(q=q[None]), either + r"\[1, 1, 4, 5, 16\]"),
        "q batch": (call(q=q.repeat(2, 1, 1, 1)), either + r"\[2, 4, 5, 16\]"),
        "no q batch": (call(q=q[:0]), either + r"\[0, 4, 5, 16\]"),
        "k rank": (call(k=case.k), f"k: {of_k}q, got float32 " + r"\[5, 2, 16\]"),
        "v rank": (call(v=case.v), f"v: {of_k}q"),
        "k heads first alone": (call(q=case.q), r"k: expected \[total_k, num_kv_heads, head_dim\] like q, got .*\[1, 2"),
        "k batch": (call(k=k.repeat(2, 1, 1, 1)), f"k: {of_k}q, got float32 " + r"\[2, 2, 5, 16\]"),
        "v heads": (call(v=v[:, :1]), f"v: {of_rows}k " + r"\(float32 \[1, 2, 5, 16\] on .*\), got float32 \[1, 1, 5, 16\]"),
        "heads": (call(q=q[:, :3]), "k: expected a number of heads that divides the 3 heads of q"),
        "head_dim": (call(k=k[..., :8]), "k: expected head_dim 16 like q"),
        "strided": (call(q=non_contiguous(q)), "q: expected a contiguous last dimension"),
        "dout": (backward(torch.randn_like(q)), r"dout: expected \[1, total_q, num_q_heads, head_dim of v\] = \[1, 5, 4, 16\]"),
        # Where rows of a batch of one have the tokens first, a row heads first would be read as one of them.
        "attention": (call(attend=po.attention), r"q: expected \[total_q, num_q_heads, head_dim\], got \[1, 4, 5, 16\]"),
        "flash_attn_varlen_func": (
            call(attend=po.flash_attn_varlen_func, cu_seqlens_k=documents, max_seqlen_q=3, max_seqlen_k=3),
            r"q: expected \[total_q, num_q_heads, head_dim\], got \[1, 4, 5, 16\]",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("case", bad_calls("cpu"))
def test_bad_input_is_named(device, case):
    call, message = bad_calls(device)[case]
    with pytest.raises(ValueError, match=message):
        call()
