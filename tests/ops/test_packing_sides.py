"""pack_sequences of sequences that take of several budgets at once: chosen and rejected tokens of preference pairs."""

import doctest
import random

import pytest
import torch
from helpers import non_contiguous
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
import packing_ops.packing
from packing_ops.reference import packing as oracle

ops = torch.ops.packing_ops
PAIRS = [[4, 5], [5, 4], [2, 1], [1, 1], [3, 12]]


def test_examples_of_the_docstrings():
    assert doctest.testmod(packing_ops.packing, extraglobs={"torch": torch}).failed == 0


def pieces_of(packing):
    return [packing.pieces(bin) for bin in range(packing.num_bins)]


def test_worked_values():
    packing = po.pack_sequences(PAIRS, 10, strategy="next_fit", max_sequences_per_bin=3, overlong="own")
    assert packing.bins == [[0, 1], [2, 3], [4]]
    assert packing.lengths.tolist() == PAIRS
    assert (packing.own.tolist(), packing.num_tokens, packing.num_slots) == ([4], 38, 2 * 20 + 10 + 12)
    assert packing.lower_bound == 3
    # Pair 2 goes into the first bin too: 11 chosen tokens are too many, 10 rejected ones would not be.
    assert po.pack_sequences(PAIRS[:4], 11, strategy="first_fit").bins == [[0, 1, 2], [3]]
    # The longest side decides who is first.
    assert po.pack_sequences([[1, 6], [7, 1], [2, 3]], 9).bins == [[1, 0], [2]]


@st.composite
def problems(draw):
    capacity, sides = draw(st.sampled_from([1, 5, 16, 100, 10**12])), draw(st.integers(1, 3))
    lengths = st.lists(
        st.integers(0, draw(st.sampled_from([1, capacity // 3 + 1, 2 * capacity]))), min_size=sides, max_size=sides
    )
    return draw(st.lists(lengths, min_size=1, max_size=40)), capacity, {
        "strategy": draw(st.sampled_from(["ffd", "next_fit", "first_fit"])),
        "alignment": draw(st.sampled_from([1, 1, 2, 8])),
        "overlong": draw(st.sampled_from(["own", "drop"])),
        "max_sequences_per_bin": draw(st.sampled_from([None, None, 1, 3])),
        "min_bins": draw(st.sampled_from([1, 2])),
        "bins_multiple_of": draw(st.sampled_from([1, 1, 2, 3])),
        "balance": draw(st.sampled_from([None, "tokens", ("flops", 1.0, 0.5)])),
        "ties": draw(st.sampled_from(["first", "last"])),
        "seed": draw(st.sampled_from([None, 0, 7])),
    }  # fmt: skip


@given(problem=problems())
def test_equals_reference(problem):
    lengths, capacity, options = problem
    try:
        expected = oracle.pack_sequences(lengths, capacity, **options)
    except ValueError:
        with pytest.raises(ValueError, match="Cannot create bins without a sequence"):
            po.pack_sequences(lengths, capacity, **options)
        return
    packing = po.pack_sequences(lengths, capacity, **options)
    assert pieces_of(packing) == expected
    assert packing.num_bins >= packing.lower_bound
    kept = [sum(length) for bin in expected for _, _, length in bin]
    assert packing.num_tokens == sum(kept)
    assert packing.num_tokens + packing.lost_tokens == sum(map(sum, lengths))
    most = capacity // options["alignment"] * options["alignment"]
    over = [i for i, own in enumerate(lengths) if max(own) > most]
    assert (packing.own if options["overlong"] == "own" else packing.dropped).tolist() == over


@pytest.mark.parametrize("strategy", ["ffd", "first_fit"])
def test_many_bins(strategy):
    """Three levels of the tree, some of them closed by max_sequences_per_bin."""
    draw = random.Random(3)
    lengths = [[draw.randrange(60), draw.randrange(60)] for _ in range(900)]
    options = {"strategy": strategy, "max_sequences_per_bin": 3}
    packing = po.pack_sequences(lengths, 90, **options)
    assert packing.num_bins > 16**2
    assert max(map(len, packing.bins)) == 3
    assert pieces_of(packing) == oracle.pack_sequences(lengths, 90, **options)


def test_one_side_is_one_length():
    lengths = torch.randint(0, 50, (200,))
    for strategy in ("ffd", "next_fit", "first_fit", "bfd", "balanced"):
        assert (
            po.pack_sequences(lengths[:, None], 64, strategy=strategy).bins
            == po.pack_sequences(lengths, 64, strategy=strategy).bins
        )


def test_lengths_may_be_tensors_arrays_and_columns(device):
    numpy = pytest.importorskip("numpy")
    tensor = torch.tensor(PAIRS, dtype=torch.int32)
    rows = [tuple(pair) for pair in PAIRS], [torch.tensor(pair) for pair in PAIRS], [numpy.array(p) for p in PAIRS]
    for lengths in (*rows, iter(PAIRS), numpy.array(PAIRS), tensor.to(device), non_contiguous(tensor)):
        assert po.pack_sequences(lengths, 12, strategy="next_fit").bins == [[0, 1, 2, 3], [4]]
    assert po.pack_sequences([torch.tensor(3), torch.tensor(5)], 8).bins == [[1, 0]]
    empty = po.pack_sequences(torch.empty(0, 2, dtype=torch.int64), 8)
    assert (empty.num_bins, empty.lengths.shape) == (0, (0, 2))


def test_opcheck():
    options = (10, "next_fit", 1, 3, 1, 1, "own", False, 1.0, 0.0, "first", None)
    torch.library.opcheck(ops.pack_sequences, (torch.tensor(PAIRS), *options), test_utils="test_faketensor")


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        (PAIRS, {}, r"lengths: expected at most capacity=10, got 12 at \[4, 1\], which exceeds bin capacity; overlong='own' or 'drop'"),
        ([[1, -2]], {}, r"lengths: expected no negative length, got -2 at \[0, 1\]"),
        (PAIRS, {"strategy": "bfd"}, r"strategy: expected 'ffd', 'next_fit' or 'first_fit' for lengths \[num_sequences, 2\], got 'bfd'"),
        (PAIRS, {"strategy": "balanced"}, "strategy: expected 'ffd', 'next_fit' or 'first_fit'"),
        (PAIRS, {"overlong": "split"}, "overlong: expected 'error', 'own' or 'drop' for lengths .*, got 'split'"),
        ([[1, 2], [3]], {}, r"lengths\[1\]: expected 2 sides like lengths\[0\], got int64 \[1\]"),
        (torch.ones(1, 2, 3, dtype=torch.int64), {}, r"lengths: expected \[num_sequences\] or \[num_sequences, 1 to 8 sides\]"),
        (torch.ones(3, 0, dtype=torch.int64), {}, r"or \[num_sequences, 1 to 8 sides\], got int64 \[3, 0\]"),
        (torch.ones(1, 9, dtype=torch.int64), {}, r"or \[num_sequences, 1 to 8 sides\], got int64 \[1, 9\]"),
    ],
)  # fmt: skip
def test_bad_input_is_named(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        po.pack_sequences(lengths, 10, **options)


def test_fractions_are_named():
    with pytest.raises(TypeError, match=r"lengths\[1\]: expected integers, got 1.5"):
        po.pack_sequences([[1, 2], [1, 1.5]], 10)
