"""segment_sum and segment_mean of rows with several features, [total, ...]; of [total] see test_boundaries.py."""

import pytest
import torch
from helpers import assert_error_within, assert_same, cu_seqlens_of, lengths_strategy, non_contiguous
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.reference import boundaries as oracle

ops = torch.ops.packing_ops
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
MASKS = [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16]


def test_worked_values(device):
    hidden = torch.tensor([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0], [9.0, 9.0]], device=device)
    cu_seqlens = cu_seqlens_of([2, 0, 1], device)
    assert po.segment_sum(hidden, cu_seqlens).tolist() == [[3, 11], [0, 0], [3, 7]]
    assert po.segment_mean(hidden, cu_seqlens).tolist() == [[1.5, 5.5], [0, 0], [3, 7]]
    mask = torch.tensor([0, 1, 0, 1], device=device)
    assert po.segment_mean(hidden, cu_seqlens, mask).tolist() == [[2, 6], [0, 0], [0, 0]]
    assert po.segment_mean(hidden[:, 0], cu_seqlens).tolist() == [1.5, 0, 3]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("features", [(3,), (40,), (2, 33)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_equals_reference(device, dtype, features, masked):
    lengths = [0, 1, 300, 5, 0, 2000]
    cu_seqlens = cu_seqlens_of(lengths, device)
    values = torch.randn(sum(lengths) + 4, *features, device=device).to(dtype)
    mask = torch.rand(len(values), device=device) > 0.4 if masked else None
    for average in (False, True):
        sums = po.segment_sum(values, cu_seqlens, mask, average)
        assert sums.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        exact = oracle.segment_sum(values.double(), cu_seqlens, mask, average)
        low = oracle.segment_sum(values.to(sums.dtype), cu_seqlens, mask, average)
        one_rounding = torch.finfo(sums.dtype).eps * exact.abs().max().item()
        assert_error_within(sums, low, exact, floor=one_rounding)
        if average:
            assert_same(po.segment_mean(values, cu_seqlens, mask), sums)


@given(lengths=lengths_strategy, features=st.integers(0, 70), tail=st.integers(0, 5), average=st.booleans())
def test_each_feature_is_summed_on_its_own(device, lengths, features, tail, average):
    """In float64 the order of additions is all that a row and its columns may differ by; nothing else matters."""
    values = torch.randint(-9, 9, (sum(lengths) + tail, features), device=device).double()
    cu_seqlens = cu_seqlens_of(lengths, device)
    rows = po.segment_sum(values, cu_seqlens, None, average)
    assert rows.shape == (len(lengths), features)
    for f in range(features):
        assert_same(rows[:, f], po.segment_sum(values[:, f], cu_seqlens, None, average))


def test_the_sum_depends_on_the_document_alone(device):
    document = torch.randn(777, 50, device=device)
    alone = po.segment_sum(document, cu_seqlens_of([777], device))
    packed = torch.cat([torch.randn(13, 50, device=device), document, torch.full((5, 50), float("nan"), device=device)])
    assert_same(po.segment_sum(packed, cu_seqlens_of([13, 777, 5], device))[1:2], alone)
    assert_same(po.segment_sum(packed, cu_seqlens_of([13, 777], device))[1:2], alone)
    assert_same(po.segment_sum(non_contiguous(document), cu_seqlens_of([777], device)), alone)


def test_masked_rows_are_left_out_whatever_they_hold(device):
    values = torch.tensor([[float("nan"), 1.0], [2.0, float("inf")]], device=device)
    mask = torch.tensor([False, True], device=device)
    assert po.segment_sum(values, cu_seqlens_of([2], device), mask).tolist() == [[2.0, float("inf")]]


@pytest.mark.parametrize("dtype", MASKS, ids=str)
def test_masks_of_any_kind(device, dtype):
    values, cu_seqlens = torch.randn(6, device=device), cu_seqlens_of([2, 4], device)
    mask = torch.tensor([0, 1, 1, 0, 1, 1], device=device)
    assert_same(po.segment_sum(values, cu_seqlens, mask.to(dtype)), po.segment_sum(values, cu_seqlens, mask == 1))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients(device, average, masked):
    values = torch.randn(9, 2, 3, dtype=torch.float64, device=device, requires_grad=True)
    cu_seqlens = cu_seqlens_of([2, 0, 5], device)
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 1], device=device) if masked else None

    def call(v):
        return po.segment_sum(v, cu_seqlens, mask, average)

    assert torch.autograd.gradcheck(call, values, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda v: call(v * v), values)


def test_gradient_of_wide_rows_in_half_types(device):
    values = torch.randn(700, 70, device=device, dtype=torch.bfloat16, requires_grad=True)
    cu_seqlens = cu_seqlens_of([3, 0, 600, 7], device)
    weights = torch.randn(4, 70, device=device)
    found, wanted = (
        torch.autograd.grad((call(values, cu_seqlens, None, True) * weights).sum(), values)[0]
        for call in (po.segment_sum, lambda v, *rest: oracle.segment_sum(v.float(), *rest))
    )
    torch.testing.assert_close(found, wanted)
    assert not found[610:].any()


def op_samples(device):
    cu_seqlens = cu_seqlens_of([2, 0, 3], device)
    values = torch.randn(6, 4, device=device, requires_grad=True)
    mask = torch.tensor([1, 0, 1, 1, 1, 0], dtype=torch.bool, device=device)
    return [
        (ops.segment_sum, (values, cu_seqlens, None, False)),
        (ops.segment_sum, (non_contiguous(values), cu_seqlens.long(), mask, True)),
        (ops.segment_sum_backward, (torch.randn(3, 4, device=device), cu_seqlens, mask, True, 6, torch.bfloat16)),
    ]


@pytest.mark.parametrize("sample", range(3))
def test_opcheck(device, sample):
    torch.library.opcheck(*op_samples(device)[sample])


def test_compiles_fullgraph_with_dynamic_sizes(device, fresh_compile):
    def pooled(hidden, cu_seqlens, mask):
        return po.segment_mean(hidden * 2, cu_seqlens, mask) + po.segment_sum(hidden, cu_seqlens)

    compiled = torch.compile(pooled, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths, features in (([3, 5], 4), ([2, 9, 4], 6), ([1, 1, 1, 20], 33)):
        cu_seqlens = cu_seqlens_of(lengths, device)
        leaves = [torch.randn(sum(lengths), features, device=device, requires_grad=True)]
        leaves.append(leaves[0].detach().clone().requires_grad_())
        mask = torch.arange(sum(lengths), device=device) % 3
        for call, leaf in zip((pooled, compiled), leaves, strict=True):
            call(leaf, cu_seqlens, mask).square().sum().backward()
        assert_same(leaves[1].grad, leaves[0].grad)


def bad_calls(device):
    cu_seqlens = cu_seqlens_of([2, 3], device)
    values = torch.randn(5, 4, device=device)
    return {
        "rank": (
            lambda: po.segment_sum(values[0, 0], cu_seqlens),
            r"values: expected \[total, ...\], got float32 \[\]",
        ),
        "short": (lambda: po.segment_sum(values[:4], cu_seqlens), "cu_seqlens: expected to end at most at total"),
        "mask per feature": (
            lambda: po.segment_sum(values, cu_seqlens, values > 0),
            r"mask: expected \[total\] like values = \[5\], got bool \[5, 4\]",
        ),
        "complex mask": (
            lambda: po.segment_sum(values, cu_seqlens, torch.ones(5, dtype=torch.complex64, device=device)),
            r"mask: expected bool, integer or floating, got complex64 \[5\]",
        ),
        "complex": (
            lambda: po.segment_mean(values.to(torch.complex128), cu_seqlens),
            r"values: expected float32, bfloat16, float16 or float64, got complex128 \[5, 4\]",
        ),
    }


@pytest.mark.parametrize("case", bad_calls("cpu"))
def test_bad_input_is_named(device, case):
    call, message = bad_calls(device)[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_row_with_a_batch_of_one_is_named():
    """On CUDA, where the end of cu_seqlens is not known, it is a fault of a later call."""
    with pytest.raises(ValueError, match=r"values: expected \[total, ...\], got float32 \[1, 5\] on cpu.*values\[0\]"):
        po.segment_sum(torch.ones(1, 5), cu_seqlens_of([2, 3]))
    assert po.segment_sum(torch.ones(1, 5), cu_seqlens_of([1])).tolist() == [[1.0] * 5]
