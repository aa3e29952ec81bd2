"""Prefixes and chunks of queries in the CUDA kernels of attention without a GPU (tests/emulator). Sums inside
of one instruction have another order there than on a GPU: test_prefix_invariance.py compares them there.
"""

import random

import pytest
import torch
from emulator.build import cuda_headers
from helpers import assert_same, emulated
from helpers.attention_case import Case, document_alone, document_results
from helpers.prefix_case import Pieces, blocks_ends

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


# (keys, queries of chunks, options). Row tiles are taken from the last one down from 2,048 rows on; a chunk has fewer.
GRADIENTS = {
    "64, from the last row": (300, [44, 172, 7], {"heads": (8, 1), "dim": 64, "dtype": BF16}),
    "64, tiles of 63 rows": (270, [14, 142, 60], {"heads": (3, 1), "dim": 64, "dtype": FP16}),
    "128, tiles of 63 rows, from the last row": (330, [74, 5, 1], {"heads": (7, 1), "dim": 128, "dtype": BF16, "window_size": (150, 0)}),
    "128": (200, [72, 100, 61], {"heads": (2, 2), "dim": 128, "dtype": BF16, "sinks": True}),
    "128, group of 4, from the last row": (540, [28, 100], {"heads": (4, 1), "dim": 96, "dtype": BF16, "window_size": (60, 0)}),
    "192": (200, [72, 61], {"heads": (3, 1), "dim": 192, "dim_v": 128, "dtype": BF16}),
    "192, from the last row": (140, [12, 30], {"heads": (16, 1), "dim": 160, "dtype": FP16, "window_size": (70, 0)}),
    "256": (170, [42, 9], {"heads": (5, 1), "dim": 256, "dtype": BF16}),
    "256, from the last row": (140, [12, 30], {"heads": (16, 1), "dim": 256, "dtype": BF16, "window_size": (50, 0)}),
    "512": (90, [26, 7], {"heads": (3, 1), "dim": 512, "dtype": BF16}),
    "softcap, tiles of 60 rows": (170, [42, 9], {"heads": (5, 1), "dim": 64, "dtype": BF16, "softcap": 3.0}),
    "one key tile": (60, [7, 33], {"heads": (3, 1), "dim": 64, "dtype": BF16}),
    "one key tile, 128 keys": (128, [7, 99], {"heads": (5, 1), "dim": 128, "dtype": FP16}),
    "float32": (70, [12, 31], {"heads": (3, 1), "dim": 24, "dtype": torch.float32}),
}  # fmt: skip


def compared_gradients(gpu, keys, chunks, options):
    pieces = Pieces(random.Random(0), keys, spans=[(keys - n, keys, keys) for n in chunks], **options)
    found = emulated.attention(pieces.pack(), HEADERS, gpu, late_copies=True, seed=1)
    return pieces.assert_equal_gradients(found, gpu)


# The backward of sm_100 is that of sm_80 for these, and float32 has one on every GPU.
AS_ON_SM80 = ["64, from the last row", "64, tiles of 63 rows", "softcap, tiles of 60 rows", "one key tile"]


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        (gpu, name)
        for name in GRADIENTS
        for gpu in (["sm_90"] if name == "float32" else GPUS)
        if gpu != "sm_100" or name not in AS_ON_SM80
    ],
)
def test_gradients_of_the_last_queries(gpu, name):
    keys, chunks, options = GRADIENTS[name]
    assert compared_gradients(gpu, keys, chunks, options) == 3 * sum(chunks)


@pytest.mark.parametrize("gpu", GPUS)
def test_gradients_of_the_last_queries_that_see_blocks(gpu):
    ends = blocks_ends(random.Random(6), 140)
    options = {"heads": (3, 1), "dim": 64, "dtype": BF16, "visible_end": ends, "window_size": (90, -1)}
    assert compared_gradients(gpu, 140, [12, 61], options) > 73


@pytest.mark.parametrize("gpu", ["sm_90", "sm_80"])
@pytest.mark.parametrize("dim", [64, 192])
@pytest.mark.parametrize("queries", [3, 50])  # in one tile of rows, which begins before them, and in several
def test_the_last_queries_beside_documents_of_nan(gpu, dim, queries):
    case = Case([9, queries, 40], [9, 150, 40], heads=(5, 1), dim=dim, dtype=BF16)
    of_q, of_k = (9, 9 + queries), (9, 159)
    alone = emulated.attention(document_alone(case, *of_q, of_k), HEADERS, gpu, late_copies=False, seed=0)
    for tensors, (start, end) in (((case.q, case.dout), of_q), ((case.k, case.v), of_k)):
        for tensor in tensors:
            tensor[:start] = tensor[end:] = float("nan")
    beside = emulated.attention(case, HEADERS, gpu, late_copies=True, seed=1)
    for key, value in document_results(alone, 0, queries, (0, 150)).items():
        assert_same(document_results(beside, *of_q, of_k)[key], value)
