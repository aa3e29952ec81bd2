"""packing_ops.padding against packing_ops.reference.padding."""

import pytest
import torch
from helpers import MASK_DTYPES, assert_same, drawn_mask, mask_of, masks, non_contiguous
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops._runtime import gate
from packing_ops.reference import padding as oracle

ops = torch.ops.packing_ops
DTYPES = [torch.bool, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES += [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]


def values_of(shape, dtype, device="cpu"):
    """Distinct bytes, NaN patterns among them; what is compared is ``bits``."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, size), dtype=torch.uint8, device=device)
    return raw.view(dtype)[..., 0]


def bits(tensor):
    return tensor.contiguous()[..., None].view(torch.uint8)


def assert_unpadded(actual, expected):
    packed, indices, cu_seqlens, max_seqlen, seqused = actual
    assert_same(packed, expected[0])
    assert_same(indices, expected[1])
    assert_same(cu_seqlens, expected[2])
    assert isinstance(max_seqlen, int)
    assert max_seqlen == expected[3]
    assert_same(seqused, expected[4])


# --- unpad and pad ---


def test_worked_values(device):
    hidden = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 4.0]], device=device)
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]], device=device)
    packed, indices, cu_seqlens, max_seqlen, seqused = po.unpad_input(hidden, mask)
    assert packed.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert (indices.dtype, indices.tolist()) == (torch.int64, [0, 1, 3, 5])
    assert (cu_seqlens.dtype, cu_seqlens.tolist()) == (torch.int32, [0, 2, 4])
    assert (seqused.dtype, seqused.tolist()) == (torch.int32, [2, 2])
    assert max_seqlen == 2
    assert po.pad_input(packed, indices, 2, 3).tolist() == [[1.0, 2.0, 0.0], [3.0, 0.0, 4.0]]


def test_unused_slots_are_packed_but_not_counted_as_used(device):
    hidden = torch.arange(6.0, device=device).reshape(2, 3)
    mask = torch.tensor([[1, 1, 0], [0, 1, 0]], device=device)
    unused = torch.tensor([[0, 0, 1], [1, 0, 0]], device=device)
    packed, indices, cu_seqlens, max_seqlen, seqused = po.unpad_input(hidden, mask, unused)
    assert packed.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert indices.tolist() == [0, 1, 2, 3, 4]
    assert (cu_seqlens.tolist(), max_seqlen, seqused.tolist()) == ([0, 3, 5], 3, [2, 1])


@given(
    drawn=masks, mask_dtype=st.sampled_from(MASK_DTYPES), unused=st.booleans(), row=st.sampled_from([(), (3,), (2, 5)])
)
def test_unpad_equals_reference(device, drawn, mask_dtype, unused, row):
    mask = drawn_mask(drawn, device)
    unused_mask = (1 - mask) * (torch.rand(mask.shape, device=device) < 0.5) if unused else None
    hidden = torch.randn(*mask.shape, *row, device=device)
    expected = oracle.unpad_input(hidden, mask, unused_mask)
    actual = po.unpad_input(hidden, mask.to(mask_dtype), None if unused_mask is None else unused_mask.to(mask_dtype))
    assert_unpadded(actual, expected)
    packed, indices, *_ = actual
    padded = po.pad_input(packed, indices, *mask.shape)
    assert_same(padded, oracle.pad_input(packed, indices, *mask.shape))
    real = mask if unused_mask is None else mask + unused_mask
    assert_same(padded, hidden.where(real.reshape(*mask.shape, *[1] * len(row)) != 0, torch.zeros_like(hidden)))


def test_anything_but_zero_is_real(device):
    """Document numbers, large and negative values, NaN: counted once; minus zero is zero."""
    hidden = torch.arange(4.0, device=device)[None]
    for values in ([1, 2, 2, 0], [2**32, -1, 256, 0]):
        packed, _, cu_seqlens, *_ = po.unpad_input(hidden, torch.tensor([values], device=device))
        assert (packed.tolist(), cu_seqlens.tolist()) == ([0.0, 1.0, 2.0], [0, 3])
    values = torch.tensor([[float("nan"), 1e-7, -0.0, 0.0]], device=device)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert po.unpad_input(hidden, values.to(dtype))[0].tolist() == [0.0, 1.0]


def test_overlapping_masks_count_once(device):
    ones = torch.ones(1, 3, device=device, dtype=torch.bool)
    _, _, cu_seqlens, max_seqlen, seqused = po.unpad_input(torch.randn(1, 3, device=device), ones, ones.int())
    assert (cu_seqlens.tolist(), max_seqlen, seqused.tolist()) == ([0, 3], 3, [3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [(), (1,), (7,), (2, 3), (64,), (0,)])
def test_every_dtype_and_row_size_moves_bytes(device, dtype, row):
    mask = mask_of("holes", 3, 50, device)
    hidden = values_of((3, 50, *row), dtype, device)
    packed, indices, *_ = po.unpad_input(hidden, mask)
    assert packed.dtype == dtype
    real = mask.bool()
    assert_same(bits(packed), bits(hidden)[real])
    padded = po.pad_input(packed, indices, 3, 50)
    expected = bits(hidden).clone()
    expected[~real] = 0
    assert_same(bits(padded), expected)


@pytest.mark.parametrize("row", [(), (2,), (37,), (300,)])
@pytest.mark.parametrize("kind", ["right", "left", "holes"])
def test_large_enough_for_several_threads(device, kind, row):
    mask = mask_of(kind, 40, 1000, device)
    hidden = torch.randn(40, 1000, *row, device=device)
    actual = po.unpad_input(hidden, mask)
    assert_unpadded(actual, oracle.unpad_input(hidden, mask))
    assert_same(po.pad_input(*actual[:2], 40, 1000), oracle.pad_input(*actual[:2], 40, 1000))


def strided_views(device):
    base = torch.randn(6, 10, 8, 4, device=device)
    return {
        "transposed": base.transpose(0, 1),
        "columns": base[:, 2:9],
        "every other column": base[:, ::2],
        "every other row": base[::2],
        "one row": base[1:2, ::3],
        "one column": base[:, 3:4],
        "part of each row": base[:, :, 1:3],
        "inner transposed": base.transpose(2, 3),
        "inner strided": base[..., ::2],
        "expanded": base[:, :1].expand(6, 10, 8, 4),
        "expanded inside": base[..., :1].expand(6, 10, 8, 4),
        "words": base[:, :, 0, 0],
        "words transposed": base[:, :, 0, 0].t(),
    }


@pytest.mark.parametrize("view", strided_views("cpu"))
def test_strided_input(device, view):
    hidden = strided_views(device)[view]
    mask = mask_of("holes", *hidden.shape[:2], device)
    strided_mask = non_contiguous(mask)
    assert_unpadded(po.unpad_input(hidden, strided_mask), oracle.unpad_input(hidden.contiguous(), mask))
    packed = hidden[0]
    indices = mask_of("holes", 1, 200, device).flatten().nonzero().flatten()[: len(packed)]
    expected = oracle.scatter_rows(packed.contiguous(), indices, 4, 50)
    assert_same(po.pad_input(packed, non_contiguous(indices), 4, 50), expected)


def test_conjugate_view(device):
    hidden = torch.randn(2, 3, 4, dtype=torch.complex64, device=device).conj()
    packed, indices, *_ = po.unpad_input(hidden, torch.ones(2, 3, device=device))
    assert_same(packed, hidden.flatten(0, 1).resolve_conj())
    assert_same(po.pad_input(packed.conj(), indices, 2, 3), hidden.conj().resolve_conj())


@given(drawn=masks, seed=st.integers(0, 99), row=st.sampled_from([(), (9,)]))
def test_minus_one_anywhere_is_a_zero_row(device, drawn, seed, row):
    mask = drawn_mask(drawn, device)
    torch.manual_seed(seed)
    rows = mask.flatten().nonzero().flatten()
    holes = torch.rand(rows.numel() + 5) < 0.3
    indices = torch.full((holes.numel(),), -1, device=device)
    indices[(~holes).nonzero().flatten()[: rows.numel()].to(device)] = rows[: int((~holes).sum())]
    total = indices.numel()
    hidden = torch.randn(*mask.shape, *row, device=device)
    packed = ops.gather_rows(hidden, indices, total)
    assert_same(packed, oracle.gather_rows(hidden, indices, total))
    assert (packed[indices < 0] == 0).all()
    packed = torch.randn_like(packed)
    assert_same(ops.scatter_rows(packed, indices, *mask.shape), oracle.scatter_rows(packed, indices, *mask.shape))


def test_minus_one_between_many_rows(device):
    """Several threads, each starting somewhere among the -1 entries."""
    indices = torch.arange(40_000, device=device)
    indices[torch.rand(40_000, device=device) < 0.5] = -1
    indices[5_000:25_000] = -1
    packed = torch.randn(40_000, 24, device=device)
    assert_same(ops.scatter_rows(packed, indices, 4, 10_000), oracle.scatter_rows(packed, indices, 4, 10_000))
    hidden = packed.reshape(4, 10_000, 24)
    assert_same(ops.gather_rows(hidden, indices, 40_000), oracle.gather_rows(hidden, indices, 40_000))


# --- known sizes ---


def test_known_sizes_give_the_same(device):
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]], device=device)
    hidden = torch.randn(3, 4, 5, device=device)
    expected = po.unpad_input(hidden, mask)
    assert_unpadded(po.unpad_input(hidden, mask, lengths=[2, 0, 3]), expected)
    assert_unpadded(po.unpad_input(hidden, mask, lengths=torch.tensor([2, 0, 3])), expected)
    assert_unpadded(po.unpad_input(hidden, mask, total=5, max_seqlen=3), expected)
    assert po.unpad_input(hidden, mask, total=5)[3] == 4


def test_total_larger_than_needed_is_zero_rows(device):
    mask = torch.tensor([[1, 0, 0], [1, 1, 0]], device=device)
    hidden = torch.randn(2, 3, 7, device=device, requires_grad=True)
    packed, indices, cu_seqlens, *_ = po.unpad_input(hidden, mask, total=6)
    assert indices.tolist() == [0, 3, 4, -1, -1, -1]
    assert cu_seqlens.tolist() == [0, 1, 3]
    assert (packed[3:] == 0).all()
    assert_same(po.pad_input(packed, indices, 2, 3), hidden.detach() * mask[..., None])
    (gradient,) = torch.autograd.grad(packed.sum(), hidden)
    assert_same(gradient, mask[..., None].expand(2, 3, 7).float())


def test_known_sizes_are_checked_where_that_is_free():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    with pytest.raises(ValueError, match=r"lengths: expected the masks' \[2, 1\], got \[1, 2\]"):
        po.unpad_input(torch.randn(2, 3), mask, lengths=[1, 2])
    with pytest.raises(ValueError, match="max_seqlen: expected at least the longest row = 2, got 1"):
        po.unpad_inputs({"ids": mask}, mask, total=3, max_seqlen=1)


# --- several tensors ---


@given(drawn=masks, count=st.integers(0, 19))
def test_many_tensors_equal_one_at_a_time(device, drawn, count):
    mask = drawn_mask(drawn, device)
    rows = [(), (3,), (2, 2)]
    tensors = {f"t{i}": values_of((*mask.shape, *rows[i % 3]), DTYPES[i % 7], device) for i in range(count)}
    packed, *layout = po.unpad_inputs(tensors, mask)
    assert list(packed) == list(tensors)
    for name, tensor in tensors.items():
        alone = po.unpad_input(tensor, mask)
        assert_same(bits(packed[name]), bits(alone[0]))
        assert_unpadded((packed[name].isnan(), *layout), (alone[0].isnan(), *alone[1:]))
    padded = po.pad_inputs(packed, layout[0], *mask.shape)
    assert list(padded) == list(tensors)
    for name, tensor in packed.items():
        assert_same(bits(padded[name]), bits(po.pad_input(tensor, layout[0], *mask.shape)))


def test_many_with_known_sizes(device):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], device=device)
    ids = torch.arange(6, device=device).reshape(2, 3)
    for known in ({"lengths": [2, 1]}, {"total": 3, "max_seqlen": 2}):
        packed, indices, _, max_seqlen, _ = po.unpad_inputs({"ids": ids}, mask, **known)
        assert (packed["ids"].tolist(), indices.tolist(), max_seqlen) == ([0, 1, 3], [0, 1, 3], 2)


def test_many_only_give_grad_where_it_is_asked(device):
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]], device=device)
    tensors = {
        "ids": torch.arange(6, device=device).reshape(2, 3),
        "hidden": torch.randn(2, 3, 4, device=device, requires_grad=True),
        "constant": torch.randn(2, 3, device=device),
        "logp": torch.randn(2, 3, device=device, requires_grad=True),
    }
    packed, indices, *_ = po.unpad_inputs(tensors, mask)
    assert [tensor.requires_grad for tensor in packed.values()] == [False, True, False, True]
    padded = po.pad_inputs(packed, indices, 2, 3)
    assert [tensor.requires_grad for tensor in padded.values()] == [False, True, False, True]
    (padded["hidden"] * 3).sum().backward()
    assert_same(tensors["hidden"].grad, 3.0 * mask[..., None].expand(2, 3, 4))


def test_many_op_with_mixed_grads(device):
    """The op itself, where integers, constants and parameters share a call."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]], device=device)
    indices = torch.tensor([0, 1, 3, 5], device=device)
    ids = torch.arange(6, device=device).reshape(2, 3)
    weight = torch.randn(2, 3, device=device, requires_grad=True)
    packed = ops.gather_rows_many([ids, weight, weight.detach()], indices, 4)
    padded = ops.scatter_rows_many([packed[0], packed[1]], indices, 2, 3)
    padded[1].sum().backward()
    assert_same(weight.grad, mask.float())


# --- gradients ---


@pytest.mark.parametrize("row", [(), (3,)])
def test_gradients(device, row):
    mask = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0]], device=device)
    hidden = torch.randn(3, 3, *row, dtype=torch.float64, device=device, requires_grad=True)
    packed = torch.randn(3, *row, dtype=torch.float64, device=device, requires_grad=True)
    indices = torch.tensor([1, 2, 3], device=device)
    assert torch.autograd.gradcheck(lambda h: po.unpad_input(h, mask)[0], hidden)
    assert torch.autograd.gradcheck(lambda p: po.pad_input(p, indices, 3, 3), packed)
    assert torch.autograd.gradgradcheck(lambda h: po.unpad_input(h, mask)[0] ** 2, hidden)
    many = lambda h: tuple(po.unpad_inputs({"a": h, "b": h * 2}, mask)[0].values())  # noqa: E731
    assert torch.autograd.gradcheck(many, hidden)
    many = lambda p: tuple(po.pad_inputs({"a": p, "b": p * 2}, indices, 3, 3).values())  # noqa: E731
    assert torch.autograd.gradcheck(many, packed)


def test_gradient_of_unpad_is_pad(device):
    mask = mask_of("both", 4, 9, device)
    hidden = torch.randn(4, 9, 5, device=device, requires_grad=True)
    packed, indices, *_ = po.unpad_input(hidden, mask)
    gradient = torch.randn_like(packed)
    assert_same(torch.autograd.grad(packed, hidden, gradient)[0], po.pad_input(gradient, indices, 4, 9))
    # sum() sends an expanded gradient
    (ones,) = torch.autograd.grad(po.unpad_input(hidden, mask)[0].sum(), hidden)
    assert_same(ones, mask[..., None].expand(4, 9, 5).float())


# --- torch.library ---


def op_samples(device):
    indices = torch.tensor([0, 2, 3, 5, -1], device=device)
    mask = torch.tensor([[1, 0, 1], [1, 0, 1]], device=device)
    hidden = torch.randn(2, 3, 4, device=device)
    packed = torch.randn(5, 4, device=device)
    grad = torch.randn(2, 3, 4, device=device, requires_grad=True)
    packed_grad = torch.randn(5, 4, device=device, requires_grad=True)
    return [
        (ops.unpad_rows, ([hidden, hidden > 0], mask, None)),
        (ops.unpad_rows, ([grad, non_contiguous(grad)], mask, non_contiguous(mask))),
        (ops.unpad_layout, (mask, None, True)),
        (ops.unpad_layout, (non_contiguous(mask).bool(), mask.float(), False)),
        (ops.gather_rows, (grad, indices, 5)),
        (ops.gather_rows, (torch.randn(3, 2, 4, device=device).transpose(0, 1).requires_grad_(), indices, 4)),
        (ops.gather_rows, (non_contiguous(grad), non_contiguous(indices), 5)),
        (ops.gather_rows, (mask, indices, 4)),
        (ops.gather_rows_many, ([hidden, mask], indices, 5)),
        (ops.gather_rows_many, ([grad, non_contiguous(grad)], indices, 5)),
        (ops.scatter_rows, (packed_grad, indices, 2, 3)),
        (ops.scatter_rows, (non_contiguous(packed_grad), indices, 3, 2)),
        (ops.scatter_rows_many, ([packed, packed[:, 0]], indices, 2, 3)),
        (ops.scatter_rows_many, ([packed_grad, packed_grad[:, :2]], indices, 2, 3)),
    ]


@pytest.mark.parametrize("sample", range(14))
def test_opcheck(device, sample):
    op, arguments = op_samples(device)[sample]
    torch.library.opcheck(op, arguments)


def step(hidden, weight, ids, mask, total):
    known = {} if total is None else {"total": total}
    packed, indices, _, _, seqused = po.unpad_input(hidden * weight, mask, **known)
    more, *_ = po.unpad_inputs({"ids": ids, "scores": hidden[..., 0]}, mask, **known)
    packed = packed**2 * more["ids"][:, None] + more["scores"][:, None]
    padded = po.pad_inputs({"hidden": packed, "ids": more["ids"]}, indices, *mask.shape)
    padded["hidden"] = padded["hidden"] + po.pad_input(packed, indices, *mask.shape)
    return (padded["hidden"] * padded["ids"][..., None]).sum() / seqused.sum()


@pytest.mark.parametrize("known", [True, False])
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_compiles_fullgraph_with_dynamic_sizes(device, fresh_compile, known):
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, seqlen, width in ((2, 5, 3), (3, 8, 4), (4, 17, 6)):
        mask = mask_of("holes", batch, seqlen, device)
        ids = torch.randint(1, 9, mask.shape, device=device)
        total = int(mask.sum()) if known else None
        weight = torch.randn(width, device=device, requires_grad=True)
        eager = torch.randn(batch, seqlen, width, device=device, requires_grad=True)
        traced = eager.detach().clone().requires_grad_()
        expected = torch.autograd.grad(step(eager, weight, ids, mask, total), (eager, weight))
        actual = torch.autograd.grad(compiled(traced, weight, ids, mask, total), (traced, weight))
        torch.testing.assert_close(actual, expected)


# --- bad input ---


def bad_calls(device):
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]], device=device)
    hidden, packed = torch.randn(2, 3, 4, device=device), torch.randn(4, 4, device=device)
    indices = torch.tensor([0, 1, 3, 5], device=device)
    twice = torch.tensor([1, -1, 1], device=device)
    ids = torch.arange(6, device=device).reshape(2, 3)
    wrong = mask.to(torch.complex64)
    # fmt: off
    return {
        "mask shape": (lambda: po.unpad_input(hidden, mask[:, :2]), r"hidden_states: expected \[batch, seqlen, ...\] = \[2, 2\] like attention_mask, got .*\[2, 3, 4\]"),
        "mask rank": (lambda: po.unpad_input(hidden, mask[0]), r"hidden_states: expected .* = \[3\] like attention_mask"),
        "both ranks": (lambda: po.unpad_input(mask[0], mask[0]), r"attention_mask: expected \[batch, seqlen\], got int64"),
        "mask dtype": (lambda: po.unpad_input(hidden, wrong), "attention_mask: expected bool, uint8, .* or float64, got"),
        "unused shape": (lambda: po.unpad_input(hidden, mask, mask[:, :2]), r"unused_mask: expected \[batch, seqlen\] like attention_mask = \[2, 3\], got int64 \[2, 2\]"),
        "unused dtype": (lambda: po.unpad_input(hidden, mask, wrong), "unused_mask: expected bool"),
        "device": (lambda: po.unpad_input(hidden.to("meta"), mask), rf"hidden_states: expected on {mask.device} like attention_mask, got meta"),
        "lengths count": (lambda: po.unpad_input(hidden, mask, lengths=[2]), "lengths: expected one per batch row = 2, got 1"),
        "total": (lambda: po.unpad_input(hidden, mask, total=7), r"total: expected 0 to batch \* seqlen = 6, got 7"),
        "total negative": (lambda: po.unpad_input(hidden, mask, total=-1), "total: expected 0 to .*got -1"),
        "total too small": (lambda: po.unpad_input(hidden, mask, total=3), "indices: expected no more rows than total=3, got row 5 after them"),
        "one of many": (lambda: po.unpad_inputs({"ids": ids, "labels": ids[:, :2]}, mask), r"labels: expected \[batch, seqlen, ...\] = \[2, 3\] like attention_mask, got int64 \[2, 2\]"),
        "many shapes": (lambda: gate.gather_rows_many([ids, ids[:, :2]], indices, 4), r"input: expected the same \[batch, seqlen\] in every tensor, got int64 \[2, 3\] .* and int64 \[2, 2\]"),
        "many totals": (lambda: po.pad_inputs({"a": packed, "b": packed[:3]}, indices, 2, 3), "packed: expected the same total in every tensor"),
        "input rank": (lambda: gate.gather_rows(indices, indices, 4), r"input: expected \[batch, seqlen, ...\], got int64 \[4\]"),
        "packed rank": (lambda: po.pad_input(packed[0, 0], indices, 2, 3), r"packed: expected \[total, ...\], got float32 \[\]"),
        "indices dtype": (lambda: po.pad_input(packed, indices.int(), 2, 3), "indices: expected int64, got int32"),
        "indices rank": (lambda: po.pad_input(packed, indices[None], 2, 3), "indices: expected 1 dimensions, got int64"),
        "indices short": (lambda: po.pad_input(packed, indices[:3], 2, 3), "indices: expected at least total=4 entries"),
        "indices long": (lambda: po.pad_input(packed[:3], indices, 2, 3), "indices: expected no more rows than total=3, got row 5 after them"),
        "indices order": (lambda: po.pad_input(packed, indices.flip(0), 2, 3), "indices: expected strictly increasing rows, got 3 after 5 at index 1"),
        "indices twice": (lambda: gate.gather_rows(hidden, twice, 3), "indices: expected strictly increasing rows, got 1 after 1 at index 2"),
        "indices outside": (lambda: po.pad_input(packed, indices, 1, 5), r"indices: expected -1 or a row below batch \* seqlen = 5, got 5 at index 3"),
        "indices negative": (lambda: po.pad_input(packed, indices - 2, 2, 3), "indices: expected -1 or a row below .* got -2 at index 0"),
        "batch negative": (lambda: po.pad_input(packed, indices, -1, 3), "batch: expected 0 to .* got -1"),
        "seqlen negative": (lambda: po.pad_input(packed, indices, 2, -3), "seqlen: expected 0 to .* got -3"),
        "gather total": (lambda: gate.gather_rows(hidden, indices, -1), "total: expected at least 0, got -1"),
    }
    # fmt: on


# Values of indices, which a GPU reports without the value itself.
FOUND_ON_THE_DEVICE = {
    "total too small",
    *(f"indices {what}" for what in ("long", "order", "twice", "outside", "negative")),
}


@pytest.mark.parametrize("case", bad_calls("cpu"))
def test_bad_input_is_named(device, case):
    call, message = bad_calls(device)[case]
    if device == "cuda" and case in FOUND_ON_THE_DEVICE:
        message = "indices: expected strictly increasing indices inside the rows, got a wrong value at index"
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("shape", [(0, 0), (0, 7), (3, 0), (3, 7)])
@pytest.mark.parametrize("row", [(), (4,), (0,)])
def test_nothing_real(device, shape, row):
    """No rows, no columns, no features, or padding only."""
    mask = torch.zeros(shape, dtype=torch.int64, device=device)
    hidden = torch.randn(*shape, *row, device=device, requires_grad=True)
    packed, indices, cu_seqlens, max_seqlen, seqused = po.unpad_input(hidden, mask)
    assert (packed.shape, indices.shape, max_seqlen) == ((0, *row), (0,), 0)
    assert cu_seqlens.tolist() == [0] * (shape[0] + 1)
    assert seqused.tolist() == [0] * shape[0]
    padded = po.pad_input(packed, indices, *shape)
    assert padded.shape == hidden.shape
    assert (padded == 0).all()
    padded.sum().backward()
    assert (hidden.grad == 0).all()
    assert po.unpad_inputs({}, mask)[0] == {}
    assert po.pad_inputs({}, indices, *shape) == {}


def test_one_token(device):
    packed, indices, cu_seqlens, max_seqlen, _ = po.unpad_input(
        torch.tensor([[7.0]], device=device), torch.ones(1, 1, device=device)
    )
    assert (packed.tolist(), indices.tolist(), cu_seqlens.tolist(), max_seqlen) == ([7.0], [0], [0, 1], 1)


@pytest.mark.gpu
def test_mixed_devices_are_named():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    with pytest.raises(ValueError, match="packed: expected on cpu like indices, got float32"):
        po.pad_input(torch.randn(1, device="cuda"), torch.zeros(1, dtype=torch.int64), 1, 1)


@pytest.mark.parametrize("value", [torch.ones(1, 2), [torch.ones(1, 2)], None], ids=str)
def test_what_is_no_dict_is_named(value):
    mask = torch.ones(1, 2)
    calls = {
        "tensors": lambda: po.unpad_inputs(value, mask),
        "packed": lambda: po.pad_inputs(value, torch.arange(2), 1, 2),
        "batch": lambda: po.trim_padding(value, mask),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name}: expected a dict of tensors, got "):
            call()


def test_backends_are_asked_with_a_tensor():
    with pytest.raises(TypeError, match="q: expected a tensor, got 3"):
        po.select_attention_backend(3)
