"""Every family once, forward and backward, and compiled: tests/matrix.py runs only this file with the installed
wheel.
"""

import pytest
import torch

import packing_ops as po
from packing_ops.reference import attention, boundaries, logps, rope

LENGTHS = [5, 1, 12, 7]


@pytest.fixture
def cu_seqlens(device):
    return po.cu_seqlens_from_lengths(LENGTHS).to(device)


def leaf(*shape, device):
    return torch.randn(shape, device=device, requires_grad=True)


def check(function, oracle, *inputs):
    """Values and gradients in float32, to those of the oracle in float64."""
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    found, expected = function(*inputs), oracle(*wide)
    grad = torch.randn_like(found)
    torch.testing.assert_close(found, expected.float(), atol=1e-4, rtol=1e-4)
    gradients = torch.autograd.grad(found, inputs, grad)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        torch.testing.assert_close(ours, theirs.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_attention(device, cu_seqlens, compiled):
    def attend(q, k, v):
        return po.varlen_attention(q, k, v, cu_seqlens)

    total = sum(LENGTHS)
    q, k, v = (leaf(total, heads, 16, device=device) for heads in (4, 2, 2))
    ours = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    check(ours, lambda *wide: attention.varlen_attention(*wide, cu_seqlens)[0], q, k, v)


def test_attention_in_half_types(device, cu_seqlens):
    """The kernels that a GPU's tensor cores run, each dtype next to torch's error."""
    for dtype in (torch.bfloat16, torch.float16):
        for head_dim in (64, 96, 128, 192, 256):
            q, k, v = (torch.randn(sum(LENGTHS), 2, head_dim, device=device, dtype=dtype) for _ in range(3))
            for tensor in (q, k, v):
                tensor.requires_grad_()
            out = po.varlen_attention(q, k, v, cu_seqlens)
            expected = attention.varlen_attention(q.double(), k.double(), v.double(), cu_seqlens)[0]
            torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
            (grad,) = torch.autograd.grad(out.float().sum(), [q])
            assert torch.isfinite(grad).all()


def test_boundaries_and_segments(device, cu_seqlens):
    positions = po.position_ids_from_cu_seqlens(cu_seqlens)
    assert positions.tolist() == [i for length in LENGTHS for i in range(length)]
    labels = torch.arange(sum(LENGTHS), device=device)
    expected = boundaries.shift_labels(labels.cpu(), cu_seqlens.cpu())
    assert po.shift_labels(labels, cu_seqlens).tolist() == expected.tolist()
    values = leaf(sum(LENGTHS), device=device)
    check(lambda v: po.segment_sum(v, cu_seqlens), lambda v: boundaries.segment_sum(v, cu_seqlens), values)


def test_padding(device):
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]], device=device)
    rows = leaf(2, 3, 4, device=device)

    def there_and_back(rows):
        packed, indices, *_ = po.unpad_input(rows, mask)
        return po.pad_input(packed, indices, 2, 3)

    check(there_and_back, lambda rows: rows * mask[..., None], rows)


def test_packing(device):
    bin_offsets, item_indices, num_bins = po.pack_ffd(torch.tensor([3, 9, 6], device=device), 10)
    assert (bin_offsets.tolist(), item_indices.tolist(), num_bins.tolist()) == ([0, 1, 3, 3], [1, 2, 0], [2])


def test_rope(device):
    total = sum(LENGTHS)
    cos, sin = (table.float().to(device) for table in rope.rotary_tables(total, 16))
    q, k = leaf(total, 2, 16, device=device), leaf(total, 1, 16, device=device)

    def ours(q, k):
        return torch.cat([part.flatten() for part in po.apply_rotary_qk(q, k, cos, sin)])

    def oracle(q, k):
        return torch.cat([part.flatten() for part in rope.apply_rotary_qk(q, k, cos.double(), sin.double())])

    check(ours, oracle, q, k)


def test_logps(device, cu_seqlens):
    hidden, weight = leaf(sum(LENGTHS), 8, device=device), leaf(32, 8, device=device)
    labels = torch.randint(0, 32, (sum(LENGTHS),), device=device)

    def ours(hidden, weight):
        return po.token_logps(hidden, weight, labels, cu_seqlens)

    def oracle(hidden, weight):
        return logps.token_logps(hidden, weight, labels, cu_seqlens)[0]

    check(ours, oracle, hidden, weight)


def test_a_wrong_argument_is_named(device):
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        po.position_ids_from_cu_seqlens(torch.zeros(2, 2, dtype=torch.int32, device=device))
