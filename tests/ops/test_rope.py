"""packing_ops.rope against packing_ops.reference.rope."""

import pytest
import torch
from helpers import assert_error_within, assert_same, fresh_process, non_contiguous
from helpers.rope_inputs import FLOATS, LAYOUTS, dim_of_heads, heads, tables
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.reference import rope as oracle

ops = torch.ops.packing_ops


def in_double(*tensors):
    return [None if t is None else t.double() for t in tensors]


# --- values ---


def test_worked_values(device):
    cos, sin = oracle.rotary_tables(8, 4, dtype=torch.float32, device=device)
    q = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], device=device)
    position_ids = torch.tensor([1], device=device)
    rotated, nothing = po.apply_rotary_qk(q, None, cos, sin, position_ids)
    expected = torch.tensor([[[-1.98411065, 1.95990067, 2.46237790, 4.01979967]]], device=device)
    torch.testing.assert_close(rotated, expected, rtol=0, atol=5e-7)
    assert nothing is None
    interleaved, _ = po.apply_rotary_qk(
        q[..., [0, 2, 1, 3]].contiguous(), None, cos, sin, position_ids, interleaved=True
    )
    assert_same(interleaved[..., [0, 2, 1, 3]], rotated)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_error_is_within_torch(device, dtype, layout, interleaved, full):
    batch, seqlen = (1, 46) if layout == "packed" else (2, 23)
    q = heads(layout, batch, seqlen, 6, 80, device=device, dtype=dtype)
    k = heads(layout, batch, seqlen, 2, 80, device=device, dtype=dtype)
    cos, sin = oracle.rotary_tables(50, 80, device=device)
    if full:
        cos, sin = oracle.full_table(cos, interleaved), oracle.full_table(sin, interleaved)
    cos, sin = cos.to(dtype), sin.to(dtype)
    position_ids = torch.randint(0, 50, (batch, seqlen), device=device)
    options = {"interleaved": interleaved, "unsqueeze_dim": dim_of_heads(layout)}
    exact = oracle.apply_rotary_qk(*in_double(q, k, cos, sin), position_ids, **options)
    low = oracle.apply_rotary_qk(q, k, cos, sin, position_ids, **options)
    ours = po.apply_rotary_qk(q, k, cos, sin, position_ids, **options)
    for actual, x, theirs, expected in zip(ours, (q, k), low, exact, strict=True):
        assert actual.dtype == dtype
        assert actual.stride() == torch.empty_like(x).stride()
        assert_error_within(actual, theirs, expected, floor=1e-15)


@given(
    layout=st.sampled_from(LAYOUTS),
    batch=st.integers(1, 3),
    seqlen=st.sampled_from([0, 1, 2, 17]),
    num_heads=st.sampled_from([0, 1, 3]),
    half=st.sampled_from([0, 1, 3, 8, 16, 33, 70]),
    rest=st.sampled_from([0, 1, 5]),
    full=st.booleans(),
    interleaved=st.booleans(),
    ids=st.sampled_from(["batch", "expanded", "one_row", "tokens", "none", "none_tokens"]),
    int32=st.booleans(),
)
def test_equals_reference(device, layout, batch, seqlen, num_heads, half, rest, full, interleaved, ids, int32):
    if layout == "packed":
        batch, seqlen = 1, batch * seqlen
    head_dim, rotary_dim = 2 * half + rest, 2 * half
    q = heads(layout, batch, seqlen, num_heads, head_dim, device=device, dtype=torch.float64)
    k = heads(layout, batch, seqlen, 2, head_dim, device=device, dtype=torch.float64)
    cos, sin = tables(19, rotary_dim if full else half, device=device, dtype=torch.float64)
    position_ids = torch.randint(0, 19, (batch, seqlen), device=device)
    position_ids = {
        "batch": position_ids,
        "expanded": position_ids[:1].expand(batch, seqlen),
        "one_row": position_ids[:1],
        "tokens": position_ids[0],
        "none": position_ids,
        "none_tokens": position_ids[0],
    }[ids]
    if int32:
        position_ids = position_ids.int()
    if ids.startswith("none"):
        cos, sin, position_ids = cos[position_ids.long()], sin[position_ids.long()], None
    options = {"interleaved": interleaved, "unsqueeze_dim": dim_of_heads(layout), "rotary_dim": rotary_dim}
    expected = oracle.apply_rotary_qk(q, k, cos, sin, position_ids, **options)
    ours = po.apply_rotary_qk(q, k, cos, sin, position_ids, **options)
    for actual, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("table_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_tables_of_another_dtype(device, dtype, table_dtype):
    q = torch.randn(9, 3, 16, device=device).to(dtype)
    cos, sin = tables(9, 16, device=device, dtype=table_dtype)
    actual, _ = po.apply_rotary_qk(q, None, cos, sin)
    inner = torch.float64 if dtype == torch.float64 else torch.float32
    expected, _ = po.apply_rotary_qk(q.to(inner), None, cos.to(inner), sin.to(inner))
    assert_same(actual, expected.to(dtype))


def test_width_of_the_table_tells_rotary_dim(device):
    q = torch.randn(3, 2, 16, device=device)
    for width, rotary_dim in ((16, 16), (8, 16), (4, 4), (12, 12)):
        cos, sin = tables(3, width, device=device)
        by_width, _ = po.apply_rotary_qk(q, None, cos, sin)
        assert_same(by_width, po.apply_rotary_qk(q, None, cos, sin, rotary_dim=rotary_dim)[0])
        assert_same(by_width[..., rotary_dim:], q[..., rotary_dim:])
        assert (by_width[..., :rotary_dim] != q[..., :rotary_dim]).all()
    cos, sin = tables(3, 8, device=device)
    assert_same(po.apply_rotary_qk(q, None, cos, sin, rotary_dim=8)[0][..., 8:], q[..., 8:])


def test_equals_transformers_formula(device):
    q, k = (heads("heads_first_view", 2, 5, n, 64, device=device) for n in (3, 1))
    cos, sin = (oracle.full_table(t) for t in oracle.rotary_tables(5, 64, dtype=torch.float32, device=device))
    expected = oracle.transformers_rotary(q, k, cos[None], sin[None])
    for actual, wanted in zip(po.apply_rotary_qk(q, k, cos[None], sin[None]), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("strided", ["rows", "entries", "batch"])
def test_strided_tables(device, strided):
    q = torch.randn(2, 5, 3, 8, device=device)
    cos, sin = (torch.randn(2, 5, 8, device=device) for _ in range(2))
    expected, _ = po.apply_rotary_qk(q, None, cos, sin, unsqueeze_dim=2)
    if strided == "rows":
        cos, sin = torch.cat([cos, sin], -1).chunk(2, -1)
    elif strided == "entries":
        cos, sin = non_contiguous(cos), sin.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        cos, sin = cos.transpose(0, 1).contiguous().transpose(0, 1), sin
    assert_same(po.apply_rotary_qk(q, None, cos, sin, unsqueeze_dim=2)[0], expected)


# --- sections ---


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rows", "sections"), [(3, [2, 3, 3]), (3, [8]), (4, [1, 2, 0, 3, 2]), (3, [70, 60, 20])])
def test_sections(device, full, interleaved, rows, sections):
    half = sum(sections)
    q = torch.randn(2, 6, 3, 2 * half + 4, dtype=torch.float64, device=device)
    cos, sin = tables(30, 2 * half if full else half, device=device, dtype=torch.float64)
    position_ids = torch.randint(0, 30, (rows, 2, 6), device=device)
    options = {"interleaved": interleaved, "sections": sections, "unsqueeze_dim": 2, "rotary_dim": 2 * half}
    expected, _ = oracle.apply_rotary_qk(q, None, cos, sin, position_ids, **options)
    actual, _ = po.apply_rotary_qk(q, None, cos, sin, position_ids, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
    assert_same(po.apply_rotary_qk(q, None, cos[position_ids], sin[position_ids], **options)[0], actual)
    packed, _ = po.apply_rotary_qk(q.flatten(0, 1), None, cos, sin, position_ids.flatten(1), **options)
    assert_same(packed.view_as(actual), actual)


def test_equal_rows_of_positions_are_plain_rope(device):
    q = torch.randn(1, 4, 7, 32, device=device)
    cos, sin = oracle.rotary_tables(9, 32, dtype=torch.float32, device=device)
    position_ids = torch.randint(0, 9, (1, 7), device=device)
    plain, _ = po.apply_rotary_qk(q, None, cos, sin, position_ids)
    rows = position_ids.expand(3, 1, 7)
    assert_same(po.apply_rotary_qk(q, None, cos, sin, rows, sections=[4, 6, 6])[0], plain)


# --- gradients ---


@pytest.mark.parametrize("layout", ["heads_first_view", "fused", "packed"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_gradcheck(device, layout, interleaved, full):
    q, k = (heads(layout, 1, 3, n, 7, device=device, dtype=torch.float64).requires_grad_() for n in (2, 1))
    cos, sin = tables(5, 6 if full else 3, device=device, dtype=torch.float64)
    position_ids = torch.tensor([4, 0, 2], device=device)
    options = {"interleaved": interleaved, "unsqueeze_dim": dim_of_heads(layout), "rotary_dim": 6}

    def call(q, k):
        return po.apply_rotary_qk(q, k, cos, sin, position_ids, **options)

    assert torch.autograd.gradcheck(call, (q, k))
    assert torch.autograd.gradgradcheck(call, (q, k))


def gradients_of(function, q, k, grad_q, grad_k):
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    return torch.autograd.grad(function(q, k), (q, k), (grad_q, grad_k))


@pytest.mark.parametrize("kind", ["expanded", "transposed", "last_dim_strided", "slice"])
def test_gradients_of_any_strides(device, kind):
    q, k = (torch.randn(2, 5, n, 16, device=device, dtype=torch.float64).transpose(1, 2) for n in (3, 1))
    cos, sin = tables(5, 16, device=device, dtype=torch.float64)

    def grad_of(x):
        batch, num_heads, seqlen, head_dim = x.shape
        if kind == "expanded":
            return torch.randn(1, num_heads, 1, head_dim, device=device, dtype=x.dtype).expand_as(x)
        if kind == "transposed":
            return torch.randn(seqlen, head_dim, batch, num_heads, device=device, dtype=x.dtype).permute(2, 3, 0, 1)
        if kind == "last_dim_strided":
            return non_contiguous(torch.randn_like(x))
        return torch.randn(batch, num_heads + 1, seqlen, head_dim + 2, device=device, dtype=x.dtype)[:, 1:, :, 1:-1]

    grads = grad_of(q), grad_of(k)
    ours = gradients_of(lambda q, k: po.apply_rotary_qk(q, k, cos, sin), q, k, *grads)
    wanted = gradients_of(lambda q, k: oracle.apply_rotary_qk(q, k, cos, sin), q, k, *grads)
    for actual, expected in zip(ours, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_error_is_within_torch(device, dtype):
    q, k = (torch.randn(40, n, 64, device=device).to(dtype) for n in (4, 2))
    grads = [torch.randn_like(q), torch.randn_like(k)]
    cos, sin = (oracle.full_table(t).to(dtype) for t in oracle.rotary_tables(40, 64, device=device))
    ours = gradients_of(lambda q, k: po.apply_rotary_qk(q, k, cos, sin), q, k, *grads)
    low = gradients_of(lambda q, k: oracle.apply_rotary_qk(q, k, cos, sin), q, k, *grads)
    exact = gradients_of(
        lambda q, k: oracle.apply_rotary_qk(q, k, cos.double(), sin.double()), *in_double(q, k, *grads)
    )
    for actual, theirs, expected in zip(ours, low, exact, strict=True):
        assert_error_within(actual, theirs, expected)


def test_gradient_of_a_sum_and_with_sections(device):
    q = torch.randn(2, 6, 3, 16, device=device, dtype=torch.float64, requires_grad=True)
    cos, sin = tables(9, 16, device=device, dtype=torch.float64)
    position_ids = torch.randint(0, 9, (3, 2, 6), device=device)
    options = {"sections": [2, 5, 1], "unsqueeze_dim": 2}
    po.apply_rotary_qk(q, None, cos, sin, position_ids, **options)[0].sum().backward()
    (wanted,) = torch.autograd.grad(oracle.apply_rotary_qk(q, None, cos, sin, position_ids, **options)[0].sum(), q)
    torch.testing.assert_close(q.grad, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("needed", [0, 1])
def test_gradient_of_q_or_k_alone(device, used, needed):
    x = [torch.randn(4, n, 8, device=device, requires_grad=n - 2 == needed) for n in (2, 3)]
    cos, sin = tables(4, 4, device=device)
    po.apply_rotary_qk(*x, cos, sin)[used].square().sum().backward()
    assert x[1 - needed].grad is None
    if used != needed:
        assert x[needed].grad is None
        return
    y = x[needed].detach().requires_grad_()
    po.apply_rotary_qk(y, None, cos, sin)[0].square().sum().backward()
    assert_same(x[needed].grad, y.grad)


def test_tables_that_require_a_gradient_are_refused(device):
    q = torch.randn(4, 2, 8, device=device)
    cos, sin = tables(4, 4, device=device)
    with pytest.raises(ValueError, match=r"sin: expected no gradient \(only q and k get one\)"):
        po.apply_rotary_qk(q, None, cos, sin.requires_grad_())
    with pytest.raises(ValueError, match="cos: expected no gradient"):
        po.apply_rotary_qk(q, None, cos.requires_grad_(), sin)
    with torch.no_grad():
        assert po.apply_rotary_qk(q, None, cos, sin)[0].shape == q.shape


# --- torch.library ---


def op_samples(device):
    cos, sin = tables(9, 4, device=device)
    full_cos, full_sin = tables(9, 8, device=device)
    position_ids = torch.randint(0, 9, (2, 5), device=device)
    q, k = (torch.randn(2, 5, n, 8, device=device, requires_grad=True) for n in (3, 1))
    packed = torch.randn(5, 3, 8, device=device)
    rows = torch.randint(0, 9, (3, 2, 5), device=device)
    return [
        (ops.rope_qk, (q, k, cos, sin, position_ids, [], None, False, 2, False)),
        (ops.rope_qk, (q.transpose(1, 2), k.transpose(1, 2), cos, sin, position_ids.int(), [], None, True, 1, True)),
        (ops.rope_qk, (q.transpose(1, 2), None, full_cos, full_sin, position_ids[0], [], 8, True, 1, False)),
        (ops.rope_qk, (q, k.detach(), cos, sin, rows, [1, 2, 1], None, False, 2, False)),
        (ops.rope_qk, (q[:, :, 1:, :6], k[..., 2:], cos[:5, :3], sin[:5, :3], None, [], None, False, 2, False)),
        (ops.rope_qk, (packed, packed[:, :2], cos[:5], sin[:5], None, [], 4, False, 1, False)),
        (ops.rope_qk_, (packed.clone(), packed[:, :2].clone(), cos[:5], sin[:5], None, [], None, False, 1, False)),
        (ops.rope_qk_, (packed.transpose(0, 1)[None], None, cos, sin, position_ids[:1], [], 4, True, 1, False)),
    ]


@pytest.mark.parametrize("sample", range(8))
def test_opcheck(device, sample):
    op, arguments = op_samples(device)[sample]
    torch.library.opcheck(op, arguments)


def test_compiles_fullgraph_with_dynamic_sizes(device, fresh_compile):
    cos, sin = oracle.rotary_tables(64, 16, dtype=torch.float32, device=device)

    def step(q, k, position_ids):
        q, k = po.apply_rotary_qk(q * 2, k, cos, sin, position_ids)
        q, _ = po.apply_rotary_qk(q, None, cos[:, :4], sin[:, :4], position_ids, rotary_dim=8, interleaved=True)
        return q.sin().mean() + (q[:, :1] * k).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, seqlen in ((1, 9), (2, 5), (3, 30)):
        position_ids = torch.randint(0, 64, (batch, seqlen), device=device)
        eager = [torch.randn(batch, seqlen, n, 16, device=device, requires_grad=True) for n in (3, 1)]
        traced = [x.detach().clone().requires_grad_() for x in eager]
        step(*(x.transpose(1, 2) for x in eager), position_ids).backward()
        compiled(*(x.transpose(1, 2) for x in traced), position_ids).backward()
        for x, y in zip(traced, eager, strict=True):
            assert_same(x.grad, y.grad)


def test_in_place_compiles(device, fresh_compile):
    cos, sin = tables(64, 8, device=device)

    def step(qkv):
        q, k = qkv[:, :2], qkv[:, 2:3]
        po.apply_rotary_qk(q, k, cos[: q.shape[0]], sin[: q.shape[0]], inplace=True)
        return qkv + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for total in (5, 9, 31):
        eager = torch.randn(total, 4, 16, device=device)
        traced = eager.clone()
        assert_same(compiled(traced), step(eager))
        assert_same(traced, eager)


# --- bad input ---


def bad_calls(device):
    q, k = torch.randn(2, 5, 3, 8, device=device), torch.randn(2, 5, 1, 8, device=device)
    cos, sin = tables(9, 4, device=device)
    ids = torch.zeros(2, 5, dtype=torch.int64, device=device)
    rows = ids.expand(3, 2, 5)

    def call(q=q, k=k, cos=cos, sin=sin, ids=ids, unsqueeze_dim=2, **options):
        return lambda: po.apply_rotary_qk(q, k, cos, sin, ids, unsqueeze_dim=unsqueeze_dim, **options)

    return {
        "q dtype": (call(q=q.int()), "q: expected float32, bfloat16, float16 or float64, got int32"),
        "q rank": (call(q=q[0, 0]), r"q: expected 4 dimensions .* got float32 \[3, 8\]"),
        "q strided": (call(q=non_contiguous(q)), "q: expected a contiguous last dimension .* stride 2"),
        "k strided": (call(k=non_contiguous(k)), "k: expected a contiguous last dimension"),
        "k dtype": (call(k=k.half()), "k: expected float32 like q, got float16"),
        "k rank": (call(k=k[0]), r"k: expected the shape of q .* got float32 \[5, 1, 8\]"),
        "k tokens": (
            call(k=k[:, :4]),
            r"k: expected the shape of q but for the heads in dimension 2, .*\[2, 4, 1, 8\]",
        ),
        "unsqueeze_dim": (call(unsqueeze_dim=3), "unsqueeze_dim: expected 1 .* or 2 .* got 3"),
        "cos dtype": (call(cos=cos.int()), "cos: expected float32, .* got int32"),
        "sin dtype": (call(sin=sin.half()), "sin: expected float32 like cos, got float16"),
        "sin shape": (call(sin=sin[:8]), r"sin: expected the shape of cos = \[9, 4\], got float32 \[8, 4\]"),
        "cos rank": (call(cos=cos[0], sin=sin[0]), r"cos: expected .* got float32 \[4\]"),
        "cos no cache": (call(cos=cos[None], sin=sin[None]), r"cos: expected a cache .* got float32 \[1, 9, 4\]"),
        "cos odd": (
            call(cos=cos[:, :3], sin=sin[:, :3]),
            "cos: expected an even rotary_dim, at most head_dim=8, got 3",
        ),
        "cos wide": (call(cos=cos.repeat(1, 3), sin=sin.repeat(1, 3)), "cos: expected an even rotary_dim.* got 12"),
        "rotary_dim odd": (call(rotary_dim=5), "rotary_dim: expected an even rotary_dim.* got 5"),
        "rotary_dim large": (
            call(rotary_dim=10),
            "rotary_dim: expected an even rotary_dim, at most head_dim=8, got 10",
        ),
        "rotary_dim negative": (call(rotary_dim=-2), "rotary_dim: expected .* got -2"),
        "rotary_dim other": (call(rotary_dim=2), "cos: expected rotary_dim=2 or rotary_dim / 2 entries"),
        "gathered tokens": (call(ids=None), r"cos: expected \[seqlen=5, entries\] or .* got float32 \[9, 4\]"),
        "gathered batch": (
            call(ids=None, cos=cos[:5].expand(3, 5, 4), sin=sin[:5].expand(3, 5, 4)),
            r"cos: expected .*\[1 or batch=2, seqlen=5, entries\], got float32 \[3, 5, 4\]",
        ),
        "ids dtype": (call(ids=ids.float()), r"position_ids: expected int32 or int64, got float32 \[2, 5\]"),
        "ids rank": (call(ids=rows), r"position_ids: expected \[seqlen=5\] or \[1 or batch=2, .* \[3, 2, 5\]"),
        "ids tokens": (call(ids=ids[:, :4]), r"position_ids: expected .* got int64 \[2, 4\]"),
        "ids batch": (call(ids=ids.repeat(2, 1)), r"position_ids: expected .* got int64 \[4, 5\]"),
        "ids past": (call(ids=ids + 9), "position_ids: expected .*index"),
        "ids negative": (call(ids=ids - 1), "position_ids: expected .*index"),
        "sections rows": (
            call(ids=rows[:2], sections=[2, 2]),
            r"position_ids: expected \[3 or 4, .* with sections, got",
        ),
        "sections rank": (call(sections=[2, 2]), r"position_ids: expected \[3 or 4, .* with sections, got"),
        "sections sum": (call(ids=rows, sections=[2, 3]), "sections: expected lengths that sum .* = 4, got 5"),
        "sections negative": (call(ids=rows, sections=[5, -1]), "sections: expected no negative length.* index 1"),
        "sections many": (call(ids=rows, sections=[0] * 9), "sections: expected at most 8 lengths, got 9"),
        "sections alone": (
            call(ids=None, cos=cos[:5], sin=sin[:5], sections=[4]),
            r"cos: expected \[3 or 4, .* with sections, got",
        ),
        "in place expanded": (
            call(q=k.expand(2, 5, 3, 8), inplace=True),
            r"q: expected memory of its own .* strides \[40, 8, 0, 1\] of float32 \[2, 5, 3, 8\]",
        ),
        "in place shared": (call(k=q[:, :, :1], inplace=True), "k: expected memory of its own .* some of q's"),
    }


@pytest.mark.parametrize("case", bad_calls("cpu"))
def test_bad_input_is_named(device, case):
    call, message = bad_calls(device)[case]
    with pytest.raises(ValueError, match=message):
        call()


def ends_well_ahead_of_time(tmp_path, module, arguments):
    """Whether the module, compiled into a package, loads and runs next to itself; False where that process crashes."""
    # A package for the CPU, without trying what vectors its compiler has: no kernel of its own is worth the seconds.
    code = f"""
import sys, torch, packing_ops as po
{module}
arguments = {arguments}
exported = torch.export.export(Model(), arguments)
torch._inductor.config.cpp.vec_isa_ok = False
quick = {{"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}}
package = torch._inductor.aoti_compile_and_package(exported, package_path=sys.argv[1], inductor_configs=quick)
for found, wanted in zip(torch._inductor.aoti_load_package(package)(*arguments), Model()(*arguments), strict=True):
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
"""
    try:
        fresh_process.run("-c", code, tmp_path / "model.pt2", folder=tmp_path)
    except AssertionError as error:
        if "exit code -" not in str(error):
            raise
        return False
    return True


def test_ahead_of_time_package_for_the_cpu(tmp_path):
    """AOTInductor hands an empty list on as None: without sections it is None."""
    module = """
class Model(torch.nn.Module):
    def forward(self, q, cos, sin, position_ids, rows):
        alone, _ = po.apply_rotary_qk(q, None, cos, sin, position_ids)
        return alone, *po.apply_rotary_qk(q, q[:, :1], cos, sin, rows, sections=[1, 3])
"""
    arguments = "(torch.randn(5, 3, 8), *torch.rand(2, 9, 4), torch.arange(5), torch.randint(0, 9, (3, 5)))"
    if not ends_well_ahead_of_time(tmp_path, module, arguments):
        nothing_of_ours = "class Model(torch.nn.Module):\n    def forward(self, x):\n        return (x + 1,)"
        assert not ends_well_ahead_of_time(tmp_path, nothing_of_ours, "(torch.randn(5),)")
        pytest.skip("torch's loader of packages crashes here, without an op of ours too")


@pytest.mark.parametrize("position", [9, -1, 2**40])
@pytest.mark.parametrize("expanded", [False, True])
def test_position_outside_the_cache_writes_nothing(position, expanded):
    """On the CPU: a GPU reports it after the fact."""
    q = torch.randn(2, 3, 5, 8)
    before = q.clone()
    position_ids = torch.arange(5).repeat(1 if expanded else 2, 1)
    position_ids[-1, 3] = position
    position_ids = position_ids.expand(2, 5)
    index = 3 if expanded else 8
    message = rf"position_ids: expected 0 to 8 \(cos has 9 rows\), got {position} at index {index}$"
    with pytest.raises(ValueError, match=message):
        po.apply_rotary_qk(q, None, *tables(9, 4), position_ids, inplace=True)
    assert_same(q, before)


@pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 0, 5, 8), (2, 3, 0, 8), (2, 3, 5, 0)])
def test_empty_input(device, shape):
    q = torch.randn(shape, device=device, requires_grad=True)
    cos, sin = tables(9, shape[-1] // 2, device=device)
    position_ids = torch.zeros(shape[0], shape[2], dtype=torch.int64, device=device)
    rotated, k = po.apply_rotary_qk(q, q, cos, sin, position_ids)
    assert rotated.shape == k.shape == shape
    (rotated.sum() + k.sum()).backward()
    assert q.grad.shape == shape
    assert po.apply_rotary_qk(q.detach(), None, cos, sin, position_ids, inplace=True)[0].shape == shape


def test_empty_pack(device):
    q = torch.randn(0, 3, 8, device=device)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    assert po.apply_rotary_qk(q, q, *tables(0, 4, device=device), nothing)[1].shape == (0, 3, 8)
    assert po.apply_rotary_qk(q, q, *tables(0, 4, device=device))[0].shape == (0, 3, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k", "cos", "sin", "position_ids"])
def test_mixed_devices_are_named(name):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    q, k, position_ids = torch.randn(5, 3, 8), torch.randn(5, 1, 8), torch.arange(5)
    arguments = dict(zip(("q", "k", "cos", "sin", "position_ids"), (q, k, *tables(9, 4), position_ids), strict=True))
    on_gpu = {other: tensor if other == name else tensor.cuda() for other, tensor in arguments.items()}
    with pytest.raises(ValueError, match=f"{name}: expected on cuda:0 like"):
        po.apply_rotary_qk(**on_gpu)
