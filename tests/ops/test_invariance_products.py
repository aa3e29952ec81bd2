"""Products on the CPU in the mode packing_ops.invariant(): of any sizes, however they are called, and at any place of a
row.
"""

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import assert_same, products_by_pairs, rows_of_products

import packing_ops as po
from packing_ops.invariance import mode

LOW = [torch.float32, torch.bfloat16, torch.float16]

functions = {
    "linear": lambda x, w: torch.nn.functional.linear(x, w.t(), w[0]),
    "matmul": torch.matmul,
    "@": lambda x, w: x @ w,
    "mm": torch.mm,
    "method": lambda x, w: x.mm(w),
}


@pytest.mark.parametrize("function", functions.values(), ids=functions)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_rows_of_products(function, dtype):
    w, x = torch.randn(64, 48).to(dtype), torch.randn(300, 64).to(dtype)
    with po.invariant():
        leaf = x.clone().requires_grad_()
        expected = function(leaf, w)
        expected.cumsum(0).sum().backward()
        for rows in range(1, 40):
            part = x[100 : 100 + rows].clone().requires_grad_()
            out = function(part, w)
            assert_same(out.detach(), expected[100 : 100 + rows].detach())
            out.backward(torch.arange(200, 200 - rows, -1.0).to(dtype)[:, None].expand_as(out))
            assert_same(part.grad, leaf.grad[100 : 100 + rows])


@pytest.mark.parametrize("function", functions.values(), ids=functions)
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("size", "columns"), [(31, 24), (24, 31), (33, 1)])
def test_a_nan_stays_in_its_row(monkeypatch, function, dtype, size, columns):
    """Of products and of the gradient of their rows, also where a CPU multiplies by pairs."""
    x, w, grad = torch.randn(20, size), torch.randn(size, columns), torch.ones(20, columns)
    x[8], grad[9] = torch.nan, torch.inf
    x, w, grad = x.to(dtype).requires_grad_(), w.to(dtype), grad.to(dtype)
    products_by_pairs(monkeypatch)
    with po.invariant():
        out = function(x, w)
        out.backward(grad)
    assert out.isnan().any(1).nonzero().flatten().tolist() == [8]
    assert (~x.grad.isfinite()).any(1).nonzero().flatten().tolist() == [9]


def test_rows_of_batches_and_leading_dims():
    x, w = torch.randn(2, 3, 5, 16), torch.randn(16, 8)
    with po.invariant():
        assert_same(torch.matmul(x, w).flatten(0, 2), x.flatten(0, 2) @ w)
        batched = torch.bmm(x[0], w.expand(3, 16, 8).contiguous())
        assert batched.shape == (3, 5, 8)
        assert_same(batched[:, :3], torch.bmm(x[0][:, :3], w.expand(3, 16, 8).contiguous()))
        assert torch.nn.functional.linear(x[0, 0, 0], w.t()).shape == (8,)
        assert (w.t() @ x[0, 0, 0]).shape == (8,)


@pytest.mark.parametrize("function", functions.values(), ids=functions)
@pytest.mark.parametrize("shape", [(1,), (33,), (2, 3, 5)], ids=str)
def test_every_product_in_the_mode_has_16_rows(function, shape):
    if len(shape) > 1 and function in (functions["mm"], functions["method"]):
        pytest.skip("of two dimensions alone")
    x, w = torch.randn(*shape, 64, requires_grad=True), torch.randn(64, 48)
    with po.invariant():
        out = function(x, w)
        assert set(rows_of_products(lambda: function(x, w))) == {mode.ROWS}
    assert set(rows_of_products(out.sum().backward)) == {mode.ROWS}  # outside of the mode too


def test_every_product_of_a_batch_and_of_groups_has_16_rows():
    x, w = torch.randn(3, 20, 16, requires_grad=True), torch.randn(3, 16, 8)
    ends = torch.tensor([1, 1, 20], dtype=torch.int32)
    with po.invariant():
        for call in (lambda: torch.bmm(x, w), lambda: x @ w, lambda: torch._grouped_mm(x[0], w, offs=ends)):
            assert set(rows_of_products(lambda call=call: call().sum().backward())) == {mode.ROWS}


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_products_leave_the_numbers_of_threads(four_threads):
    """Of this thread, and of those that start meanwhile."""
    x, stop, found = torch.randn(64, 2048), threading.Event(), set()

    def starts_threads():
        while not stop.is_set():
            with ThreadPoolExecutor(1) as other:
                found.add(other.submit(torch.get_num_threads).result())

    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(starts_threads)
        with po.invariant():
            for rows in (1, 64):
                x[:rows] @ x.t()
        stop.set()
        running.result()
    assert found == {4}
    assert torch.get_num_threads() == 4


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="needs a torch with MKL")
def test_mkl_says_that_it_runs_16_rows_in_one_thread():
    """Three blocks of rows, then a single one, which runs outside of a parallel region."""
    code = """
import torch, packing_ops as po
torch.set_num_threads(4)
x, w = torch.randn(40, 512), torch.randn(512, 512)
x @ w
with po.invariant():
    x @ w
    x[:3] @ w
x @ w
"""
    environment = {**os.environ, "MKL_VERBOSE": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    ).stdout
    found = re.findall(r"GEMM\(\w,\w,512,(\d+),.*NThr:(\d)", printed)
    assert found == [("40", "4"), *4 * [("16", "1")], ("40", "4")]


def test_derivatives_of_products_in_the_mode():
    """By autograd, a second time and by torch.func, of bias too."""
    x, w, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 6), (4, 6), (4,)))

    def linear(x, w, b):
        with po.invariant():
            return torch.nn.functional.linear(x, w, b)

    assert torch.autograd.gradcheck(linear, (x, w, b))
    assert torch.autograd.gradgradcheck(linear, (x, w, b))
    of_rows = torch.func.vmap(torch.func.grad(lambda x: linear(x, w, b).square().sum()))(x[:, None])
    torch.testing.assert_close(of_rows[:, 0], 2 * linear(x, w, b) @ w)


@pytest.mark.parametrize("shape", [(5, 8), (16, 8), (2, 3, 8)], ids=str)
def test_results_in_the_mode_take_writes(shape):
    x, w = torch.randn(shape, requires_grad=True), torch.randn(4, 8, requires_grad=True)

    def gradients():
        out = torch.nn.functional.linear(x, w)
        out += 1
        out[..., :2] *= 3
        return torch.autograd.grad(out.sum(), (x, w))

    wanted = gradients()
    with po.invariant():
        found, out = gradients(), torch.empty(4, 4)
        torch.mm(w.detach(), w.detach().t(), out=out)
        assert_same(out, w.detach() @ w.detach().t())
    torch.testing.assert_close(found, wanted)


def test_autocast_casts_products_in_the_mode():
    x, w, b = torch.randn(5, 16, requires_grad=True), torch.randn(8, 16), torch.randn(8)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = torch.nn.functional.linear(x, w, b)
        with po.invariant():
            found = torch.nn.functional.linear(x, w, b)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted)
    found.sum().backward()
    assert x.grad.dtype == torch.float32


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
        assert set(found) == {mode.ROWS}


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
