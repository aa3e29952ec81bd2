"""Products on the CPU in the mode packing_ops.invariant(): of any sizes, however they are called, and at any place of a row."""

import pytest
import torch
from helpers import assert_same, rows_of_products

import packing_ops as po
from packing_ops import _invariant


@pytest.mark.parametrize("sizes", [(8, 5), (7, 64), (9, 7), (24, 11), (65, 3), (5, 5), (16, 16), (768, 6)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_row_of_few_columns_keeps_its_bits_at_any_place(sizes, transposed):
    size, columns = sizes
    x = torch.randn(40, size)
    weight = torch.randn(columns, size).t() if transposed else torch.randn(size, columns)
    with po.invariant():
        whole = rows_and_gradients(x, weight)
        for start, stop in ((3, 4), (5, 21), (17, 40)):
            for part, of_whole in zip(rows_and_gradients(x[start:stop], weight), whole, strict=True):
                assert_same(part, of_whole[start:stop])
    torch.testing.assert_close(whole[0], x @ weight, rtol=1e-5, atol=1e-4)


def rows_and_gradients(x, weight):
    x = x.clone().requires_grad_()
    out = x @ weight
    out.backward(torch.ones_like(out))
    return out.detach(), x.grad


BY_NAME = {
    "linear, weight": lambda x, w: torch.nn.functional.linear(x, weight=w),
    "linear, both": lambda x, w: torch.nn.functional.linear(input=x, weight=w, bias=None),
    "matmul": lambda x, w: torch.matmul(x, other=w.t()),
    "a method": lambda x, w: x.matmul(other=w.t()),
    "mm": lambda x, w: torch.mm(input=x, mat2=w.t()),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_operands_by_name(name):
    x, weight = torch.randn(40, 64), torch.randn(48, 64)
    with po.invariant():
        found = rows_of_products(lambda: BY_NAME[name](x, weight))
        assert found
        assert set(found) == {_invariant.ROWS}


LEFT_TO_TORCH = {
    "no terms": lambda: torch.mm(torch.empty(3, 0), torch.empty(0, 4)),
    "no terms, linear": lambda: torch.nn.functional.linear(torch.empty(3, 0), torch.empty(4, 0), torch.ones(4)),
    "no terms, batches": lambda: torch.bmm(torch.empty(2, 3, 0), torch.empty(2, 0, 4)),
    "sparse": lambda: torch.eye(3).to_sparse() @ torch.ones(3, 4),
    "a bias for each row": lambda: torch.nn.functional.linear(torch.ones(3, 8), torch.ones(4, 8), torch.ones(3, 4)),
    "out of another size": lambda: torch.mm(torch.ones(3, 8), torch.ones(8, 4), out=torch.empty(0)),
}


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_what_torch_takes_is_taken(name):
    wanted = LEFT_TO_TORCH[name]()
    with po.invariant():
        assert_same(LEFT_TO_TORCH[name](), wanted)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.mm(torch.ones(2, 3, 8), torch.ones(8, 4)),
        lambda: torch.bmm(torch.ones(3, 8), torch.ones(8, 4)),
        lambda: torch.bmm(torch.ones(1, 3, 8), torch.ones(2, 8, 4)),
        lambda: torch.mm(torch.ones(3, 8), torch.ones(8, 4), out=torch.empty(3, 4, dtype=torch.float64)),
    ],
    ids=["mm", "bmm", "batches", "out"],
)
def test_what_torch_refuses_is_refused(call):
    with pytest.raises((RuntimeError, ValueError)):
        call()
    with po.invariant(), pytest.raises((RuntimeError, ValueError)):
        call()
