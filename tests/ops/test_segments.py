"""shift_values, segment_std and segment_broadcast against packing_ops.reference."""

import pytest
import torch
from helpers import MASK_DTYPES, assert_error_within, assert_same, cu_seqlens_of, lengths_strategy, non_contiguous
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
import packing_ops.boundaries
from packing_ops.reference import boundaries
from packing_ops.reference import segments as oracle

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
EDGES = [[], [0], [1], [1, 1, 1], [0, 3, 0], [0, 0]]


# --- shift_values ---


@given(lengths=lengths_strategy, tail=st.integers(0, 5), row=st.booleans(), fill=st.sampled_from([0, -1, 0.25]))
def test_shift_equals_reference(device, lengths, tail, row, fill):
    cu_seqlens = cu_seqlens_of(lengths, device)
    values = torch.randn(sum(lengths) + tail, device=device)
    values = values[None] if row else values
    for dtype in FLOATS:
        shifted = po.shift_values(values.to(dtype), cu_seqlens, fill_value=fill)
        assert_same(shifted, boundaries.shift_values(values.to(dtype), cu_seqlens, fill))
        assert_same(po.shift_values(values.to(dtype), cu_seqlens.long(), fill_value=fill), shifted)


@given(lengths=lengths_strategy, tail=st.integers(0, 5), fill=st.sampled_from([0, 1]))
def test_values_go_where_shift_labels_puts_their_labels(device, lengths, tail, fill):
    cu_seqlens, total = cu_seqlens_of(lengths, device), sum(lengths) + tail
    labels = torch.randint(0, 2, (total,), device=device)
    targets = po.shift_labels(labels, cu_seqlens, ignore_index=fill)
    for dtype in MASK_DTYPES:
        assert_same(po.shift_values(labels.to(dtype), cu_seqlens, fill_value=fill), targets.to(dtype))


def test_no_value_crosses_a_document_and_nan_stays_where_it_is(device):
    nan = float("nan")
    values = torch.tensor([nan, 1.0, nan, 2.0, nan], device=device)
    cu_seqlens = cu_seqlens_of([2, 2], device)
    assert po.shift_values(values, cu_seqlens).tolist() == [1, 0, 2, 0, 0]
    assert po.shift_values(values[:4], cu_seqlens, fill_value=nan).isnan().tolist() == [False, True] * 2


def test_gradient_goes_back_to_the_token(device):
    values = torch.randn(9, dtype=torch.float64, device=device, requires_grad=True)
    cu_seqlens = cu_seqlens_of([2, 0, 1, 4], device)
    po.shift_values(values, cu_seqlens, fill_value=3.0).backward(torch.arange(1.0, 10.0, device=device))
    assert values.grad.tolist() == [0, 1, 0, 0, 4, 5, 6, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.uint64, torch.complex64], ids=str)
def test_shift_and_broadcast_take_any_dtype(dtype):
    """On the CPU: torch's CUDA half knows fewer."""
    cu_seqlens, values = cu_seqlens_of([2, 0, 1]), torch.tensor([1, 2, 3]).to(dtype)
    try:
        torch.where(values.real == 1, values, values)
    except NotImplementedError:
        pytest.skip(f"torch {torch.__version__} has no torch.where of it")
    assert po.shift_values(values, cu_seqlens).real.float().tolist() == [2, 0, 0]
    slots = po.segment_broadcast(values, cu_seqlens, 4)
    assert (slots.dtype, slots.real.float().tolist()) == (dtype, [1, 1, 3, 0])


# --- segment_std ---


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("correction", [0, 1, 2.5])
def test_std_equals_reference(device, dtype, masked, correction):
    cu_seqlens = cu_seqlens_of([0, 1, 300, 5, 0, 2, 2000], device)
    values = (torch.randn(2314, device=device) + 3).to(dtype)
    mask = torch.rand(2314, device=device) > 0.4 if masked else None
    found = po.segment_std(values, cu_seqlens, mask, correction=correction)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = oracle.segment_std(values.double(), cu_seqlens, mask, correction)
    low = oracle.segment_std(values.to(found.dtype), cu_seqlens, mask, correction)
    # torch adds up in another order, in float64 too.
    roundings = 16 if dtype == torch.float64 else 1
    assert_error_within(found, low, exact, floor=roundings * torch.finfo(found.dtype).eps * exact.abs().max().item())
    assert found.isfinite().all()


@given(lengths=lengths_strategy, tail=st.integers(0, 5), seed=st.integers(0, 99))
def test_std_of_any_lengths(device, lengths, tail, seed):
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens, total = cu_seqlens_of(lengths, device), sum(lengths) + tail
    values = torch.randn(total, generator=generator, dtype=torch.float64).to(device)
    mask = torch.randint(0, 2, (total,), generator=generator).to(device)
    for kept in (None, mask):
        found, wanted = po.segment_std(values, cu_seqlens, kept), oracle.segment_std(values, cu_seqlens, kept)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for dtype in MASK_DTYPES:
        assert_same(po.segment_std(values[None], cu_seqlens, mask.to(dtype)[None]), found)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [0.1, 1e30, -3e-7, 0.0])
def test_equal_rewards_have_no_spread(device, dtype, value):
    """What rounding left of them would be divided by itself in (reward - mean) / std."""
    if torch.full((), value, dtype=dtype).isinf():
        pytest.skip("more than the dtype holds")
    values = torch.full((3 * 7 * 11,), value, dtype=dtype, device=device, requires_grad=True)
    std = po.segment_std(values, cu_seqlens_of([7 * 11, 3, 2 * 7 * 11 - 3], device))
    assert std.tolist() == [0, 0, 0]
    std.sum().backward()
    assert values.grad.tolist() == [0] * len(values)


def test_std_of_large_rewards_that_differ_little(device):
    values = torch.tensor([1e6, 1e6 + 0.0625, 1e6 + 0.125], device=device)
    assert po.segment_std(values, cu_seqlens_of([3], device)).tolist() == [0.0625]


def test_what_is_left_out_of_the_std_does_not_matter(device):
    values = torch.tensor([float("nan"), 1.0, float("inf"), 3.0], device=device, requires_grad=True)
    std = po.segment_std(values, cu_seqlens_of([4], device), torch.tensor([0, 1, 0, 1], device=device))
    assert std.item() == pytest.approx(2**0.5)
    std.backward()
    torch.testing.assert_close(values.grad, torch.tensor([0, -(0.5**0.5), 0, 0.5**0.5], device=device))
    assert po.segment_std(values, cu_seqlens_of([3], device)).isnan().all(), "nobody left the NaN out"


def test_padding_takes_no_part_in_the_std(device):
    values = torch.tensor([1.0, 3.0, float("nan"), float("inf")], device=device, requires_grad=True)
    po.segment_std(values, cu_seqlens_of([2], device)).backward()
    torch.testing.assert_close(values.grad, torch.tensor([-(0.5**0.5), 0.5**0.5, 0, 0], device=device))


def test_std_depends_on_the_document_alone(device):
    document = torch.randn(777, device=device)
    alone = po.segment_std(document, cu_seqlens_of([777], device))
    packed = torch.cat([torch.randn(13, device=device), document, torch.full((5,), float("nan"), device=device)])
    assert_same(po.segment_std(packed, cu_seqlens_of([13, 777, 5], device))[1:2], alone)


# --- segment_broadcast ---


@given(
    lengths=lengths_strategy,
    tail=st.integers(0, 5),
    features=st.sampled_from([(), (1,), (3,), (2, 3), (0,)]),
    dtype=st.sampled_from([*MASK_DTYPES]),
)
def test_broadcast_equals_reference(device, lengths, tail, features, dtype):
    cu_seqlens, total = cu_seqlens_of(lengths, device), sum(lengths) + tail
    values = torch.randn(len(lengths), *features, device=device).mul(4).to(dtype)
    slots = po.segment_broadcast(values, cu_seqlens, total)
    assert_same(slots, oracle.segment_broadcast(values, cu_seqlens, total))
    assert_same(po.segment_broadcast(values, cu_seqlens.long()), slots[: sum(lengths)])


@pytest.mark.parametrize("features", [(), (2, 3)])
def test_broadcast_keeps_infinities_to_their_documents(device, features):
    values = torch.tensor([float("inf"), 1.0, float("nan")], device=device)
    values = values.view(3, *(1 for _ in features)).expand(3, *features)
    slots = po.segment_broadcast(values, cu_seqlens_of([2, 1, 1], device), 5)
    assert_same(slots, oracle.segment_broadcast(values, cu_seqlens_of([2, 1, 1], device), 5))


@given(lengths=lengths_strategy, tail=st.integers(0, 3))
def test_broadcast_and_sum_are_each_others_gradient(device, lengths, tail):
    cu_seqlens, total = cu_seqlens_of(lengths, device), sum(lengths) + tail
    values = torch.randn(len(lengths), device=device, requires_grad=True)
    gradient = torch.randn(total, device=device)
    po.segment_broadcast(values, cu_seqlens, total).backward(gradient)
    assert_same(values.grad, po.segment_sum(gradient, cu_seqlens))


# --- derivatives, torch.compile ---


DERIVED = {
    "shift": lambda x, cu: po.shift_values(x, cu),
    "std": lambda x, cu: po.segment_std(x, cu, correction=0),
    "std of some": lambda x, cu: po.segment_std(x, cu, torch.arange(len(x), device=x.device) % 3),
    "broadcast": lambda x, cu: po.segment_broadcast(x[: len(cu) - 1], cu, 11),
    "broadcast of features": lambda x, cu: po.segment_broadcast(x[: 2 * len(cu) - 2].view(-1, 2), cu, 11),
}


@pytest.mark.parametrize("name", DERIVED)
def test_every_derivative(device, name):
    cu_seqlens = cu_seqlens_of([2, 0, 6], device)
    x = torch.randn(9, dtype=torch.float64, device=device, requires_grad=True)
    f = lambda x: DERIVED[name](x * x, cu_seqlens)  # noqa: E731
    assert torch.autograd.gradcheck(f, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, x, check_fwd_over_rev=True, check_rev_over_rev=True)
    leaf = x.detach().clone().requires_grad_()
    (wanted,) = torch.autograd.grad(f(leaf).square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda x: f(x).square().sum())(x.detach()), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_types(device, dtype):
    cu_seqlens = cu_seqlens_of([2, 3], device)
    for call in (
        lambda x: po.shift_values(x, cu_seqlens),
        lambda x: po.segment_std(x, cu_seqlens),
        lambda x: po.segment_broadcast(x[:2], cu_seqlens),
        lambda x: po.segment_broadcast(x[:4].view(2, 2), cu_seqlens),
    ):
        x = torch.arange(5, dtype=dtype, device=device).requires_grad_()
        exact = x.detach().double().requires_grad_()
        call(x).sum().backward()
        call(exact).sum().backward()
        assert x.grad.dtype == dtype
        assert_same(x.grad, exact.grad.to(dtype))


def test_compiles_fullgraph_with_dynamic_sizes(device, fresh_compile):
    def step(rewards, values, cu_seqlens):
        mean, std = po.segment_sum(values, cu_seqlens, average=True), po.segment_std(values, cu_seqlens)
        slots = po.segment_broadcast(torch.stack([mean / (std + 1e-6), rewards], dim=1), cu_seqlens, len(values))
        return po.shift_values(slots[:, 0] * slots[:, 1], cu_seqlens, fill_value=0.5)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([3, 5], [2, 9, 4], [1, 1, 1, 20]):
        cu_seqlens, rewards = cu_seqlens_of(lengths, device), torch.randn(len(lengths), device=device)
        eager = torch.randn(sum(lengths), device=device, requires_grad=True)
        traced = eager.detach().clone().requires_grad_()
        step(rewards, eager, cu_seqlens).sum().backward()
        compiled(rewards, traced, cu_seqlens).sum().backward()
        assert_same(traced.grad, eager.grad)


# --- edges and bad input ---


@pytest.mark.parametrize("lengths", EDGES, ids=str)
def test_no_tokens_one_token_no_documents(device, lengths):
    cu_seqlens = cu_seqlens_of(lengths, device)
    values = torch.randn(sum(lengths), device=device, requires_grad=True)
    std = po.segment_std(values, cu_seqlens)
    slots = po.segment_broadcast(std, cu_seqlens)
    shifted = po.shift_values(values[None], cu_seqlens)
    (std.sum() + slots.sum() + shifted.sum()).backward()
    assert (std.shape, slots.shape, shifted.shape) == ((len(lengths),), values.shape, (1, len(values)))
    assert values.grad.isfinite().all()
    assert po.segment_broadcast(std[:, None].expand(-1, 2), cu_seqlens).shape == (len(values), 2)


def test_strides(device):
    cu_seqlens = cu_seqlens_of([2, 4], device)
    values, features = torch.randn(6, device=device), torch.randn(3, 2, device=device).T
    assert_same(po.shift_values(non_contiguous(values), cu_seqlens), po.shift_values(values, cu_seqlens))
    assert_same(po.segment_std(non_contiguous(values), cu_seqlens), po.segment_std(values, cu_seqlens))
    for of_documents in (non_contiguous(values[:2]), features):
        slots = po.segment_broadcast(of_documents, cu_seqlens)
        assert_same(slots, po.segment_broadcast(of_documents.contiguous(), cu_seqlens))


def bad_calls(device):
    cu_seqlens, values = cu_seqlens_of([2, 3], device), torch.randn(5, device=device)
    return {
        "shift: a batch": (
            lambda: po.shift_values(values.expand(2, 5), cu_seqlens),
            r"values: expected \[total\] or \[1, total\], got float32 \[2, 5\]",
        ),
        "shift: a number": (lambda: po.shift_values(values[0], cu_seqlens), r"values: expected .*got float32 \[\]"),
        "shift: a list": (lambda: po.shift_values([1.0], cu_seqlens), r"values: expected .*got \[1.0\] \(list\)"),
        "shift: fill": (
            lambda: po.shift_values(values.long(), cu_seqlens, fill_value=0.5),
            r"fill_value: expected a number that int64 holds like values, got 0\.5",
        ),
        "shift: fill of half": (
            lambda: po.shift_values(values.half(), cu_seqlens, fill_value=1e6),
            "fill_value: .*float16",
        ),
        "shift: short": (lambda: po.shift_values(values[:4], cu_seqlens), "cu_seqlens: .*total"),
        "shift: boundaries": (
            lambda: po.shift_values(values, cu_seqlens.float()),
            "cu_seqlens: expected int32.*float32",
        ),
        "shift: a list of boundaries": (
            lambda: po.shift_values(values, [0, 2, 5]),
            r"cu_seqlens: expected a tensor, got \[0, 2, 5\]",
        ),
        "std: integers": (
            lambda: po.segment_std(values.long(), cu_seqlens),
            "values: expected a floating dtype, got int64",
        ),
        "std: features": (
            lambda: po.segment_std(torch.randn(5, 2, device=device), cu_seqlens),
            r"values: expected \[total\] or \[1, total\], got float32 \[5, 2\]",
        ),
        "std: mask": (
            lambda: po.segment_std(values, cu_seqlens, values[:4]),
            r"mask: expected 5 elements like values, got float32 \[4\]",
        ),
        "std: short": (lambda: po.segment_std(values[:4], cu_seqlens), "cu_seqlens: .*total"),
        "std: correction": (
            lambda: po.segment_std(values, cu_seqlens, correction=-1),
            "correction: expected a number of at least 0, got -1",
        ),
        "std: no correction": (lambda: po.segment_std(values, cu_seqlens, correction=None), "correction: .*got None"),
        "broadcast: tokens": (
            lambda: po.segment_broadcast(values, cu_seqlens),
            r"values: expected \[num_documents=2, ...\] like cu_seqlens, got float32 \[5\]",
        ),
        "broadcast: a number": (lambda: po.segment_broadcast(values[0], cu_seqlens), r"values: .*got float32 \[\]"),
        "broadcast: total": (lambda: po.segment_broadcast(values[:2], cu_seqlens, 4), "cu_seqlens: .*total"),
        "broadcast: total of integers": (
            lambda: po.segment_broadcast(values[:2].long(), cu_seqlens, 4),
            "cu_seqlens: .*total",
        ),
    }


@pytest.mark.parametrize("case", bad_calls("cpu"))
def test_bad_input_is_named(device, case):
    call, message = bad_calls(device)[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_a_fraction_of_slots_is_named():
    with pytest.raises(TypeError, match=r"total: expected an integer, got 5\.5"):
        po.segment_broadcast(torch.ones(2), cu_seqlens_of([2, 3]), 5.5)
