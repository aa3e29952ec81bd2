"""setup.py, tools/ and the Makefile: what is built for which GPUs, what a build prints, and where it refuses."""

import re
import runpy
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT

from tools.build_progress import brief, progress, shown
from tools.find_cuda import PORTABLE_ARCHS, archs_to_build, cuda_version, portable_archs, with_hopper_features

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
        ("12.4", [50, 75, 80, 86, 87, 89, 90], "8.0;8.6;9.0+PTX"),
        ("12.8", [75, 80, 86, 87, 89, 90, 100, 101, 120], "8.0;8.6;9.0;10.0;12.0+PTX"),
    ],
)
def test_portable_archs_are_those_that_nvcc_knows(toolkit, version, archs, expected):
    home = toolkit(version, *archs)
    assert cuda_version(home) == version
    assert portable_archs(home) == expected


@pytest.mark.parametrize(
    ("archs", "expected"),
    [
        ("9.0", "9.0a"),
        ("8.0;8.9;9.0+PTX", "8.0;8.9;9.0a;9.0+PTX"),
        ("8.0 9.0 9.0a", "8.0;9.0a"),
        ("Hopper; 12.0+PTX", "9.0a;12.0+PTX"),
        ("8.0;12.0", "8.0;12.0"),
    ],
)
def test_hopper_is_built_with_its_own_instructions(archs, expected):
    assert with_hopper_features(archs) == expected


def test_nvcc_that_knows_none_of_them_is_named(toolkit):
    home = toolkit("10.2", 30, 75)
    with pytest.raises(SystemExit, match=rf"{home}/bin/nvcc: expected one that knows .*{PORTABLE_ARCHS[0]}"):
        portable_archs(home)


@pytest.mark.parametrize(
    ("version", "got"), [("11.8", "11.8"), ("unknown", "an nvcc that tells no version"), (None, "No such file")]
)
def test_what_is_no_cuda_12_toolkit_is_refused(toolkit, tmp_path, version, got):
    home = toolkit(version, 80) if version else tmp_path
    with pytest.raises(SystemExit, match=rf"^packing_ops: expected a CUDA toolkit 12.0 or later in {home}, got {got}"):
        cuda_version(home)


def torch_with(*gpus, driver_is_new=True):
    def capability(i):
        if not driver_is_new:
            raise RuntimeError("The NVIDIA driver on your system is too old\nPlease update")
        return gpus[i]

    return SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: len(gpus), get_device_capability=capability))


@pytest.mark.parametrize(
    ("asked", "torch", "expected"),
    [
        (" ", torch_with(), "8.0;8.6;9.0a;9.0+PTX"),
        ("", torch_with((8, 6)), "8.6"),
        ("native", torch_with((9, 0), (7, 5)), "9.0a"),
        ("", torch_with((9, 0), driver_is_new=False), "8.0;8.6;9.0a;9.0+PTX"),
        ("7.5 8.0, 9.0+PTX", torch_with(), "8.0;9.0a;9.0+PTX"),
        ("Ampere;9.0;", torch_with(), "8.0;8.6+PTX;9.0a"),
        ("sm_90", torch_with(), "TORCH_CUDA_ARCH_LIST: expected numbers such as \"8.0;9.0;12.0.PTX\", got 'sm_90'"),
        (";", torch_with(), "TORCH_CUDA_ARCH_LIST: expected compute capability 8.0 or later, got ';'"),
        ("", torch_with((7, 5)), "the GPUs of this machine: expected compute capability 8.0 or later, got '7.5'"),
        ("9.0 12.0", torch_with(), "nvcc does not know 12.0: set CUDA_HOME to a newer toolkit, or .*=9.0.PTX$"),
        ("", torch_with((12, 0)), "the GPUs of this machine: .*nvcc does not know 12.0"),
    ],
)
def test_architectures_that_are_built(toolkit, monkeypatch, asked, torch, expected):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    home = toolkit("12.4", 75, 80, 86, 89, 90)
    if expected[0].isdigit():
        assert archs_to_build(torch, home) == expected
    else:
        with pytest.raises(SystemExit, match=f"^packing_ops: .*{expected}"):
            archs_to_build(torch, home)


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
        subprocess.run(["sh", "-c", "echo 'ld: No space left on device' >&2"], check=True)
    subprocess.run(["sh", "-c", "echo after; echo error >&2"], check=True)
    full = "ld: No space left on device\n"
    assert (tmp_path / "build" / "log").read_text() == NINJA + full
    assert capfd.readouterr() == (SHOWN + full + "after\n", "error\n")


STEPS = [f"[{i}/24] ops/{i}.cpp\n" for i in range(1, 25)]


def test_a_line_for_every_quarter():
    lines = ["building\n", *STEPS[:9], "9.cpp(3): warning: unused\n", *STEPS[9:], "linking _C.so\n"]
    kept = ["building\n", STEPS[5], lines[10], STEPS[11], STEPS[17], STEPS[23], "linking _C.so\n"]
    assert list(brief(lines, in_place=False)) == kept


def test_a_terminal_has_one_line_that_changes():
    lines = [*STEPS[:2], "2.cpp(3): warning: unused\n", STEPS[2]]
    expected = "\r[1/24] ops/1.cpp\x1b[K\r[2/24] ops/2.cpp\x1b[K\n2.cpp(3): warning: unused\n\r[3/24] ops/3.cpp\x1b[K\n"
    assert "".join(brief(lines, in_place=True)) == expected


@pytest.mark.parametrize(
    ("forced", "nvcc", "torch_cuda", "expected"),
    [
        (None, True, "13.0", "for CUDA 12.8"),
        (None, True, None, "without CUDA (this torch is a CPU build; FORCE_CUDA=1 overrides)"),
        (None, False, "13.0", "without CUDA (no nvcc was found)"),
        ("1", True, None, "for CUDA 12.8"),
        ("0", True, "13.0", "without CUDA (FORCE_CUDA=0)"),
    ],
)
def test_where_the_cuda_half_is_built(toolkit, monkeypatch, capsys, forced, nvcc, torch_cuda, expected):
    monkeypatch.delenv("FORCE_CUDA", raising=False)
    if forced:
        monkeypatch.setenv("FORCE_CUDA", forced)
    monkeypatch.chdir(ROOT)
    setup = runpy.run_path(str(ROOT / "setup.py"))
    torch = SimpleNamespace(version=SimpleNamespace(cuda=torch_cuda))
    home = toolkit("12.8", 90) if nvcc else None
    assert setup["cuda_wanted"](torch, home) == expected.startswith("for CUDA")
    assert capsys.readouterr().out == f"packing_ops: building {expected}; the whole output: build/build.log\n"


def test_force_cuda_is_0_or_1(monkeypatch):
    monkeypatch.setenv("FORCE_CUDA", "true")
    with pytest.raises(SystemExit, match=r"^packing_ops: FORCE_CUDA: expected 0 or 1, got 'true'$"):
        runpy.run_path(str(ROOT / "setup.py"))["cuda_wanted"](None, None)


def test_a_toolkit_of_another_line_than_torch_s_builds_too(toolkit, monkeypatch):
    """torch refuses it for what shares its CUDA runtime."""
    from torch.utils import cpp_extension

    home = toolkit("12.8", 80, 90)
    for name, value in {"CUDA_HOME": str(home), "TORCH_CUDA_ARCH_LIST": "9.0", "FORCE_CUDA": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("PYTORCH_NVCC", "PACKING_OPS_HEAD_DIMS"):
        monkeypatch.setenv(name, "")
    for name in ("CUDA_HOME", "_check_cuda_version"):
        monkeypatch.setattr(cpp_extension, name, getattr(cpp_extension, name))
    monkeypatch.setattr("torch.version.cuda", "13.0")
    extension, _ = runpy.run_path(str(ROOT / "setup.py"))["extension"]()
    assert "cudart_static" in extension.libraries
    cpp_extension._check_cuda_version("g++", "12")


@pytest.fixture
def make(tmp_path):
    """(goal, what the machine has, variables) -> the commands of python that make runs, with FORCE_CUDA before each."""

    def run(*goal, gpu=False, nvcc=True, library=b"", **variables):
        programs, packages = tmp_path / "programs", tmp_path / "packing_ops"
        python = tmp_path / ".venv" / "bin" / "python"
        for folder in (programs, packages, python.parent):
            folder.mkdir(parents=True)
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, tmp_path)
        scripts = {python: 'echo "${FORCE_CUDA-unset} $*"', programs / "nvidia-smi": "echo GPU 0" if gpu else "exit 1"}
        if nvcc:
            scripts[programs / "nvcc"] = "exit 1"
        for path, script in scripts.items():
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        for name in ("sh", "grep", "awk"):
            (programs / name).symlink_to(shutil.which(name))
        (tmp_path / ".venv" / ".ready").touch()
        if library:
            (packages / "_C.so").write_bytes(library)
        command = [shutil.which("make"), *goal]
        done = subprocess.run(
            command, cwd=tmp_path, env={"PATH": str(programs), **variables}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return run


DEMO = "examples/train_packed.py --device auto"
BUILD = "setup.py -q build_ext --inplace"


@pytest.mark.parametrize(
    ("machine", "forced"),
    [
        ({}, "0"),
        ({"nvcc": False}, "0"),
        ({"gpu": True}, "1"),
        ({"gpu": True, "nvcc": False}, "unset"),
        ({"FORCE_CUDA": "1"}, "1"),
        ({"library": b"\x7fELF .text"}, "0"),
        ({"library": b"\x7fELF .nv_fatbin"}, "1"),
    ],
    ids=str,
)
def test_a_demo_compiles_for_a_gpu_that_is_there(make, machine, forced):
    assert make("demo", **machine) == [f"{forced} {BUILD}", f"{forced} {DEMO}"]


@pytest.mark.parametrize(("machine", "forced"), [({}, "1"), ({"nvcc": False}, "unset"), ({"FORCE_CUDA": "0"}, "0")])
def test_a_build_compiles_for_a_gpu_where_nvcc_is(make, machine, forced):
    assert make("build", **machine) == [f"{forced} {BUILD}"]


def test_make_alone_tells_its_targets(make):
    lines = make()
    phony = " ".join(re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M))
    targets = phony.replace("$(DEMOS)", "demo demo-hf demo-megatron demo-data").split()
    assert sorted(line.split()[1] for line in lines) == sorted(targets)
    assert all(re.fullmatch(r"make \S+ +\S.{9,100}", line) for line in lines)


def test_compilers_have_nothing_to_say():
    if not LOG.exists():
        pytest.skip("not built here")
    assert not re.findall(r"^.*\bwarning\b.*$", LOG.read_text(), re.M | re.I)


def test_other_systems_than_linux_take_the_package_without_a_library(tmp_path):
    """A separate process: the platform is asked at the import."""
    code = f"""
        import runpy, sys, setuptools, torch
        sys.platform, sys.argv = "darwin", ["setup.py", "-q", "build_py", "--build-lib", {str(tmp_path)!r}]
        runpy.run_path("setup.py", run_name="__main__")
        import packing_ops
        try:
            packing_ops.apply_rotary_qk(torch.ones(1, 1, 2), None, torch.ones(1, 1), torch.ones(1, 1))
        except ImportError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "packing_ops: nothing is compiled for darwin; packing_ops.data runs in plain torch",
        "packing_ops: its compiled library runs on Linux only, and this is darwin",
    ], done.stderr
    assert (tmp_path / "packing_ops" / "data" / "packed.py").exists()


def test_a_source_archive_has_all_that_a_build_needs(tmp_path):
    """In a process: setup.py reads its arguments where it is run."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    listed = set((tmp_path / "packing_ops.egg-info" / "SOURCES.txt").read_text().split())
    folders = [(ROOT / "csrc", (".cpp", ".cu", ".h", ".cuh")), (ROOT / "tools", (".py",))]
    needed = [str(p.relative_to(ROOT)) for f, kinds in folders for p in f.rglob("*") if p.suffix in kinds]
    assert len(needed) > 100
    assert set(needed) <= listed
