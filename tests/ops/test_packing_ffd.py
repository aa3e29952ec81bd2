"""pack_ffd: first-fit decreasing with outputs of fixed size, where the lengths are."""

import random

import pytest
import torch
from helpers import non_contiguous
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po

ops = torch.ops.packing_ops
WORKED = [820, 410, 520, 110, 250, 700, 50]


def bins_of(bin_offsets, item_indices, num_bins):
    offsets, items = bin_offsets.tolist(), item_indices.tolist()
    count = int(num_bins)
    assert offsets[count:] == [len(items)] * (len(items) + 1 - count)
    return [items[offsets[b] : offsets[b + 1]] for b in range(count)]


@given(
    lengths=st.lists(st.integers(0, 60), max_size=80),
    capacity=st.integers(60, 200),
    alignment=st.sampled_from([1, 4]),
    ties=st.sampled_from(["first", "last"]),
)
def test_pack_ffd_has_the_bins_of_pack_sequences(device, lengths, capacity, alignment, ties):
    expected = po.pack_sequences(lengths, capacity, alignment=alignment, ties=ties).bins
    for dtype in (torch.int32, torch.int64):
        tensor = torch.tensor(lengths, dtype=dtype, device=device)
        assert bins_of(*po.pack_ffd(tensor, capacity, alignment=alignment, ties=ties)) == expected


@pytest.mark.parametrize("count", [1, 31, 33, 1000, 1025, 5000, 40_000])
def test_pack_ffd_of_many(device, count):
    lengths = torch.tensor(random.Random(count).choices(range(1, 5000), k=count))
    expected = po.pack_sequences(lengths, 8192).bins
    assert bins_of(*po.pack_ffd(non_contiguous(lengths).to(device), 8192)) == expected


def test_lengths_on_any_device_give_one_packing(device):
    packing = po.pack_sequences(torch.tensor(WORKED, device=device), 1024, ties="last")
    assert packing.bins == [[0, 3, 6], [5, 4], [2, 1]]
    assert packing.item_indices.is_cpu


def test_pack_ffd_opcheck(device):
    torch.library.opcheck(ops.pack_ffd, (torch.tensor(WORKED, device=device), 1024, 4, True))


@pytest.mark.parametrize(
    ("lengths", "capacity", "options", "message"),
    [
        ([3, -2], 8, {}, "lengths: expected no negative length.* index 1"),
        ([3, 9], 8, {}, "lengths: expected .* index 1"),
        ([3, 9], 10, {"alignment": 4}, "lengths: expected .* index 1"),
        ([3], 0, {}, "capacity: expected at least 1, got 0"),
        ([3], 2**31, {}, "capacity: expected at most 2147483647"),
        ([3], 8, {"alignment": 0}, "alignment: expected at least 1, got 0"),
        ([3], 8, {"ties": "none"}, "ties: expected 'first' or 'last', got 'none'"),
    ],
)
def test_pack_ffd_bad_input(device, lengths, capacity, options, message):
    with pytest.raises(ValueError, match=message):
        po.pack_ffd(torch.tensor(lengths, device=device), capacity, **options)
