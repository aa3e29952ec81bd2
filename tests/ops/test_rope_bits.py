"""A head's result is the same bits in any layout, batch, packing, thread or place of memory."""

import threading

import pytest
import torch
from helpers import assert_same
from helpers.rope_inputs import FLOATS, LAYOUTS, dim_of_heads, heads, tables

import packing_ops as po
from packing_ops.reference import rope as oracle


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rotary_dim", [2, 6, 34, 64, 80, 126, 128, 130, 258])
def test_bits_do_not_depend_on_the_layout(device, dtype, rotary_dim):
    head_dim = rotary_dim + (rotary_dim % 3)
    x = torch.randn(3, 5, 4, head_dim, device=device).to(dtype)  # [batch, seqlen, heads, head_dim]
    cos, sin = tables(11, rotary_dim // 2, device=device)
    position_ids = torch.randint(0, 11, (3, 5), device=device)
    options = {"rotary_dim": rotary_dim}
    wanted, as_k = po.apply_rotary_qk(x, x, cos, sin, position_ids, unsqueeze_dim=2, **options)
    assert_same(as_k, wanted)

    def equal(y, ids, back, **more):
        assert_same(back(po.apply_rotary_qk(y, None, cos, sin, ids, **options, **more)[0]), wanted)

    equal(x.transpose(1, 2), position_ids, lambda y: y.transpose(1, 2))
    equal(x.transpose(1, 2).contiguous(), position_ids, lambda y: y.transpose(1, 2))
    equal(x.flatten(0, 1), position_ids.flatten(), lambda y: y.view_as(wanted))
    shifted = torch.cat([x.new_zeros(3, 5, 4, 3), x], -1)[..., 3:]  # rows at odd addresses
    equal(shifted, position_ids, lambda y: y, unsqueeze_dim=2)
    for b in range(3):  # a batch of one, a single token, a single head
        assert_same(
            po.apply_rotary_qk(x[b : b + 1], None, cos, sin, position_ids[b], unsqueeze_dim=2, **options)[0][0],
            wanted[b],
        )
        one, _ = po.apply_rotary_qk(x[b, b : b + 1, b : b + 1], None, cos, sin, position_ids[b, b : b + 1], **options)
        assert_same(one[0, 0], wanted[b, b, b])
    pairs = torch.arange(rotary_dim, device=device).view(2, -1).t().flatten()  # half-split order to interleaved order
    order = torch.cat([pairs, torch.arange(rotary_dim, head_dim, device=device)])
    equal(
        x[..., order].contiguous(), position_ids, lambda y: y[..., order.argsort()], unsqueeze_dim=2, interleaved=True
    )


@pytest.mark.parametrize("num_heads", [2, 16, 40])  # half a warp a token, a warp a token
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_rounding_from_the_exact_result(device, dtype, interleaved, num_heads):
    """The exact rotation, rounded once to the dtype, give or take the rounding of one fp32 product and sum."""
    q = torch.randn(50, num_heads, 64, device=device).to(dtype)
    cos, sin = tables(99, 32, device=device)
    position_ids = torch.randint(0, 99, (50,), device=device)
    found, _ = po.apply_rotary_qk(q, None, cos, sin, position_ids, interleaved=interleaved)
    exact, terms = (
        oracle.apply_rotary_qk(x.double(), None, c.double(), s.double(), position_ids, interleaved=interleaved)[0]
        for x, c, s in ((q, cos, sin), (q.abs(), cos.abs(), -sin.abs()))
    )
    # terms: |x1 cos| + |x2 sin| where the sum subtracts them; the larger of both signs covers the other half.
    other = oracle.apply_rotary_qk(
        q.double().abs(), None, cos.double().abs(), sin.double().abs(), position_ids, interleaved=interleaved
    )[0]
    in_fp32 = torch.maximum(terms.abs(), other.abs()) * 2.0**-23
    low = exact.to(dtype)
    to_the_next = (torch.nextafter(low.abs(), torch.full_like(low, torch.inf)).double() - low.double().abs()).abs()
    assert ((found.double() - exact).abs() <= 0.5 * to_the_next + in_fp32).all()


def test_bits_do_not_depend_on_threads_or_packing(device):
    cos, sin = oracle.rotary_tables(3000, 64, dtype=torch.float32, device=device)
    lengths = [1, 700, 2, 1500, 33]
    documents = [torch.randn(n, 8, 64, device=device) for n in lengths]
    position_ids = torch.cat([torch.arange(n, device=device) for n in lengths])
    packed, _ = po.apply_rotary_qk(torch.cat(documents), None, cos, sin, position_ids)
    alone = [po.apply_rotary_qk(d, None, cos, sin, torch.arange(len(d), device=device))[0] for d in documents]
    assert_same(packed, torch.cat(alone))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert_same(po.apply_rotary_qk(torch.cat(documents), None, cos, sin, position_ids)[0], packed)
    finally:
        torch.set_num_threads(threads)


def test_two_python_threads(device):
    cos, sin = tables(400, 32, device=device)
    inputs = [torch.randn(400, 4, 64, device=device) for _ in range(2)]
    wanted = [po.apply_rotary_qk(q, None, cos, sin)[0] for q in inputs]
    found = [[], []]

    def work(i):
        found[i] = [po.apply_rotary_qk(inputs[i], None, cos, sin)[0] for _ in range(20)]

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for i in range(2):
        assert len(found[i]) == 20
        for result in found[i]:
            assert_same(result, wanted[i])


@pytest.mark.parametrize("interleaved", [False, True])
def test_nan_stays_in_its_pair(device, interleaved):
    q = torch.randn(3, 2, 10, device=device)
    cos, sin = tables(3, 4, device=device)
    options = {"interleaved": interleaved, "rotary_dim": 8}
    clean, _ = po.apply_rotary_qk(q, None, cos, sin, **options)
    q[1, 1, 2] = float("nan")
    q[2, 0, 9] = float("inf")
    dirty, _ = po.apply_rotary_qk(q, None, cos, sin, **options)
    assert dirty[1, 1].isnan().nonzero().flatten().tolist() == ([2, 3] if interleaved else [2, 6])
    assert dirty[2, 0, 9] == float("inf")
    dirty[1, 1], dirty[2, 0, 9] = clean[1, 1], clean[2, 0, 9]
    assert_same(dirty, clean)


# --- in place ---


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place(device, layout, interleaved):
    q, k = (heads(layout, 1, 7, n, 72, device=device) for n in (3, 1))
    cos, sin = tables(12, 32, device=device)
    position_ids = torch.randint(0, 12, (1, 7), device=device)
    options = {"interleaved": interleaved, "unsqueeze_dim": dim_of_heads(layout), "rotary_dim": 64}
    wanted = po.apply_rotary_qk(q, k, cos, sin, position_ids, **options)
    found = po.apply_rotary_qk(q, k, cos, sin, position_ids, inplace=True, **options)
    assert found[0] is q
    assert found[1] is k
    assert_same(q, wanted[0])
    assert_same(k, wanted[1])


def test_in_place_of_one_projection(device):
    qkv = torch.randn(5, 6, 8, device=device)
    before = qkv.clone()
    cos, sin = tables(5, 4, device=device)
    wanted = po.apply_rotary_qk(before[:, :3], before[:, 3:5], cos, sin)
    assert po.apply_rotary_qk(qkv[:, :3], None, cos, sin, inplace=True)[1] is None
    po.apply_rotary_qk(qkv[:, 3:5], None, cos, sin, inplace=True)
    assert_same(qkv, torch.cat([*wanted, before[:, 5:]], 1))


def test_in_place_refuses_gradients(device):
    cos, sin = tables(3, 4, device=device)
    q, k = torch.randn(3, 2, 8, device=device, requires_grad=True), torch.randn(3, 1, 8, device=device)
    with pytest.raises(ValueError, match="q: expected no gradient with inplace"):
        po.apply_rotary_qk(q, k, cos, sin, inplace=True)
    with pytest.raises(ValueError, match="k: expected no gradient with inplace"):
        po.apply_rotary_qk(k, q, cos, sin, inplace=True)
    wanted = q.detach().clone()
    po.apply_rotary_qk(wanted, None, cos, sin, inplace=True)
    with torch.no_grad():
        po.apply_rotary_qk(q, k, cos, sin, inplace=True)
    assert_same(q.detach(), wanted)


def test_in_place_is_noticed_by_autograd(device):
    x = torch.randn(3, 2, 8, device=device, requires_grad=True)
    q = x * 2
    loss = q.square().sum()
    with torch.no_grad():
        po.apply_rotary_qk(q, None, *tables(3, 4, device=device), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_in_inference_mode(device):
    cos, sin = tables(3, 4, device=device)
    with torch.inference_mode():
        q = torch.randn(3, 2, 8, device=device)
        wanted, _ = po.apply_rotary_qk(q, None, cos, sin)
        assert_same(po.apply_rotary_qk(q, None, cos, sin, inplace=True)[0], wanted)
