"""Attention's kernels for compute capability 9.0 without a GPU: tensor maps, barriers and products by
tests/emulator, which ends the process where a kernel reads what its writer has not fenced off."""

import pytest
import torch
from emulator.build import cuda_headers
from helpers import assert_same, emulated
from helpers.attention_case import Case, document_alone, document_results, drawn_ends

HEADERS = cuda_headers()
pytestmark = pytest.mark.skipif(HEADERS is None, reason="needs the CUDA toolkit's headers")

BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 3e-3, FP16: 4e-4}  # root of the mean square, relative
SCHEDULES = {"late reads": (False, 0), "late copies": (True, 1), "late copies, one block ahead": (True, 3)}


def forward(case, schedule="late reads", *, backward=False):
    late_copies, seed = SCHEDULES[schedule]
    return emulated.attention(case, HEADERS, "sm_90", late_copies=late_copies, seed=seed, backward=backward)


def with_gradients(case, schedule="late reads"):
    return forward(case, schedule, backward=True)


CASES = {
    "group of 1": ([129, 200], None, {"heads": (2, 2), "dim": 128, "dtype": BF16}),
    "group of 3, more tokens, sinks": ([200, 3, 300], [150, 9, 200], {"heads": (3, 1), "dim": 128, "dtype": BF16, "sinks": True}),
    "group of 4, more keys": ([1, 130], [300, 257], {"heads": (4, 1), "dim": 128, "dtype": FP16}),
    "group of 5, columns, tail": ([140, 129], None, {"heads": (5, 1), "dim": 72, "dtype": FP16, "tail": 3}),
    "group of 7, window": ([200], None, {"heads": (7, 1), "dim": 64, "dtype": BF16, "causal": False, "window_size": (40, 30)}),
    "group of 8, left window": ([400], None, {"heads": (8, 1), "dim": 64, "dtype": BF16, "window_size": (100, 0)}),
    "no keys": ([130, 129], [0, 129], {"heads": (2, 1), "dim": 64, "dtype": BF16, "causal": False, "sinks": True}),
    "no keys at all": ([130], [0], {"heads": (2, 1), "dim": 64, "dtype": BF16}),
    "many of one key past a tile": ([129] * 5, None, {"heads": (2, 1), "dim": 64, "dtype": BF16}),
    "head_dim 192, group of 3": ([129, 70], [200, 140], {"heads": (3, 1), "dim": 192, "dtype": BF16, "sinks": True}),
    "head_dim 256, window": ([150], None, {"heads": (4, 1), "dim": 256, "dtype": FP16, "window_size": (70, 0)}),
    "head_dim 96, group of 1": ([300, 129], None, {"heads": (2, 2), "dim": 96, "dtype": BF16}),
    "head_dim 64, group of 3, windows": ([330, 129], [400, 129], {"heads": (3, 1), "dim": 64, "dtype": FP16, "causal": False, "window_size": (200, 130)}),
    "many more tokens than keys": ([1500], [40], {"heads": (1, 1), "dim": 64, "dtype": BF16, "causal": False}),
    "192 and 128 columns": ([140, 20], [260, 20], {"heads": (2, 2), "dim": 192, "dim_v": 128, "dtype": BF16}),
    "200 and 72 columns": ([129], None, {"heads": (2, 1), "dim": 200, "dim_v": 72, "dtype": BF16}),
    "56 and 96 columns": ([129], None, {"heads": (4, 1), "dim": 56, "dim_v": 96, "dtype": BF16}),
    "many of head_dim 256": ([129] * 3, None, {"heads": (1, 1), "dim": 256, "dtype": BF16}),
    "softcap, head_dim 64, window, sinks": ([200, 3], [260, 140], {"heads": (3, 1), "dim": 64, "dtype": BF16, "softcap": 3.0, "window_size": (100, 0), "sinks": True}),
    "softcap, head_dim 128": ([140], None, {"heads": (4, 2), "dim": 128, "dtype": FP16, "softcap": 0.5}),
    "softcap, 192 and 128 columns": ([140], None, {"heads": (1, 1), "dim": 192, "dim_v": 128, "dtype": BF16, "softcap": 3.0}),
    "softcap, head_dim 256": ([70, 150], [135, 150], {"heads": (5, 1), "dim": 256, "dtype": BF16, "softcap": 3.0}),
    "softcap far above the scores": ([140], None, {"heads": (2, 1), "dim": 256, "dtype": FP16, "softcap": 3e38}),
    "scale below 0": ([150], None, {"heads": (4, 1), "dim": 128, "dtype": BF16, "softmax_scale": -0.1}),
    "scale of 0": ([130], [150], {"heads": (2, 1), "dim": 192, "dtype": BF16, "softmax_scale": 0.0}),
    "units of three tiles, group of 64": ([1540, 21, 3], [0, 300, 500], {"heads": (64, 1), "dim": 128, "dtype": BF16}),
    "units of three tiles, group of 24, window": ([3100, 70, 7], [0, 500, 5], {"heads": (24, 1), "dim": 128, "dtype": FP16, "window_size": (150, 0), "sinks": True}),
    "units of three tiles, softcap": ([24_600, 333], [0, 400], {"heads": (4, 1), "dim": 128, "dtype": BF16, "softcap": 3.0, "causal": False}),
    "units of three tiles, 80 columns": ([1540, 21, 3], [0, 300, 500], {"heads": (64, 1), "dim": 80, "dtype": FP16}),
    "a unit's description is read by all lanes": ([64, 30_000], [129, 0], {"heads": (3, 1), "dim": 128, "dtype": BF16}),
    "many, drained": ([129] * 5, None, {"heads": (2, 1), "dim": 128, "dtype": BF16}),
}  # fmt: skip


# Documents of several key tiles, whose row tiles are taken from the first or, from 2048 rows on, from the last.
GRADIENTS = {
    "group of 1": ([200], None, {"heads": (1, 1), "dim": 128, "dtype": BF16}),
    "group of 3, keys of their own, sinks": ([200, 3], [150, 9], {"heads": (3, 1), "dim": 128, "dtype": BF16, "sinks": True}),
    "group of 5, columns, tail": ([140], None, {"heads": (5, 1), "dim": 72, "dtype": FP16, "causal": False, "tail": 3}),
    "group of 7, window": ([200], None, {"heads": (7, 1), "dim": 64, "dtype": BF16, "causal": False, "window_size": (40, 30)}),
    "from the last row": ([140], None, {"heads": (16, 1), "dim": 64, "dtype": FP16}),
    # 12 tiles in a ring of 8
    "sums go around": ([150], None, {"heads": (4, 4), "dim": 64, "dtype": BF16, "causal": False}),
    "no tokens, no keys": ([0, 130, 60], [140, 0, 300], {"heads": (2, 1), "dim": 64, "dtype": BF16}),
    "96 and 64 columns": ([140], [200], {"heads": (3, 1), "dim": 96, "dim_v": 64, "dtype": BF16}),
    "40 and 64 columns": ([140], None, {"heads": (4, 1), "dim": 40, "dim_v": 64, "dtype": FP16}),
    "one tile": ([100, 65, 128, 64], None, {"heads": (3, 1), "dim": 128, "dtype": BF16, "window_size": (80, 0)}),
    "one tile, more keys, sinks": ([3, 150], [120, 70], {"heads": (4, 1), "dim": 64, "dtype": FP16, "sinks": True}),
    "softcap, one tile": ([100, 65], None, {"heads": (5, 1), "dim": 128, "dtype": BF16, "softcap": 3.0}),
    "head_dim 256, group of 3, sinks": ([200, 3], [150, 9], {"heads": (3, 1), "dim": 256, "dtype": BF16, "sinks": True}),
    "head_dim 256, window, tail": ([150, 64], None, {"heads": (2, 1), "dim": 256, "dtype": FP16, "window_size": (70, 10), "tail": 3}),
    "head_dim 256, from the last row": ([70], None, {"heads": (32, 1), "dim": 256, "dtype": BF16}),
    "200 and 72 columns": ([130, 0], [200, 70], {"heads": (2, 2), "dim": 200, "dim_v": 72, "dtype": BF16}),
    "head_dim 192, group of 3, keys of their own, sinks": ([200, 3], [150, 9], {"heads": (3, 1), "dim": 192, "dtype": BF16, "sinks": True}),
    "head_dim 160, window, tail": ([250, 64], None, {"heads": (2, 1), "dim": 160, "dtype": FP16, "window_size": (70, 10), "tail": 3}),
    "head_dim 192, from the last row": ([140], None, {"heads": (16, 1), "dim": 192, "dtype": BF16}),
    "head_dim 192, one tile": ([96, 65, 97, 64], None, {"heads": (8, 1), "dim": 192, "dtype": BF16, "window_size": (80, 0)}),
    "136 and 192 columns": ([140], [200], {"heads": (3, 1), "dim": 136, "dim_v": 192, "dtype": FP16}),
    "192 and 128 columns": ([200, 3], [150, 9], {"heads": (3, 1), "dim": 192, "dim_v": 128, "dtype": BF16}),
    "192 and 128 columns, sums go around": ([150], None, {"heads": (4, 4), "dim": 192, "dim_v": 128, "dtype": BF16, "causal": False}),
    "192 and 128 columns, from the last row": ([140, 70], None, {"heads": (16, 1), "dim": 192, "dim_v": 128, "dtype": FP16}),
    "184 and 64 columns, no tokens, no keys": ([0, 130, 60], [140, 0, 300], {"heads": (2, 1), "dim": 184, "dim_v": 64, "dtype": BF16}),
    "softcap, head_dim 192": ([200], None, {"heads": (8, 1), "dim": 192, "dtype": BF16, "softcap": 3.0}),
    "softcap, 184 and 120 columns, window, sinks": ([200, 3], [150, 9], {"heads": (1, 1), "dim": 184, "dim_v": 120, "dtype": FP16, "window_size": (100, 0), "softcap": 3.0, "sinks": True}),
    "scale below 0, 192 and 128 columns": ([140], None, {"heads": (2, 1), "dim": 192, "dim_v": 128, "dtype": BF16, "softmax_scale": -0.1}),
    "softcap, head_dim 256": ([140], None, {"heads": (5, 1), "dim": 256, "dtype": BF16, "softcap": 3.0}),
    "softcap of 50, head_dim 256": ([100], None, {"heads": (2, 1), "dim": 256, "dtype": FP16, "softcap": 50.0, "softmax_scale": 0.1}),
    "softcap, window, sinks": ([200, 3], [150, 9], {"heads": (3, 1), "dim": 128, "dtype": BF16, "softcap": 3.0, "window_size": (100, 0), "sinks": True}),
    "softcap, head_dim 64": ([140], None, {"heads": (5, 1), "dim": 64, "dtype": BF16, "softcap": 3.0}),
    "softcap far above the scores": ([140], None, {"heads": (2, 1), "dim": 64, "dtype": FP16, "softcap": 3e38}),
    "scale below 0": ([140], None, {"heads": (2, 1), "dim": 64, "dtype": BF16, "softmax_scale": -0.1}),
    "scale below 0, softcap": ([140], None, {"heads": (2, 1), "dim": 256, "dtype": BF16, "softmax_scale": -0.1, "softcap": 2.0}),
    "scale below 0, head_dim 256": ([140], None, {"heads": (1, 1), "dim": 256, "dtype": BF16, "softmax_scale": -0.1}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "filling", "dim"), [((64, 1), 1540, 128), ((64, 1), 1540, 96), ((12, 4), 8100, 128)], ids=str
)
def test_units_of_two_tiles_have_the_bits_of_three(heads, filling, dim):
    """Alone, a document has units of two tiles; next to many tokens, which see no key here, of three."""
    case = Case([filling, 21, 66], [0, 300, 66], heads=heads, dim=dim, dtype=BF16, window_size=(200, 0))
    whole, alone = forward(case), forward(document_alone(case, filling, filling + 21, (0, 300)))
    assert_same(alone["out"], whole["out"][filling : filling + 21])
    assert_same(alone["lse"], whole["lse"][:, filling : filling + 21])


@pytest.mark.parametrize(
    ("run", "cases", "name"),
    [*((forward, CASES, name) for name in CASES), *((with_gradients, GRADIENTS, name) for name in GRADIENTS)],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_error_and_schedules(run, cases, name):
    lengths_q, lengths_k, options = cases[name]
    case = Case(lengths_q, lengths_k, **options)
    found, exact = run(case), case.exact(backward=run is with_gradients)
    for key, value in run(case, "late copies, one block ahead").items():
        assert_same(found[key], value)
    for key, value in found.items():
        visible = exact[key].isfinite()
        assert_same(value[~visible], exact[key][~visible].to(value.dtype))
        error = (value.double() - exact[key]).where(visible, 0).norm()
        tolerance = 0.02 if key == "dsinks" else TOLERANCE[options["dtype"]]
        assert error <= exact[key].where(visible, 0).norm() * tolerance, f"{key}: {error:.1e}"


@pytest.mark.parametrize(("heads", "dim"), [((4, 1), 128), ((3, 1), 128), ((5, 1), 64), ((3, 1), 192)], ids=str)
def test_documents_keep_their_bits(heads, dim):
    """Alone, and next to documents that are NaN everywhere."""
    lengths = [129, 1, 150, 65, 257]
    case = Case(lengths, heads=heads, dim=dim, dtype=BF16)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    other = torch.zeros(ends[-1], dtype=torch.bool)
    for i in (1, 3):
        other[ends[i] - lengths[i] : ends[i]] = True
    whole = forward(case)
    for end, length in zip(ends, lengths, strict=True):
        start = end - length
        alone = forward(document_alone(case, start, end, (start, end)))
        assert_same(alone["out"], whole["out"][start:end])
        assert_same(alone["lse"], whole["lse"][:, start:end])
    for tensor in (case.q, case.k, case.v):
        tensor[other] = float("nan")
    beside_nan = forward(case, "late copies")
    assert_same(beside_nan["out"][~other], whole["out"][~other])
    assert_same(beside_nan["lse"][:, ~other], whole["lse"][:, ~other])


@pytest.mark.parametrize(
    ("heads", "dims", "ahead"),
    [
        ((3, 1), (128, 128), None),
        ((4, 1), (64, 64), None),
        ((3, 1), (192, 192), None),
        ((3, 1), (64, 64), 0.05),
        ((5, 1), (128, 128), 0.05),
        ((8, 1), (192, 128), 0.05),
        ((3, 1), (256, 256), 0.05),
    ],
    ids=str,
)
def test_gradients_keep_their_bits(heads, dims, ahead):
    """Alone, and next to documents that are NaN everywhere; ``ahead``: the share of queries that visible_end lets look
    ahead.
    """
    lengths = [70, 1, 140, 65]
    options = {} if ahead is None else {"visible_end": drawn_ends(lengths, share=ahead)}
    case = Case(lengths, heads=heads, dim=dims[0], dim_v=dims[1], dtype=BF16, **options)
    whole = with_gradients(case)
    for start, end in ((0, 70), (71, 211)):
        alone = with_gradients(document_alone(case, start, end))
        for key, value in document_results(alone, 0, end - start).items():
            assert_same(document_results(whole, start, end)[key], value)
    for tensor in (case.q, case.k, case.v, case.dout):
        tensor[:71] = tensor[211:] = float("nan")
    beside_nan = with_gradients(case, "late copies")
    for key, value in document_results(whole, 71, 211).items():
        assert_same(document_results(beside_nan, 71, 211)[key], value)


@pytest.mark.parametrize(
    ("heads", "dim", "length", "at", "softcap"),
    [
        ((1, 1), 64, 450, 390, 0.0),
        ((1, 1), 64, 650, 520, 0.0),
        ((1, 1), 96, 650, 520, 0.0),
        ((3, 1), 64, 400, 390, 0.0),
        ((1, 1), 64, 450, 390, 3.0),
    ],
    ids=str,
)
def test_a_poisoned_key_reaches_only_rows_near_those_that_see_it(heads, dim, length, at, softcap):
    """The grain of packing_ops.attention's page: 128 keys, and less than 192 rows."""
    case = Case([length], heads=heads, dim=dim, dtype=BF16, window_size=(20, 0), softcap=softcap)
    clean = forward(case)
    case.k[at], case.v[at] = float("inf"), float("nan")
    found = forward(case)
    rows = torch.arange(length)
    sees = (rows >= at) & (rows <= at + 20)
    far = (rows <= at // 128 * 128 - 192) | (rows >= at // 128 * 128 + 128 + 20 + 191)
    assert found["out"][sees].isnan().all()
    assert far.any()
    assert_same(found["out"][far], clean["out"][far])
    assert_same(found["lse"][:, ~sees], clean["lse"][:, ~sees])


# Rows that see few keys, and documents of one small tile of keys, run on kernels of sm80/ there.
BOTH, BOTH_BACKWARD = "sm90 and sm80, sm90 and sm80", "sm90, sm90 and sm80"


@pytest.mark.parametrize(
    ("gpu", "dtype", "heads", "dim", "softcap", "kernels"),
    [
        ("sm_90", BF16, (4, 1), 128, 0.0, BOTH),
        ("sm_90", FP16, (4, 1), 72, 0.0, BOTH),
        ("sm_90", BF16, (4, 1), 136, 0.0, BOTH_BACKWARD),
        ("sm_90", BF16, (4, 1), 200, 0.0, BOTH_BACKWARD),
        ("sm_90", BF16, (4, 1), 256, 20.0, BOTH_BACKWARD),
        ("sm_90", BF16, (4, 1), 264, 0.0, "sm80, sm80"),
        ("sm_90", BF16, (4, 1), 64, 20.0, BOTH),
        ("sm_90", BF16, (65, 1), 64, 0.0, "sm80, sm80"),
        ("sm_90", torch.float32, (4, 1), 64, 0.0, "fp32, fp32"),
        ("sm_80", BF16, (4, 1), 128, 0.0, "sm80, sm80"),
        ("sm_100", BF16, (4, 1), 128, 0.0, "sm80, sm80"),
    ],
)
def test_the_kernels_that_are_told_are_those_that_run(gpu, dtype, heads, dim, softcap, kernels):
    told_are_those_that_run(Case([33], heads=heads, dim=dim, dtype=dtype, softcap=softcap), gpu, kernels)


@pytest.mark.parametrize(
    ("dim", "dim_v", "kernels"),
    [(128, 64, BOTH), (64, 128, BOTH), (192, 128, BOTH_BACKWARD), (64, 512, "sm80, sm80")],
    ids=str,
)
def test_kernels_of_values_of_another_head_dim(dim, dim_v, kernels):
    told_are_those_that_run(Case([33], heads=(4, 1), dim=dim, dim_v=dim_v, dtype=BF16), "sm_90", kernels)


@pytest.mark.parametrize(("dim", "kernels"), [(64, BOTH), (128, BOTH), (512, "sm80, sm80")])
def test_visible_end_runs_where_causal_attention_does(dim, kernels):
    ends = torch.arange(1, 34, dtype=torch.int32)
    told_are_those_that_run(Case([33], heads=(4, 1), dim=dim, dtype=BF16, visible_end=ends), "sm_90", kernels)


def told_are_those_that_run(case, gpu, kernels):
    assert emulated.kernels(case, HEADERS, gpu) == kernels
    emulated.attention(case, HEADERS, gpu, late_copies=False, seed=0)
    ran = emulated.launched(HEADERS)
    for direction, folders in zip(("forward", "backward"), kernels.split(", "), strict=True):
        of_direction = [line for line in ran.splitlines() if f"attention_{direction}" in line]
        on_sm90 = [f"attention_{direction}_sm90" in line for line in of_direction]
        assert ("sm90" in folders, "sm80" in folders) == (any(on_sm90), not all(on_sm90)), ran
