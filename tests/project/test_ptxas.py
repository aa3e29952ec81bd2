"""tools/check_ptxas.py: which reports of ptxas fail, and that they are of the sources as they are."""

import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

SOURCE = "csrc/ops/attention/cuda/sm90/instances/forward_64.cu"
OBJECT = f"build/temp.linux/{SOURCE[:-3]}.o"
# Writes the object and its list of headers, says what ptxas says, and counts its calls.
NVCC = """\
#!/bin/bash
while [ $# -gt 0 ]; do
    case $1 in -o) [ $2 = /dev/null ] || : > $2 ;; -MF) echo "x.o : $ROOT/$SOURCE $ROOT/csrc/header.h" > $2 ;; esac
    shift
done
echo called >> $ROOT/calls
cat $ROOT/said >&2
"""
SAID = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel' for '{arch}'
ptxas info    : Function properties for kernel
    {spilled} bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""
SERIALISED = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"


@pytest.fixture
def checkout(tmp_path):
    for name in ("archs", "check_ptxas", "build_checks", "find_cuda", "nvcc"):
        (tmp_path / "tools").mkdir(exist_ok=True)
        shutil.copy(ROOT / "tools" / f"{name}.py", tmp_path / "tools")
    for name in (SOURCE, OBJECT, "csrc/header.h", "cuda/bin/nvcc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    for name in (SOURCE, "csrc/header.h"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "cuda/bin/nvcc").write_text(NVCC)
    (tmp_path / "cuda/bin/nvcc").chmod(0o755)
    return tmp_path


def run(checkout, script, *arguments):
    """The exit code of tools/<script>.py, and what it printed."""
    variables = os.environ | {"CUDA_HOME": str(checkout / "cuda"), "ROOT": str(checkout), "SOURCE": SOURCE}
    command = [sys.executable, f"tools/{script}.py", *arguments]
    done = subprocess.run(command, cwd=checkout, env=variables, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def build(checkout, said):
    (checkout / "said").write_text(said)
    options = ["-gencode=arch=compute_90a,code=sm_90a", "-c", checkout / SOURCE, "-o", checkout / OBJECT]
    return run(checkout, "nvcc", checkout / "cuda/bin/nvcc", *options)


def calls(checkout):
    """How often nvcc was called."""
    return len((checkout / "calls").read_text().splitlines())


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (SAID.format(arch="sm_90a", spilled=0), ""),
        (SAID.format(arch="sm_90a", spilled=8), "8 bytes spill stores"),
        (SAID.format(arch="sm_90a", spilled=0) + SERIALISED, "C7510"),
    ],
    ids=["clean", "spills", "serialised"],
)
def test_the_report_of_the_build_is_read(checkout, said, wrong):
    assert build(checkout, said) == (0, SERIALISED if SERIALISED in said else "")
    failed, printed = run(checkout, "check_ptxas")
    assert (failed, printed.count("\n")) == ((1, 1) if wrong else (0, 0))
    assert wrong in printed
    assert calls(checkout) == 1


def test_the_report_stays_where_ninja_takes_the_list_of_headers(checkout):
    """It removes the list after it has read it (deps = gcc), which torch's rule says where torch is a CUDA build."""
    build(checkout, SAID.format(arch="sm_90a", spilled=0))
    (checkout / f"{OBJECT}.d").unlink()
    assert run(checkout, "check_ptxas") == (0, "")
    assert calls(checkout) == 1


@pytest.mark.parametrize("what", [SOURCE, "csrc/header.h", "not built", "for another GPU"])
def test_what_was_not_built_from_these_sources_is_compiled(checkout, what):
    clean = SAID.format(arch="sm_80" if what == "for another GPU" else "sm_90a", spilled=0)
    if what != "not built":
        build(checkout, clean)
    if (checkout / what).exists():
        (checkout / what).touch()
        os.utime(checkout / f"{OBJECT}.ptxas", (1, 1))
    (checkout / "said").write_text(SAID.format(arch="sm_90a", spilled=8))
    failed, printed = run(checkout, "check_ptxas")
    assert failed == 1
    assert printed.startswith("forward_64.cu: 8 bytes stack frame, 8 bytes spill stores")
    assert calls(checkout) == (1 if what == "not built" else 2)


def test_a_failed_compile_fails(checkout):
    (checkout / "cuda/bin/nvcc").write_text("#!/bin/sh\necho an error >&2; exit 3\n")
    assert build(checkout, "") == (3, "an error\n")
    assert run(checkout, "check_ptxas") == (1, "an error\n\n")


@pytest.mark.parametrize("ends", ["exit 3", "kill -KILL $PPID"], ids=["fails", "kills its wrapper"])
def test_a_compile_that_does_not_end_leaves_no_report(checkout, ends):
    """Nor the report of the compile before, of the same sources for other architectures, say."""
    build(checkout, SAID.format(arch="sm_90a", spilled=0))
    (checkout / "cuda/bin/nvcc").write_text(f"{NVCC}{ends}\n")
    said = SAID.format(arch="sm_90a", spilled=8)
    build(checkout, said.replace("    8", "    0"))
    (checkout / "cuda/bin/nvcc").write_text(NVCC)
    (checkout / "said").write_text(said)
    failed, printed = run(checkout, "check_ptxas")
    assert (failed, printed.count("8 bytes spill stores")) == (1, 1)
    assert calls(checkout) == 3
