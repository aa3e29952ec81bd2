"""mm_by_rows_: bits of a row that no other row, place or number of threads changes."""

import pytest
import torch
from helpers import assert_same

from packing_ops._runtime import gate

ops = torch.ops.packing_ops
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def product(x, other, start=None):
    out = x.new_empty(x.shape[0], other.shape[1]) if start is None else start.clone()
    gate.mm_by_rows_(out, x, other, start is not None)
    return out


PARTS = [(0, 96), (3, 16), (80, 16), (45, 32)]  # first row, rows
EVERY = [(count, part) for count in (1, 2, 4) for part in PARTS]
# Of many columns, which take long: each part, and each count of threads with rows that moved.
FEWER = [(1, PARTS[1]), (2, PARTS[0]), (2, PARTS[2]), (4, PARTS[0]), (4, PARTS[1]), (4, PARTS[3])]


@pytest.mark.parametrize("size", [(64, 48), (1024, 48), (264, 5200), (520, 16)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_a_row(threads, dtype, size):
    terms, columns = size
    drawn = dtype if dtype.is_complex else torch.float32
    x, w = (torch.randn(rows, terms, dtype=drawn).to(dtype) for rows in (96, columns))
    start = torch.randn(96, columns, dtype=drawn).to(dtype)
    for other in (w.t(), w.t().contiguous()):
        threads(1)
        whole, added = product(x, other), product(x, other, start)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        near = {"rtol": 0.01, "atol": 0.2} if dtype.itemsize == 2 else {"rtol": 1e-4, "atol": 1e-3}
        exact = x.to(wide) @ other.to(wide)
        torch.testing.assert_close(whole.to(wide), exact, **near)
        torch.testing.assert_close(added.to(wide), start.to(wide) + exact, **near)
        for count, (first, rows) in FEWER if columns == 5200 else EVERY:
            threads(count)
            part = slice(first, first + rows)
            strided = torch.nn.functional.pad(x[part], (0, 7))[:, :terms]
            assert_same(product(x[part], other), whole[part])
            assert_same(product(strided, other, start[part]), added[part])


def test_any_strides():
    x, other, memory = torch.randn(32, 24), torch.randn(24, 40), torch.full((32, 60), 7.0)
    gate.mm_by_rows_(memory[:, 3:43], x.t().contiguous().t(), other.repeat_interleave(2, 1)[:, ::2], False)
    assert_same(memory[:, 3:43], product(x, other))
    assert (memory[:, :3] == 7).all()
    assert (memory[:, 43:] == 7).all()


def test_conjugates_integers_and_nothing():
    x, other = torch.randn(16, 8, dtype=torch.complex64), torch.randn(4, 8, dtype=torch.complex64)
    torch.testing.assert_close(product(x.conj(), other.mH), x.conj() @ other.mH)
    assert_same(product(torch.ones(16, 3).long(), torch.ones(3, 2).long()), torch.full((16, 2), 3))
    assert_same(product(torch.ones(16, 0), torch.ones(0, 2)), torch.zeros(16, 2))
    for shape in ((0, 3, 2), (16, 3, 0)):
        assert product(torch.ones(shape[:2]), torch.ones(shape[1:])).shape == (shape[0], shape[2])


@pytest.mark.parametrize("add", [False, True])
def test_opcheck(add):
    torch.library.opcheck(ops.mm_by_rows_, (torch.randn(32, 8), torch.randn(32, 5), torch.randn(5, 8), add))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(16)}, r"x: expected 2 dim.*got float32 \[16\]"),
        ({"x": torch.ones(17, 3)}, r"x: expected a multiple of 16 rows, got float32 \[17, 3\]"),
        ({"other": torch.ones(4, 2)}, r"other: expected \[columns of x, columns\] = \[3, 2\], got float32 \[4, 2\]"),
        ({"other": torch.ones(3, 2).double()}, r"other: expected float32 like x, got float64"),
        ({"out": torch.ones(16, 3)}, r"out: expected \[rows of x, columns of other\] = \[16, 2\], got float32"),
        ({"out": torch.ones(16, 2).half()}, r"out: expected float32 like x, got float16"),
        ({"out": torch.ones(2, 16).t()}, r"out: expected .*contiguous"),
        ({"out": torch.ones(1, 2).expand(16, 2)}, r"out: expected"),
    ],
)
def test_errors(change, message):
    given = {"out": torch.ones(16, 2), "x": torch.ones(16, 3), "other": torch.ones(3, 2), **change}
    with pytest.raises(ValueError, match=message):
        gate.mm_by_rows_(*given.values(), False)


def test_a_gpu_is_refused_by_name():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    x = torch.ones(16, 16, device="cuda")
    with pytest.raises((ValueError, NotImplementedError), match=r"x: expected a tensor on the CPU|mm_by_rows_"):
        gate.mm_by_rows_(x.clone(), x, x, False)
