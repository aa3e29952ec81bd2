"""compute-sanitizer over the CUDA side of the suite: 0 findings."""

import shutil

import pytest
import torch
from helpers import pytest_of_its_own

# memcheck runs the suite, and of attention the small cases; the slower tools run every op once (tests/test_cuda.py: step,
# tests/test_attention_cuda.py: one_pass) and the smallest cases. torch.compile and opcheck would only add torch's own
# kernels.
FAMILIES = ["boundaries", "padding", "packing_ffd", "rope", "rope_bits"]
SUITE = "cuda and not cpu and not opcheck and not compile and not 40_000"
ATTENTION = (
    "one_pass or worked or rows_past or sink_alone or minus_infinity or nothing or strided_views or differ or plan "
    "or unaligned or wrong_cu_seqlens or fused_projection or rows_apart or (one_token and not 65536)"
)  # graphs need torch's caching allocator
SMALL = "worked or prompts_of_codes or pack_ffd_of_many or poisoned or side_stream or next_call or one_pass"
SMALL_TESTS = [f"tests/test_{name}.py" for name in ("boundaries", "packing_ffd", "cuda", "attention_cuda")]
TESTS = [
    ("memcheck", [f"tests/test_{family}.py" for family in FAMILIES], SUITE),
    ("memcheck", [f"tests/test_{name}.py" for name in ("attention", "attention_cuda", "attention_dense")], ATTENTION),
    ("racecheck", SMALL_TESTS, SMALL),
    ("synccheck", SMALL_TESTS, SMALL),
    ("initcheck", SMALL_TESTS, SMALL),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tool", "tests", "selected"), TESTS, ids=["memcheck", "memcheck-attention", *(t[0] for t in TESTS[2:])]
)
def test_no_findings(tool, tests, selected):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
    # initcheck has to see torch's kernels too: they write what ours read.
    command += [] if tool == "initcheck" else ["--kernel-regex", "kns=packing_ops"]
    # Without torch's caching allocator every tensor has an allocation of its own, so an overrun is seen.
    printed = pytest_of_its_own(
        tests, f"({selected}) and not cpu and not graph", command, PYTORCH_NO_CUDA_MEMORY_CACHING="1"
    )
    assert "0 errors" in printed or "0 hazards" in printed
