"""Prefixes and chunks of queries in the CUDA kernels of attention where there is no GPU (tests/emulator). Sums inside of one
instruction have another order there than on a GPU: test_prefix_invariance.py compares them there."""

import random

import emulated
import pytest
import torch
from emulator.build import cuda_headers
from prefix_case import Pieces, blocks_ends

HEADERS = cuda_headers()
pytestmark = pytest.mark.skipif(HEADERS is None, reason="needs the CUDA toolkit's headers")
BF16, FP16 = torch.bfloat16, torch.float16
# Documents of a key more than the kernel for short ones takes; prefixes on both sides of its tiles and its steps.
PREFIXES = [(0, n, n) for n in (1, 17, 33, 64, 65, 97, 128)]
CHUNKS = [(40, 41, 41), (60, 70, 70), (100, 128, 128), (128, 129, 129), (90, 140, 140)]

CASES = {
    "64": (140, {"heads": (4, 2), "dim": 64, "dtype": BF16}),
    "128": (140, {"heads": (4, 1), "dim": 128, "dtype": BF16}),
    "96, group of 3, sinks": (140, {"heads": (3, 1), "dim": 96, "dtype": FP16, "sinks": True}),
    "128, softcap": (140, {"heads": (2, 1), "dim": 128, "dtype": BF16, "softcap": 3.0}),
    "72 and 40 columns, window": (200, {"heads": (2, 2), "dim": 72, "dim_v": 40, "dtype": BF16, "window_size": (40, 0)}),
    "64, window over a step": (140, {"heads": (1, 1), "dim": 64, "dtype": FP16, "window_size": (70, 0)}),
    "192 and 128 columns": (140, {"heads": (2, 1), "dim": 192, "dim_v": 128, "dtype": BF16}),
    "256": (140, {"heads": (1, 1), "dim": 256, "dtype": BF16}),
    "512": (140, {"heads": (1, 1), "dim": 512, "dtype": BF16}),
    "float32": (140, {"heads": (2, 1), "dim": 40, "dtype": torch.float32, "window_size": (70, 0)}),
}  # fmt: skip
GPUS = {
    "sm_90": CASES,
    "sm_80": ["64", "128", "96, group of 3, sinks", "72 and 40 columns, window", "256"],
    "sm_89": ["128", "64, window over a step", "512"],
    "sm_100": ["64", "128", "128, softcap", "64, window over a step"],
}


def assert_equal_rows(pieces, gpu):
    case = pieces.pack()
    found = emulated.attention(case, HEADERS, gpu, late_copies=False, seed=0, backward=False)
    return pieces.assert_equal_rows(found["out"], found["lse"], gpu)


@pytest.mark.parametrize(("gpu", "name"), [(gpu, name) for gpu, names in GPUS.items() for name in names])
def test_rows_of_prefixes_and_chunks(gpu, name):
    length, options = CASES[name]
    assert assert_equal_rows(Pieces(random.Random(0), length, spans=PREFIXES + CHUNKS, **options), gpu) > 400


@pytest.mark.parametrize("gpu", GPUS)
def test_rows_that_see_blocks(gpu):
    ends = blocks_ends(random.Random(6), 140)
    options = {"heads": (2, 1), "dim": 64, "dtype": BF16, "visible_end": ends, "window_size": (90, -1)}
    assert assert_equal_rows(Pieces(random.Random(0), 140, **options), gpu) > 200


@pytest.mark.parametrize("gpu", GPUS)
def test_queries_that_see_every_key(gpu):
    spans = [(0, 1, 120), (3, 10, 120), (50, 115, 120)]
    options = {"heads": (4, 1), "dim": 64, "dtype": BF16, "causal": False}
    assert assert_equal_rows(Pieces(random.Random(0), 120, spans=spans, **options), gpu) == 73
