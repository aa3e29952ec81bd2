"""setup.py and tools/: what is built for which GPUs, what a build prints, and where it refuses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.build_progress import progress, shown
from tools.find_cuda import PORTABLE_ARCHS, cuda_version, portable_archs

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "build" / "build.log"


@pytest.fixture
def toolkit(tmp_path):
    """(version, the architectures that its nvcc lists) -> a toolkit's root."""

    def make(version, *archs):
        listed = "".join(f"compute_{arch}\\n" for arch in archs)
        nvcc = tmp_path / "bin" / "nvcc"
        nvcc.parent.mkdir()
        nvcc.write_text(
            f"#!/bin/sh\ncase $1 in\n--version) echo 'Cuda compilation tools, release {version}, V{version}.1' ;;\n"
            f"--list-gpu-arch) printf '{listed}' ;;\n*) exit 1 ;;\nesac\n"
        )
        nvcc.chmod(0o755)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("version", "archs", "expected"),
    [
        ("12.4", [50, 75, 80, 86, 87, 89, 90], "8.0;8.6;8.9;9.0+PTX"),
        ("12.8", [75, 80, 86, 87, 89, 90, 100, 101, 120], "8.0;8.6;8.9;9.0;10.0;12.0+PTX"),
    ],
)
def test_portable_archs_are_those_that_nvcc_knows(toolkit, version, archs, expected):
    home = toolkit(version, *archs)
    assert cuda_version(home) == version
    assert portable_archs(home) == expected


def test_nvcc_that_knows_none_of_them_is_named(toolkit):
    home = toolkit("10.2", 30, 75)
    with pytest.raises(SystemExit, match=rf"{home}/bin/nvcc: expected one that knows .*{PORTABLE_ARCHS[0]}"):
        portable_archs(home)


NINJA = """\
[1/3] ccache c++ -MMD -MF /p/temp/csrc/schema.o.d -I/p/csrc -c -c /p/csrc/schema.cpp -o /p/temp/csrc/schema.o -O3
[2/3] nvcc -I/p/csrc -c -c /p/csrc/ops/rope/rope_cuda.cu -o /p/temp/csrc/ops/rope/rope_cuda.o -O3
rope_cuda.cu(9): warning #177-D: variable "i" was declared but never referenced
[3/3] nvcc -I/p/csrc -c -c /p/csrc/core/fault.cu -o /p/temp/csrc/core/fault.o -O3
FAILED: [code=1] /p/temp/csrc/core/fault.o
nvcc -I/p/csrc -c -c /p/csrc/core/fault.cu -o /p/temp/csrc/core/fault.o -O3
fault.cu(3): error: expected a ";"
ninja: build stopped: subcommand failed.
"""
SHOWN = """\
[1/3] schema.cpp
[2/3] ops/rope/rope_cuda.cu
rope_cuda.cu(9): warning #177-D: variable "i" was declared but never referenced
[3/3] core/fault.cu
FAILED: [code=1] /p/temp/csrc/core/fault.o
fault.cu(3): error: expected a ";"
ninja: build stopped: subcommand failed.
"""


def test_a_line_per_file_and_what_compilers_say():
    assert "".join(shown(NINJA.splitlines(keepends=True), Path("/p/csrc"))) == SHOWN
    link = "g++ -O3 -shared /p/temp/schema.o /p/temp/core/fault.o -lrt -o packing_ops/_C.so\n"
    assert list(shown([link], Path("/p/csrc"))) == ["linking packing_ops/_C.so\n"]


def test_output_of_processes_goes_to_the_log(tmp_path, capfd):
    with progress(tmp_path / "build" / "log", Path("/p/csrc")):
        subprocess.run(["printf", "%s", NINJA], check=True)
    subprocess.run(["echo", "after"], check=True)
    assert (tmp_path / "build" / "log").read_text() == NINJA
    assert capfd.readouterr().out == SHOWN + "after\n"


def test_compilers_have_nothing_to_say():
    if not LOG.exists():
        pytest.skip("not built here")
    assert not re.findall(r"^.*\bwarning\b.*$", LOG.read_text(), re.M | re.I)


def last_line_of(code):
    """Of what a Python process prints that takes itself to be on macOS, and fails."""
    code = f"import runpy, sys, setuptools, torch; sys.platform = 'darwin'; {code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_other_systems_than_linux_are_refused():
    setup = "sys.argv = ['setup.py', 'bdist_wheel']; runpy.run_path('setup.py', run_name='__main__')"
    assert last_line_of(setup) == "packing_ops: runs on Linux only, and this is darwin"
    expected = "ImportError: packing_ops: runs on Linux only, and this is darwin"
    assert last_line_of("import packing_ops") == expected
