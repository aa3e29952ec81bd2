"""compute-sanitizer over the CUDA side of the suite: 0 findings."""

import re
import shutil

import pytest
import torch
from helpers import pytest_of_its_own

# memcheck runs the suite, and of attention the small cases; the slower tools run every op once (tests/ops/test_cuda.py:
# step, tests/ops/test_attention_cuda.py: one_pass) and the smallest cases. torch.compile and opcheck would only add
# torch's kernels.
FAMILIES = [
    "boundaries",
    "boundaries_gae",
    "conv",
    "logps",
    "logps_allowed",
    "logps_torch",
    "logps_kl",
    "logps_kl_torch",
    "padding",
    "packing_ffd",
    "rope",
    "rope_bits",
    "scan",
]
# gradcheck and shards of a vocabulary: thousands of calls of kernels that other cases run, and processes of the CPU.
SUITE = "cuda and not cpu and not opcheck and not compile and not gradcheck and not shards and not 40_000 and not long_document"
ATTENTION = (
    "one_pass or worked or rows_past or sink_alone or minus_infinity or nothing or strided_views or differ or plan "
    "or unaligned or wrong_cu_seqlens or fused_projection or rows_apart or every_class or (one_token and not 65536)"
)  # graphs need torch's caching allocator
# The kernels of test_scan.py again, without a correction, and from states.
OF_SCANS = {"scan_mamba": "equals_reference or dims or groups or any_rows or without", "scan_decoding": "sequences"}
OF_ATTENTION = ["attention", "attention_cuda", "attention_pages_cuda", "attention_dense", "attention_prefix_trees"]
SMALL = "worked or prompts_of_codes or pack_ffd_of_many or poisoned or side_stream or next_call or one_pass"
SMALL_TESTS = [
    f"tests/ops/test_{name}.py"
    for name in ("boundaries", "logps", "packing_ffd", "cuda", "attention_pages_cuda", "attention_cuda")
]
# racecheck and synccheck know of 32 barriers of a block in shared memory.
MANY_BARRIERS = ["--num-cuda-barriers", "16384"]
# To synccheck a barrier that warps come to at different instructions, as bar.sync allows, is divergence. The backward
# with room for it has one; the kernel that GPUs with less shared memory take is checked in its place.
NOT_THE_BACKWARD = ["--kernel-regex-exclude", "kns=attention_backward_kernel"]
# What racecheck reports of Hopper's kernels: lse and rowsum, for whose mbarrier cp.async arrives, and descriptions of
# units and steps, which are written anew once lane 0 of each of 8 warps has arrived, after __syncwarp; it seems to
# order what follows only behind the last arrival. The emulator's schedules and test_attention_jitter.py cover it.
NOT_HOPPERS = ["--kernel-regex-exclude", "kns=_sm90_kernel"]
# initcheck does not see what bulk tensor copies write, as out, dk and dv on Hopper.
NO_BULK_STORES = {"PACKING_OPS_SM90": "0"}
LESS_MEMORY = {"PACKING_OPS_SHARED_MEMORY": str(99 << 10)}
# name: tool, tests, which of them, options, environment
RUNS = {
    **{f"memcheck-{name}": ("memcheck", [f"tests/ops/test_{name}.py"], SUITE, [], {}) for name in FAMILIES},
    **{f"memcheck-{name}": ("memcheck", [f"tests/ops/test_{name}.py"], ATTENTION, [], {}) for name in OF_ATTENTION},
    **{
        f"memcheck-{name}": ("memcheck", [f"tests/ops/test_{name}.py"], f"cuda and ({selected})", [], {})
        for name, selected in OF_SCANS.items()
    },
    "racecheck": ("racecheck", SMALL_TESTS, SMALL, [*MANY_BARRIERS, *NOT_HOPPERS], {}),
    "synccheck": ("synccheck", SMALL_TESTS, SMALL, [*MANY_BARRIERS, *NOT_THE_BACKWARD], {}),
    "synccheck-less-memory": ("synccheck", SMALL_TESTS[-1:], "one_pass", [], LESS_MEMORY),
    "initcheck": ("initcheck", SMALL_TESTS, SMALL, [], NO_BULK_STORES),
}


def no_findings(printed):
    """Whether the last line of a tool, `ERROR SUMMARY: 0 errors` or racecheck's, counts no error."""
    counts = re.findall(r"SUMMARY: (\d+) (?:error|hazard)s?\b", printed)
    return bool(counts) and set(counts) == {"0"}


@pytest.mark.parametrize(
    ("printed", "none"),
    [
        ("========= ERROR SUMMARY: 0 errors", True),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", True),
        ("========= ERROR SUMMARY: 10 errors", False),
        ("========= ERROR SUMMARY: 1 error", False),
        ("========= RACECHECK SUMMARY: 10 hazards displayed (10 errors, 0 warnings)", False),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)", False),
        ("3 passed", False),
    ],
)
def test_findings_are_counted(printed, none):
    assert no_findings(printed) is none


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNS)
def test_no_findings(name, tmp_path):
    tool, tests, selected, options, variables = RUNS[name]
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *options]
    # initcheck has to see torch's kernels too: they write what ours read.
    command += [] if tool == "initcheck" else ["--kernel-regex", "kns=packing_ops"]
    environment = {**variables, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}  # without MPS, see make test-gpu
    # Without torch's caching allocator every tensor has a separate allocation, so an overrun is seen.
    printed = pytest_of_its_own(
        tests, f"({selected}) and not cpu and not graph", command, PYTORCH_NO_CUDA_MEMORY_CACHING="1", **environment
    )
    assert no_findings(printed), printed[-4000:]
