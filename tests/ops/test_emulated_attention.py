"""The CUDA kernels of attention without a GPU: their source, run on the CPU by tests/emulator."""

import random

import pytest
import torch
from emulator.build import cuda_headers
from helpers import assert_error_within, assert_same, emulated
from helpers.attention_case import Case, document_alone, document_results

from packing_ops.varlen.ops import _plan_size

HEADERS = cuda_headers()
pytestmark = pytest.mark.skipif(HEADERS is None, reason="needs the CUDA toolkit's headers")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 3e-3, FP16: 4e-4, FP32: 1e-6}  # root of the mean square, relative
EDGES = [1, 17, 64, 0, 65, 129]
CROSS = ([0, 5, 70, 64, 1, 130], [7, 0, 100, 129, 64, 65])
SCHEDULES = {"early copies": (False, 0), "late copies": (True, 1)}


def results(case, gpu, schedule="early copies"):
    late_copies, seed = SCHEDULES[schedule]
    return emulated.attention(case, HEADERS, gpu, late_copies=late_copies, seed=seed)


CASES = {
    "64": (EDGES, None, {"heads": (4, 2), "dim": 64, "dtype": BF16}),
    "72 fp16, one kv head": (EDGES, None, {"heads": (5, 1), "dim": 72, "dtype": FP16, "tail": 3}),
    "128": (EDGES, None, {"heads": (4, 2), "dim": 128, "dtype": BF16}),
    "128 full, keys of their own": (*CROSS, {"heads": (3, 3), "dim": 128, "dtype": FP16, "causal": False, "tail": 2}),
    "128 window, softcap, sinks": (EDGES, None, {"heads": (6, 3), "dim": 128, "dtype": BF16, "window_size": (40, 0), "softcap": 3.0, "sinks": True}),
    "192": (EDGES[:-1], None, {"heads": (2, 1), "dim": 192, "dtype": BF16}),
    "256": (EDGES[:-1], None, {"heads": (2, 1), "dim": 256, "dtype": BF16}),
    "128 many, whole": ([3, 17, 0, 33, 1, 1, 40, 2] * 5 + [128, 96, 1], None, {"heads": (3, 1), "dim": 128, "dtype": BF16}),
    "64 more tokens than keys": ([140, 3], [70, 9], {"heads": (4, 1), "dim": 64, "dtype": BF16}),
    "64 many more tokens than keys": ([1500], [40], {"heads": (1, 1), "dim": 64, "dtype": BF16, "causal": False}),
    "float32": ([17, 0, 33], None, {"heads": (2, 1), "dim": 32, "dtype": FP32, "tail": 3, "sinks": True}),
    "64, sums go around": ([200, 130, 30], None, {"heads": (7, 7), "dim": 64, "dtype": BF16, "causal": False}),
    "64, sums go around from the last row": ([300], None, {"heads": (24, 3), "dim": 64, "dtype": FP16, "window_size": (20, 0)}),
    "96, from the last row": ([260], None, {"heads": (8, 1), "dim": 96, "dtype": BF16}),  # start_at_last_row
    "192, values of 128": (EDGES[:-1], None, {"heads": (2, 1), "dim": 192, "dim_v": 128, "dtype": BF16}),
    "192, values of 128, features": (*CROSS, {"heads": (2, 2), "dim": 184, "dim_v": 120, "dtype": FP16, "window_size": (40, 0), "softcap": 3.0, "sinks": True, "tail": 2}),
    "96, values of 64": (EDGES[:-1], None, {"heads": (4, 2), "dim": 96, "dim_v": 64, "dtype": BF16}),
    "64, values of 128": (EDGES[:-1], None, {"heads": (4, 2), "dim": 64, "dim_v": 128, "dtype": BF16}),
    "512": ([1, 17, 0, 70], None, {"heads": (2, 1), "dim": 512, "dtype": BF16}),
    "512 features, values of 264": ([5, 40, 1], [7, 33, 9], {"heads": (3, 1), "dim": 320, "dim_v": 264, "dtype": FP16, "causal": False, "window_size": (20, 3), "softcap": 3.0, "sinks": True, "tail": 2}),
    "512, from the last row": ([36], None, {"heads": (32, 1), "dim": 512, "dtype": BF16}),  # start_at_last_row
    "float32, values of their own": ([17, 0, 33], None, {"heads": (2, 1), "dim": 24, "dim_v": 300, "dtype": FP32, "tail": 3, "sinks": True}),
}  # fmt: skip
# Those where less shared memory takes other kernels.
ROOMS = [
    "512",
    "512 features, values of 264",
    "192, values of 128",
    "96, from the last row",
    "128",
    "128 full, keys of their own",
    "128 window, softcap, sinks",
    "192",
    "256",
]
LARGE_ROOM = [
    "64",
    "128 full, keys of their own",
    "64 more tokens than keys",
    "64 many more tokens than keys",
]  # which sm_90 has wgmma for
# On sm_90 these run wgmma kernels, which test_emulated_attention_sm90.py covers; here they run as on sm_80.
BY_WGMMA = [
    "64",
    "128 many, whole",
    "64 more tokens than keys",
    "64 many more tokens than keys",
    "64, sums go around",
    "64, sums go around from the last row",
    "96, from the last row",
    "96, values of 64",
    "64, values of 128",
]


def assert_near_on_every_schedule(case, gpu):
    """Near the oracle, and the same bits whichever thread is ahead and whenever copies arrive."""
    found, again, exact = results(case, gpu), results(case, gpu, "late copies"), case.exact()
    for key, value in found.items():
        assert_same(again[key], value)
        visible = exact[key].isfinite()
        assert_same(value[~visible], exact[key][~visible].to(value.dtype))
        error = (value[visible].double() - exact[key][visible]).norm() / exact[key][visible].norm()
        assert error < (TOLERANCE[case.q.dtype] if key != "dsinks" else 0.02), f"{key}: {error:.1e}"


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        *(("sm_90", name) for name in CASES if name not in BY_WGMMA),
        *(("sm_80", name) for name in CASES if name in {*ROOMS, *BY_WGMMA}),
        *(("sm_89", name) for name in ROOMS),
        *(("sm_100", name) for name in LARGE_ROOM),
    ],
    ids=str,
)
def test_error_and_schedules(gpu, name):
    """Near the oracle, and the same bits whichever thread is ahead and whenever copies arrive."""
    lengths_q, lengths_k, options = CASES[name]
    case = Case(lengths_q, lengths_k, **options)
    assert_near_on_every_schedule(case, gpu)


@pytest.mark.parametrize(
    ("gpu", "lengths", "sizes"),
    [
        *((gpu, EDGES, {"heads": (4, 1), "dim": 128}) for gpu in ("sm_90", "sm_89")),
        ("sm_90", EDGES[:-1], {"heads": (2, 1), "dim": 192, "dim_v": 128}),
        *((gpu, [1, 33, 0, 40], {"heads": (2, 1), "dim": 512}) for gpu in ("sm_90", "sm_89")),
    ],
    ids=str,
)
def test_documents_keep_their_bits(gpu, lengths, sizes):
    case = Case(lengths, dtype=BF16, **sizes)
    whole, start = results(case, gpu), 0
    for length in lengths:
        end = start + length
        alone = results(document_alone(case, start, end, (start, end)), gpu)
        found = document_results(whole, start, end, (start, end))
        for key, value in document_results(alone, 0, length, (0, length)).items():
            assert_same(found[key], value)
        start = end


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("64", "sm_89"),
        ("96, from the last row", "sm_80"),
        ("128 full, keys of their own", "sm_80"),
        ("192", "sm_80"),
        ("192, values of 128", "sm_80"),
        ("256", "sm_80"),
        ("512", "sm_80"),
    ],
)
def test_scores_ahead_keep_the_bits(name, gpu):
    """The order of work within a block of much shared memory gives the sums of GPUs with less and the same tiles."""
    lengths_q, lengths_k, options = CASES[name]
    if name == "96, from the last row":  # rows that see 65 to 128 keys have steps of 32 on both only in groups up to 4
        lengths_q, options = [520], options | {"heads": (4, 1)}
    case = Case(lengths_q, lengths_k, **options)
    found = results(case, gpu)
    for key, value in results(case, "sm_100", "late copies").items():
        assert_same(value, found[key])


@pytest.mark.parametrize("dims", [(192, 128), (512, 512)], ids=str)
def test_error_is_at_most_twice_that_of_torch(dims):
    case = Case([70], heads=(2, 1), dim=dims[0], dim_v=dims[1], dtype=BF16)
    case.dlse.zero_()
    found, exact, theirs = results(case, "sm_90"), case.exact(), case.sdpa()
    for name in ("out", "dq", "dk", "dv"):
        assert_error_within(found[name], theirs[name], exact[name])


def test_python_knows_the_size_of_a_plan():
    """_plan_size is attention_plan_size again, for fake tensors: their sizes may be symbols, which C++ cannot take."""
    library, rng = emulated.library(HEADERS), random.Random(0)
    cases = [(0, 0, 0, 1, 0), (100, 100, 3, 4, 0), (65, 1000, 17, 1, 1), (1, 1, 1, 128, 1)]
    for _ in range(5000):
        most = rng.choice([10, 1000, 2**20, 2**31 - 1])
        totals = rng.randint(0, most), rng.randint(0, most)
        cases.append((*totals, rng.randint(0, min(most, 10**6)), rng.choice([1, 2, 3, 8, 128]), rng.randint(0, 1)))
    assert [case for case in cases if _plan_size(*case) != library.emulated_plan_size(*case, 0)] == []
    assert library.emulated_plan_size(65, 0, 17, 4, 0, 1) == 4 + _plan_size(65, 0, 17, 4)  # of keys in pages


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_plan_of_other_documents_is_a_fault(dtype):
    case = Case([5, 9, 3], heads=(2, 1), dim=64, dtype=dtype)
    options = {"late_copies": False, "seed": 0}
    emulated.attention(case, HEADERS, "sm_90", planned_for=case.cu_seqlens[0].clone(), **options)
    with pytest.raises(RuntimeError, match="fault"):
        emulated.attention(
            case, HEADERS, "sm_90", planned_for=torch.tensor([0, 5, 13, 17], dtype=torch.int32), **options
        )


@pytest.mark.parametrize(
    ("gpu", "lengths", "sizes"),
    [
        ("sm_90", [15], {"heads": (8, 1), "dim": 128}),
        ("sm_80", [5, 5, 5], {"heads": (4, 1), "dim": 64}),
        ("sm_90", [17], {"heads": (2, 1), "dim": 32, "dtype": FP32}),
    ],
    ids=str,
)
def test_a_plan_of_other_totals_is_a_fault(gpu, lengths, sizes):
    """Where its lists are depends on the totals, which its size need not tell."""
    case = Case(lengths, tail=1, **{"dtype": BF16, **sizes})
    with pytest.raises(RuntimeError, match="fault"):
        emulated.attention(case, HEADERS, gpu, planned_for=case.cu_seqlens[0].clone(), late_copies=False, seed=0)


def test_wrong_cu_seqlens_give_zeros_and_an_error():
    case = Case([5, 9], heads=(2, 1), dim=64, dtype=BF16)
    case.cu_seqlens[0][1] = 20
    with pytest.raises(RuntimeError, match="fault"):
        results(case, "sm_90")
