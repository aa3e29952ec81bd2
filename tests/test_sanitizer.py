"""compute-sanitizer over the CUDA side of the suite: 0 findings."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
# What a tool needs to see: every kernel, on small inputs. torch.compile and opcheck would only add torch's own kernels.
SELECTED = "cuda and not opcheck and not compile and not slow and not bad_input"
FAMILIES = ["boundaries", "padding", "packing", "rope", "attention"]


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_no_findings(tool):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    tests = [f"tests/test_{family}.py" for family in FAMILIES]
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--kernel-regex", "kns=packing_ops"]
    command += [sys.executable, "-m", "pytest", "-q", "-x", "-k", SELECTED, "-p", "no:cacheprovider", *tests]
    # Without torch's caching allocator every tensor has an allocation of its own, so an overrun is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "0 errors" in done.stdout or "0 hazards" in done.stdout
