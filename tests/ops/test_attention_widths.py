"""Values of another head_dim than queries and keys, and head_dims up to 512."""

import pytest
import torch
from helpers import assert_error_within, assert_same, cu_seqlens_of, non_contiguous
from helpers.attention_case import Case, assert_close, document_alone, document_results, drawn_case, sdpa_by_document
from hypothesis import given, settings
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.reference import attention as oracle

ops = torch.ops.packing_ops
EDGES = [1, 17, 64, 0, 65, 33]
# (of q and k, of v): multi-head latent attention, its small relatives, a wider v, wide rows.
WIDTHS = [(192, 128), (96, 64), (64, 96), (24, 16), (512, 512), (320, 264)]


@settings(max_examples=30)
@given(
    lengths=st.lists(
        st.tuples(*[st.sampled_from([0, 1, 2, 16, 17, 63, 64, 65, 100])] * 2), min_size=1, max_size=4
    ),
    cross=st.booleans(),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (7, 1)]),
    dims=st.tuples(*[st.sampled_from([1, 7, 8, 16, 40, 72, 264])] * 2),
    causal=st.booleans(),
    window=st.sampled_from([(-1, -1), (5, 0), (70, -1), (3, 9)]),
    softcap=st.sampled_from([0.0, 2.0]),
    sinks=st.booleans(),
    tail=st.integers(0, 2),
)  # fmt: skip
def test_equals_oracle(device, lengths, cross, heads, dims, causal, window, softcap, sinks, tail):
    dtype = torch.float32 if device == "cuda" else torch.float64
    case = drawn_case(
        lengths, cross, heads=heads, dim=dims[0], dim_v=dims[1], device=device, dtype=dtype, tail=tail, sinks=sinks,
        causal=causal, window=window, softcap=softcap,
    )  # fmt: skip
    assert_close(case.ours(), case.exact(), 1e-12 if dtype == torch.float64 else 1e-4)


def padded_sdpa(q, k, v, *cu_seqlens, **options):
    """torch's fused attention, which wants one head_dim."""
    width = max(q.shape[-1], v.shape[-1])
    rows = [torch.nn.functional.pad(t, (0, width - t.shape[-1])) for t in (q * (width / q.shape[-1]) ** 0.5, k, v)]
    out, lse = sdpa_by_document(*rows, *cu_seqlens, **options)
    return out[..., : v.shape[-1]], lse


@pytest.mark.parametrize("dims", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_is_at_most_twice_that_of_torch(device, dtype, dims):
    case = Case([400, 200, 65], heads=(2, 2), dim=dims[0], dim_v=dims[1], dtype=dtype, device=device)
    case.dlse.zero_()
    ours, exact, theirs = case.ours(), case.exact(), case.results_of(padded_sdpa)
    for name in ("out", "dq", "dk", "dv"):
        assert_error_within(ours[name], theirs[name], exact[name])


@pytest.mark.parametrize("dims", [(192, 128), (512, 512)], ids=str)
def test_documents_keep_their_bits(device, dims):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    case = Case(EDGES, heads=(4, 2), dim=dims[0], dim_v=dims[1], dtype=dtype, device=device, tail=2)
    packed, start = case.ours(), 0
    for length in EDGES:
        here = (start, start + length)
        alone = document_results(document_alone(case, *here, here).ours(), 0, length)
        for name, value in document_results(packed, *here).items():
            assert_same(value, alone[name])
        start += length


def test_a_narrower_value_is_a_padded_one(device):
    """Columns of zeros change no bit of the scores: out, dq and dk of v padded to q's head_dim."""
    case = Case(EDGES, heads=(4, 2), dim=24, dim_v=16, device=device)
    padded = Case(EDGES, heads=(4, 2), dim=24, device=device)
    padded.q, padded.k, padded.dlse = case.q, case.k, case.dlse
    padded.v, padded.dout = (torch.nn.functional.pad(t, (0, 8)) for t in (case.v, case.dout))
    ours, other = case.ours(), padded.ours()
    for name in ("out", "dv"):
        other[name] = other[name][..., :16]
    assert_close(ours, {name: value.double() for name, value in other.items()}, 1e-5)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts_with_a_batch(device, layout):
    case = Case([5, 3], heads=(4, 2), dim=24, dim_v=16, device=device)
    expected = case.ours()
    axis = 2 if layout == "bhsd" else 1
    rows = [t[None].transpose(1, axis).contiguous().requires_grad_() for t in (case.q, case.k, case.v)]
    out, lse = po.varlen_attention(*rows, case.cu_seqlens[0], layout=layout, return_lse=True)
    assert_same(out[0], expected["out"])
    assert_same(lse, expected["lse"])
    grads = torch.autograd.grad([out, lse], rows, [case.dout[None], case.dlse])
    for name, gradient in zip(("dq", "dk", "dv"), grads, strict=True):
        assert_same(gradient.transpose(1, axis)[0], expected[name])


def test_views_into_one_projection(device):
    """q, k and v as columns of one tensor, and a dout whose last dimension is strided."""
    rows = torch.randn(9, 4, 24 + 24 + 16, device=device)
    cu_seqlens = cu_seqlens_of([6, 3], device)
    dout = non_contiguous(torch.randn(9, 4, 16, device=device))
    results = []
    for copied in (False, True):
        leaf = rows.clone().requires_grad_()
        heads = [t.contiguous() if copied else t for t in leaf.split([24, 24, 16], dim=-1)]
        out = po.varlen_attention(*heads, cu_seqlens)
        results.append((out, torch.autograd.grad(out, leaf, dout)[0]))
    for view, copied in zip(*results, strict=True):
        assert_same(view, copied)


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "sinks": True}, {"window_size": (1, 0)}], ids=str)
@pytest.mark.parametrize("dims", [(3, 2), (2, 5)], ids=str)
def test_gradcheck(options, dims):
    case = Case([3, 0, 4], heads=(4, 2), dim=dims[0], dim_v=dims[1], dtype=torch.float64, **options)
    leaves = [t.requires_grad_() for t in (case.q, case.k, case.v, *([case.sinks] if case.sinks is not None else []))]

    def call(q, k, v, sinks=None):
        return po.varlen_attention(q, k, v, case.cu_seqlens[0], sinks=sinks, return_lse=True, **case.options)

    assert torch.autograd.gradcheck(call, leaves)


def test_opcheck(device):
    case = Case([3, 0, 2], heads=(2, 1), dim=8, dim_v=16, device=device)
    leaves = [t.requires_grad_() for t in (case.q, case.k, case.v)]
    options = (True, 0.3, -1, -1, 0.0, None)
    torch.library.opcheck(ops.varlen_attention, (*leaves, *case.cu_seqlens, None, *options))
    with torch.no_grad():
        out, lse = ops.varlen_attention(*leaves, *case.cu_seqlens, None, *options)
        tensors = [t.detach() for t in leaves]
    backward = (case.dout, case.dlse, *tensors, out, lse, *case.cu_seqlens, None, *options)
    torch.library.opcheck(ops.varlen_attention_backward, backward)
    plan = (*case.cu_seqlens, 5, 5, 2, 1, 8, True, -1, -1, 16)
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(ops.attention_plan, plan, test_utils=utils)


def test_compiles_fullgraph_with_dynamic_sizes(device, fresh_compile):
    def step(q, k, v, cu_seqlens):
        out, lse = po.varlen_attention(q * 2, k, v, cu_seqlens, return_lse=True)
        return out.square().sum() + lse.sum() + po.attention(q, k, v, cu_seqlens).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths, dims in (([3, 5], (24, 16)), ([2, 9, 4], (24, 16)), ([1, 20], (16, 40))):
        case = Case(lengths, heads=(4, 2), dim=dims[0], dim_v=dims[1], device=device)
        grads = []
        for call in (step, compiled):
            leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v)]
            grads.append(torch.autograd.grad(call(*leaves, case.cu_seqlens[0]), leaves))
        for traced, eager in zip(*grads, strict=True):
            torch.testing.assert_close(traced, eager)


def test_flash_attns_signature(device):
    case = Case([5, 3], heads=(4, 2), dim=24, dim_v=16, device=device)
    expected = oracle.varlen_attention(case.q, case.k, case.v, *case.cu_seqlens)[0]
    found = po.flash_attn_varlen_func(case.q, case.k, case.v, *case.cu_seqlens, 5, 5, causal=True)
    torch.testing.assert_close(found, expected)
    dense = [t.unflatten(0, (2, 4)) for t in (case.q, case.k, case.v)]
    cu_seqlens = cu_seqlens_of([4, 4], device)
    expected = oracle.varlen_attention(case.q, case.k, case.v, cu_seqlens)[0]
    torch.testing.assert_close(po.flash_attn_func(*dense, causal=True).flatten(0, 1), expected)


@pytest.mark.parametrize("backend", ["packing_ops", "sdpa"])
def test_backends(device, backend):
    case = Case([5, 3], heads=(4, 2), dim=24, dim_v=16, device=device)
    found = po.attention(case.q, case.k, case.v, case.cu_seqlens[0], backend=backend)
    torch.testing.assert_close(found, oracle.varlen_attention(case.q, case.k, case.v, *case.cu_seqlens)[0])


def test_what_select_attention_backend_says_of_widths():
    q = torch.zeros(8, 4, 192)
    assert po.select_attention_backend(q, v=q[..., :128]) == "packing_ops"
    name, reasons = po.select_attention_backend(q, v=q.new_zeros(8, 4, 520), explain=True)
    assert (name, reasons["packing_ops"]) == ("sdpa", "has head_dim up to 512, got 520")


def test_plans_of_widths_are_kept_apart():
    metadata = po.PackedMetadata.from_lengths([3, 2])
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 192}
    plan = metadata.attention_plan(**heads)
    assert metadata.attention_plan(**heads, head_dim_v=192) is plan
    assert metadata.attention_plan(**heads, head_dim_v=128) is not plan
    for width in (0, 513):
        with pytest.raises(ValueError, match=f"head_dim_v: expected 1 to 512, got {width}"):
            metadata.attention_plan(**heads, head_dim_v=width)


def test_products_are_counted(device):
    from torch.utils.flop_counter import FlopCounterMode

    case = Case([3], heads=(2, 1), dim=24, dim_v=16, device=device)
    leaves = [t.requires_grad_() for t in (case.q, case.k, case.v)]
    pairs = 2 * (1 + 2 + 3)
    po.register_flop_formulas()
    with FlopCounterMode(display=False) as counter:
        out = po.varlen_attention(*leaves, case.cu_seqlens[0])
    assert counter.get_total_flops() == 2 * pairs * (24 + 16)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (3 * 24 + 2 * 16)
