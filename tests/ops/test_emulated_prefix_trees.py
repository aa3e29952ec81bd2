"""Prefix trees in the CUDA kernels of attention without a GPU (tests/emulator): rows of k and v read in place
have the bits of k and v gathered along the paths, for leaves of any length.
"""

import copy
import re

import pytest
import torch
from emulator.build import cuda_headers
from helpers import ROOT, assert_same, emulated
from helpers.attention_case import Case

from packing_ops.keys import prefix_paths

HEADERS = cuda_headers()
pytestmark = pytest.mark.skipif(HEADERS is None, reason="needs the CUDA toolkit's headers")
BF16, FP16 = torch.bfloat16, torch.float16
FAULTS = re.findall(r"^  (k\w+)", (ROOT / "csrc" / "core" / "fault.h").read_text(), re.M)

# Depth first: a root of two blocks, leaves of any length, an inner segment, one without rows, a tree of one segment.
LENGTHS = [256, 5, 128, 1, 9, 0, 128, 63, 64, 129, 70]
PARENTS = [-1, 0, 0, 2, 2, 0, -1, 6, 6, 6, -1]
SHORT = [128, 5, 128, 1, 9, 0, 128, 15, 6, 70, 22]
FEWER = [128, 5, 128, 1, 9, 0, 128, 15, 6, 17, 22]  # for kernels that are slow here; their tiles are smaller, too
CASES = {
    "64": {"heads": (2, 2), "dim": 64, "dtype": BF16},
    "128": {"heads": (2, 1), "dim": 128, "dtype": BF16},
    "96, group of 3, sinks": {"heads": (3, 1), "dim": 96, "dtype": FP16, "sinks": True},
    "128, softcap": {"heads": (2, 1), "dim": 128, "dtype": BF16, "softcap": 3.0},
    "72 and 40 columns, window": {"heads": (2, 2), "dim": 72, "dim_v": 40, "dtype": BF16, "window_size": (140, 0)},
    "192 and 128 columns": {"heads": (2, 1), "dim": 192, "dim_v": 128, "dtype": BF16},
    "256": {"heads": (1, 1), "dim": 256, "dtype": BF16},
    "512": {"heads": (1, 1), "dim": 512, "dtype": BF16},
    "float32": {"heads": (1, 1), "dim": 40, "dtype": torch.float32, "window_size": (20, 0)},
}
GPUS = {
    "sm_90": CASES,
    "sm_80": ["64", "128", "96, group of 3, sinks", "72 and 40 columns, window", "256", "512"],
    "sm_89": ["128", "192 and 128 columns", "512"],
    "sm_100": ["64", "128", "128, softcap"],
}
WHOLE = [("sm_90", "64"), ("sm_90", "128, softcap"), ("sm_80", "64"), ("sm_89", "128"), ("sm_100", "64")]  # LENGTHS


def tree_case(lengths=LENGTHS, **options):
    """(the tree, the same call over keys along its paths, row_of_key): Cases that differ only in k and v."""
    lengths = torch.tensor(lengths)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    paths = prefix_paths(cu_seqlens, torch.tensor(PARENTS, dtype=torch.int32), int(lengths.sum()))
    gathered = Case(lengths.tolist(), paths.cu_seqlens.diff().tolist(), **options)
    tree = copy.copy(gathered)
    tree.k, tree.v = (torch.randn(int(lengths.sum()), *t.shape[1:], dtype=t.dtype) for t in (gathered.k, gathered.v))
    gathered.k, gathered.v = tree.k[paths.slot_of_key], tree.v[paths.slot_of_key]
    return tree, gathered, paths.slot_of_key


def results(case, gpu, late_copies=False, **others):
    return emulated.attention(case, HEADERS, gpu, late_copies=late_copies, seed=0, **others)


@pytest.mark.parametrize(("gpu", "name"), [(gpu, name) for gpu, names in GPUS.items() for name in names])
def test_bits_are_those_of_gathered_keys(gpu, name):
    """Also where copies are late, of which float32 makes none; where they are early once for each kernel."""
    lengths = LENGTHS if (gpu, name) in WHOLE else FEWER if name in ("512", "float32") else SHORT
    tree, gathered, row_of_key = tree_case(lengths, **CASES[name])
    expected = results(gathered, gpu)
    early = gpu in ("sm_90", "sm_80") or name not in GPUS["sm_80"]
    for late_copies in [False] if name == "float32" else [False, True] if early else [True]:
        found = results(tree, gpu, late_copies, row_of_key=row_of_key)
        assert found.keys() >= {"out", "lse", "dq", "dk", "dv"}
        for key in expected:
            assert_same(found[key], expected[key])


# The kernel of float32 is the same on every GPU, and slow here.
@pytest.mark.parametrize(
    ("gpu", "dtype", "heads"), [*((gpu, BF16, 2) for gpu in GPUS), ("sm_90", torch.float32, 1)], ids=str
)
@pytest.mark.parametrize(
    ("key", "row"), [(0, -1), (0, 2**31 - 1), (127, 900), (255, 0), (383, 0), (512, -(2**31)), (516, None)]
)
def test_rows_outside_or_apart_are_flagged(gpu, dtype, heads, key, row):
    """The first and the last key of what a tile of keys may read. None: the first row behind the last."""
    tree, _, row_of_key = tree_case(FEWER if dtype == torch.float32 else LENGTHS, heads=(heads, 1), dim=64, dtype=dtype)
    row_of_key = row_of_key.clone()
    row_of_key[key] = len(tree.k) if row is None else row
    with pytest.raises(RuntimeError, match="fault") as caught:
        results(tree, gpu, row_of_key=row_of_key, backward=False)
    assert FAULTS[int(str(caught.value).split()[1])] == "kRowOnPath"
