"""Kernels with every wait begun late at random: the same bits. `make jitter` builds that library."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, copy_of_package

LIBRARY = Path(os.environ.get("PACKING_OPS_JITTER_LIBRARY", ROOT / "build" / "jitter" / "packing_ops" / "_C.so"))
PRINT = """
import hashlib, torch
torch.manual_seed(0)

def print_three_times(name, call):
    for _ in range(3):
        bits = b"".join(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for tensor in call())
        print(name, hashlib.sha256(bits).hexdigest())
"""
ATTENTION = """
from helpers.attention_case import Case, drawn_ends
for dim, dim_v in ((64, 64), (128, 128), (96, 64), (192, 192), (192, 128), (256, 256)):
    for heads in ((4, 1), (3, 1), (2, 2), (64, 1)):  # of 64 to a kv head: units of three tiles with 96 and 128 columns too
        for options in ({}, {"window_size": (100, 0)}, {"causal": False}, {"visible_end": 0.05}, {"softcap": 3.0}):
            lengths = [700, 129, 257, 1, 1100]
            if "visible_end" in options:
                options = {"visible_end": drawn_ends(lengths, share=options["visible_end"], device="cuda")}
            case = Case(lengths, heads=heads, dim=dim, dim_v=dim_v, dtype=torch.bfloat16, device="cuda", **options)
            named = dim, dim_v, heads, sorted(options)
            print_three_times(named, lambda: [result for _, result in sorted(case.ours().items())])
"""
SCANS = """
import sys
sys.path.append(TESTS)
import test_scan, test_scan_mamba
for dims in ((64, 64), (128, 128), (256, 64), (64, 256)):
    for dtype in (torch.float32, torch.bfloat16):
        lengths = [700, 0, 129, 64, 1, 1100]
        for test, like_out in ((test_scan, 2), (test_scan_mamba, 0)):
            given, cu_seqlens = test.inputs_of("cuda", dtype, heads=(2, 4), dims=dims, lengths=lengths)
            in_order = lambda found: [*found.values()] if isinstance(found, dict) else found
            gradients = in_order(given)[like_out], in_order(given)[-1]
            results = lambda: test.results_of(test.ours, given, cu_seqlens, gradients)
            print_three_times((test.__name__, dims, dtype), lambda: in_order(results()))
"""
CASES = {"attention": ATTENTION, "scans": SCANS.replace("TESTS", repr(str(Path(__file__).parent)))}


def printed_by(package: Path, name: str) -> list[str]:
    path = os.pathsep.join([str(package.parent), *(each for each in sys.path if each and Path(each) != ROOT)])
    command = [sys.executable, "-P", "-c", PRINT + CASES[name]]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=package.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", CASES)
def test_other_timing_has_the_same_bits(tmp_path, name):
    if not LIBRARY.exists():
        pytest.skip("needs the library of make jitter")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    plain, late = (copy_of_package(tmp_path / name) for name in ("plain", "late"))
    shutil.copy(LIBRARY, late / "_C.so")
    wanted = printed_by(plain, name)
    assert len(set(wanted)) == len(wanted) // 3  # the same in each of three calls
    assert printed_by(late, name) == wanted
