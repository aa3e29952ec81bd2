"""Keys in pages in the CUDA kernels of attention without a GPU (tests/emulator): out and lse are those of keys
end to end, and no slot without a key, nor any memory outside of pages, is read.
"""

import re

import pytest
import torch
from emulator.build import cuda_headers
from helpers import ROOT, assert_same, emulated
from helpers.attention_case import Case
from helpers.pages_case import Pages, paged_case, shared_pages

HEADERS = cuda_headers()
pytestmark = pytest.mark.skipif(HEADERS is None, reason="needs the CUDA toolkit's headers")
BF16, FP16 = torch.bfloat16, torch.float16
SCHEDULES = {"late reads": (False, 0), "late copies": (True, 1)}


def forward(case, gpu, pages=None, schedule="late reads", **others):
    late_copies, seed = SCHEDULES[schedule]
    return emulated.attention(
        case, HEADERS, gpu, late_copies=late_copies, seed=seed, backward=False, pages=pages, **others
    )


def assert_same_bits(case, pages, gpu, schedule="late reads"):
    found, expected = forward(case, gpu, pages, schedule), forward(case, gpu, schedule=schedule)
    assert_same(found["out"], expected["out"])
    assert_same(found["lse"], expected["lse"])
    assert not found["out"].isnan().any()


# (queries, keys): lengths around pages and tiles, one query, a chunk, no queries, no keys, more queries than keys.
PAIRS = [(1, 257), (9, 130), (0, 128), (129, 129), (3, 0), (20, 7), (1, 384)]
CASES = {
    "64": {"heads": (4, 2), "dim": 64, "dtype": BF16},
    "128": {"heads": (4, 1), "dim": 128, "dtype": BF16},
    "96, group of 3, sinks": {"heads": (3, 1), "dim": 96, "dtype": FP16, "sinks": True, "tail": 2},
    "128, softcap": {"heads": (2, 1), "dim": 128, "dtype": BF16, "softcap": 3.0},
    "72 and 40 columns, window": {"heads": (2, 2), "dim": 72, "dim_v": 40, "dtype": BF16, "window_size": (140, 0)},
    "64, both sides": {"heads": (1, 1), "dim": 64, "dtype": FP16, "causal": False, "window_size": (70, 9)},
    "128, all keys": {"heads": (2, 1), "dim": 128, "dtype": BF16, "causal": False},
    "192 and 128 columns": {"heads": (2, 1), "dim": 192, "dim_v": 128, "dtype": BF16},
    "256": {"heads": (1, 1), "dim": 256, "dtype": BF16},
    "512": {"heads": (1, 1), "dim": 512, "dtype": BF16},
    "float32": {"heads": (2, 1), "dim": 40, "dtype": torch.float32, "window_size": (150, 0)},
}
GPUS = {
    "sm_90": CASES,
    "sm_80": ["64", "128", "96, group of 3, sinks", "72 and 40 columns, window", "256", "512"],
    "sm_89": ["128", "64, both sides", "192 and 128 columns", "512"],
    "sm_100": ["64", "128", "128, softcap"],
}


@pytest.mark.parametrize(("gpu", "name"), [(gpu, name) for gpu, names in GPUS.items() for name in names])
def test_bits_are_those_of_keys_end_to_end(gpu, name):
    assert_same_bits(*paged_case(PAIRS, **CASES[name]), gpu)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("page_size", [128, 256, 384])
@pytest.mark.parametrize("gpu", ["sm_90", "sm_80"])
def test_page_sizes(gpu, page_size, schedule):
    case, pages = paged_case(PAIRS, page_size, heads=(4, 1), dim=64, dtype=BF16)
    assert_same_bits(case, pages, gpu, schedule)


@pytest.mark.parametrize("gpu", GPUS)
def test_shared_pages(gpu):
    assert_same_bits(*shared_pages(2, [1, 128, 5], heads=(2, 1), dim=64, dtype=BF16), gpu)


@pytest.mark.parametrize("gpu", GPUS)
def test_a_page_of_any_size_for_each_document(gpu):
    assert_same_bits(*paged_case([(3, 100), (1, 77)], 100, spare_columns=0, heads=(2, 1), dim=64, dtype=BF16), gpu)


FAULTS = re.findall(r"^  (k\w+)", (ROOT / "csrc" / "core" / "fault.h").read_text(), re.M)


def fault_of(call):
    """Its name in core/fault.h."""
    with pytest.raises(RuntimeError, match="fault") as caught:
        call()
    return FAULTS[int(str(caught.value).split()[1])]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("page", [-1, 11, 2**31 - 1, -(2**31)])
def test_pages_outside_are_clamped_and_flagged(gpu, dtype, page):
    case, pages = paged_case([(1, 257), (9, 130)], heads=(2, 1), dim=64, dtype=dtype)
    for index in ((0, 1), (1, 0)):
        wrong = Pages.__new__(Pages)
        wrong.__dict__ = {**pages.__dict__, "block_table": pages.block_table.clone()}
        wrong.block_table[index] = page
        assert fault_of(lambda: forward(case, gpu, wrong)) == "kPageOutside"  # noqa: B023


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("keys", [-1, 513, 2**31 - 1])
def test_lengths_past_the_table_are_flagged(gpu, keys):
    case, pages = paged_case([(1, 257), (9, 130)], heads=(2, 1), dim=64, dtype=BF16)
    pages.seqused_k[0] = keys
    assert fault_of(lambda: forward(case, gpu, pages)) == "kKeysPastPages"


@pytest.mark.parametrize("gpu", ["sm_90", "sm_80"])
def test_a_table_without_pages_is_not_read(gpu):
    case = Case([2, 1], [0, 0], heads=(2, 1), dim=64, dtype=BF16)
    pages = Pages(case, spare_columns=0, spare_pages=0)
    assert pages.block_table.numel() == pages.k.numel() == 0
    assert_same_bits(case, pages, gpu)
