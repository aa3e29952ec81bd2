"""visible_end in the CUDA kernels of attention without a GPU (tests/emulator)."""

import re

import pytest
from emulator.build import cuda_headers
from helpers import assert_same, emulated
from helpers.attention_case import Case, document_alone, document_results
from test_emulated_attention import BF16, CROSS, EDGES, FP16, FP32, assert_near_on_every_schedule, results
from test_visible_end import causal_ends, ends_case, with_ends

HEADERS = cuda_headers()
pytestmark = pytest.mark.skipif(HEADERS is None, reason="needs the CUDA toolkit's headers")
MORE_TOKENS = [140, 3], [70, 9]

CASES = {
    "64": (EDGES, None, {"heads": (4, 2), "dim": 64, "dtype": BF16}),
    "128 window, softcap, sinks": (EDGES, None, {"heads": (6, 3), "dim": 128, "dtype": BF16, "window_size": (40, -1), "softcap": 3.0, "sinks": True}),
    "128 keys of their own": (*CROSS, {"heads": (3, 3), "dim": 128, "dtype": FP16, "tail": 2}),
    "64 more tokens than keys": (*MORE_TOKENS, {"heads": (4, 1), "dim": 64, "dtype": BF16}),
    "96, from the last row": ([260], None, {"heads": (8, 1), "dim": 96, "dtype": BF16}),
    "64, sums go around": ([200, 130, 30], None, {"heads": (7, 7), "dim": 64, "dtype": BF16, "window_size": (90, -1)}),
    "192": (EDGES[:-1], None, {"heads": (2, 1), "dim": 192, "dtype": BF16}),
    "256": (EDGES[:-1], None, {"heads": (2, 1), "dim": 256, "dtype": FP16}),
    "192, values of 128": (EDGES[:-1], None, {"heads": (2, 1), "dim": 192, "dim_v": 128, "dtype": BF16, "window_size": (40, -1)}),
    "64, values of 128": ([65, 129], None, {"heads": (4, 2), "dim": 64, "dim_v": 128, "dtype": BF16}),
    "512": ([1, 17, 0, 70], None, {"heads": (2, 1), "dim": 512, "dtype": BF16}),
    "512 features, values of 264": ([5, 40, 1], [7, 33, 9], {"heads": (3, 1), "dim": 320, "dim_v": 264, "dtype": FP16, "window_size": (20, -1), "softcap": 3.0, "sinks": True, "tail": 2}),
    "float32, values of their own": ([17, 0, 33], None, {"heads": (2, 1), "dim": 24, "dim_v": 300, "dtype": FP32, "tail": 3}),
    "float32": ([17, 0, 33], None, {"heads": (2, 1), "dim": 32, "dtype": FP32, "tail": 3, "sinks": True}),
}  # fmt: skip
GPUS = {
    "sm_80": CASES,
    "sm_89": ["128 window, softcap, sinks", "96, from the last row", "192, values of 128", "512"],
}
GPUS["sm_90"] = ["128 window, softcap, sinks", "192, values of 128", "64, values of 128", "512", "512 features, values of 264"]  # fmt: skip
GPUS["sm_100"] = ["64", "128 keys of their own"]

# Documents of several key tiles: wgmma on sm_90. `ahead`: spans of packed rows that see each other, besides the share.
HOPPER = {
    "128, images across tiles and units": ([200, 1, 140], None, {"heads": (4, 1), "dim": 128, "dtype": BF16}, [(20, 190), (210, 340)]),
    "64, images across tiles and units": ([260, 1, 140], None, {"heads": (2, 1), "dim": 64, "dtype": BF16}, [(120, 250), (270, 391)]),
    "128, group of 3, window, sinks": ([200, 140], None, {"heads": (3, 1), "dim": 128, "dtype": BF16, "window_size": (60, -1), "sinks": True}, [(100, 164)]),
    "64, group of 5, window": ([260], None, {"heads": (5, 1), "dim": 64, "dtype": FP16, "window_size": (100, -1)}, [(130, 250)]),
    "72 columns, group of 7, fewer queries than keys": ([40, 0, 20], [270, 140, 129], {"heads": (7, 1), "dim": 72, "dtype": FP16, "tail": 3}, []),
    "64, more queries than keys": ([150, 3], [140, 9], {"heads": (6, 1), "dim": 64, "dtype": BF16, "tail": 1}, []),
    "64, from the last row": ([140], None, {"heads": (16, 1), "dim": 64, "dtype": FP16}, [(3, 135)]),
    "192, images across tiles and units": ([200, 1, 140], None, {"heads": (4, 1), "dim": 192, "dtype": BF16}, [(20, 190), (210, 340)]),
    "192 and 128 columns, group of 3, window, sinks": ([200, 140], None, {"heads": (3, 1), "dim": 192, "dim_v": 128, "dtype": BF16, "window_size": (60, -1), "sinks": True}, [(100, 164)]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "name", "share"),
    [
        *((gpu, name, 0.02) for gpu, names in GPUS.items() for name in names),
        *(("sm_80", name, 0.5) for name in ("128 window, softcap, sinks", "float32")),
    ],
    ids=str,
)
def test_error_and_schedules(gpu, name, share):
    lengths_q, lengths_k, options = CASES[name]
    case = ends_case(lengths_q, lengths_k, share=share, **options)
    assert_near_on_every_schedule(case, gpu)


@pytest.mark.parametrize(
    ("gpu", "name", "kinds"),
    [
        ("sm_80", "64", ["causal", "full"]),
        ("sm_80", "128 keys of their own", ["full"]),
        ("sm_100", "96, from the last row", ["causal"]),
        ("sm_100", "float32", ["causal", "full"]),
        ("sm_90", "192, values of 128", ["causal", "full"]),
        ("sm_90", "512", ["full"]),
        ("sm_90", "128, group of 3, window, sinks", ["causal", "full"]),
        ("sm_90", "72 columns, group of 7, fewer queries than keys", ["full"]),
        ("sm_90", "64, more queries than keys", ["causal", "full"]),
        ("sm_90", "64, from the last row", ["causal"]),
    ],
)
def test_the_bits_of_causal_and_of_full_attention(gpu, name, kinds):
    for kind in kinds:
        assert_the_bits_of(kind, gpu, name)


def assert_the_bits_of(kind, gpu, name):
    lengths_q, lengths_k, options = (CASES[name] if name in CASES else HOPPER[name])[:3]
    case = Case(lengths_q, lengths_k, causal=kind == "causal", **options)
    ends = causal_ends(case)
    if kind == "full":
        lengths = [cu.diff() for cu in case.cu_seqlens]
        ends[: case.cu_seqlens[0][-1]] = lengths[1].repeat_interleave(lengths[0].long()).int()
    rest = {key: value for key, value in case.options.items() if key != "causal"}
    found = results(with_ends(case, ends, **rest), gpu)
    for key, value in results(case, gpu).items():
        assert_same(found[key], value)


@pytest.mark.parametrize("gpu", ["sm_90", "sm_89"])
def test_documents_keep_their_bits(gpu):
    case = ends_case(EDGES, share=0.05, heads=(4, 1), dim=128, dtype=BF16, window_size=(70, -1))
    whole, start = results(case, gpu), 0
    for length in EDGES:
        end = start + length
        alone = results(document_alone(case, start, end, (start, end)), gpu)
        found = document_results(whole, start, end, (start, end))
        for key, value in document_results(alone, 0, length, (0, length)).items():
            assert_same(found[key], value)
        start = end


def hopper_case(name, share=0.02):
    lengths_q, lengths_k, options, ahead = HOPPER[name]
    case = ends_case(lengths_q, lengths_k, share=share, **options)
    ends = case.options["visible_end"]
    for first, last in ahead:
        ends[first:last] = ends[first:last].clamp(min=causal_ends(case)[last - 1].item())
    return case


@pytest.mark.parametrize("name", HOPPER)
def test_error_and_schedules_on_wgmma(name):
    assert_near_on_every_schedule(hopper_case(name), "sm_90")
    ran = emulated.launched(HEADERS)
    assert all(f"attention_{direction}_sm90" in ran for direction in ("forward", "backward")), ran
    assert "attention_forward_kernel" not in ran
    assert "attention_backward_kernel" not in ran


def number_of(fault):
    enum = (emulated.ROOT / "csrc/core/fault.h").read_text().partition("enum class Fault")[2].partition("};")[0]
    return re.findall(r"^ +(k\w+)", enum, re.M).index(fault)


WRONG = {"kVisibleEndBeforeOwn": (8, 3), "kVisibleEndPastKeys": (4, 6), "kVisibleEndOrder": (1, 5)}  # index, value


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_wrong_values_are_a_fault(fault, dtype):
    index, value = WRONG[fault]
    case = Case([5, 6], heads=(2, 1), dim=64, dtype=dtype, tail=1)
    ends = causal_ends(case)
    ends[index] = value
    with pytest.raises(RuntimeError, match=f"fault {number_of(fault)}$"):
        results(with_ends(case, ends), "sm_90")


@pytest.mark.parametrize(("dtype", "dim"), [(BF16, 64), (BF16, 512), (FP32, 64)], ids=str)
def test_a_plan_of_other_ends_is_a_fault(dtype, dim):
    case = Case([5, 9, 3], heads=(2, 1), dim=dim, dtype=dtype)
    ends, options = causal_ends(case), {"late_copies": False, "seed": 0}
    case = with_ends(case, ends)
    emulated.attention(case, HEADERS, "sm_90", planned_ends=ends.clone(), **options)
    other = ends.clone()
    other[0] = 4
    other[1:4] = 4
    with pytest.raises(RuntimeError, match=f"fault {number_of('kPlanOfOtherVisibleEnd')}$"):
        emulated.attention(case, HEADERS, "sm_90", planned_ends=other, **options)
