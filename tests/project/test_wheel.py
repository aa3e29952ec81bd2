"""The tools of the released wheel: for which GPUs each file is compiled, the toolkit, what prevents a
build.
"""

import errno
import os
import subprocess
import sys
import tarfile
from types import SimpleNamespace

import pytest
from helpers import ROOT

from tools import archs, build_checks, generate_instances, wheel
from tools.nvcc import ANY, SHARED_MEMORY, callers, gencodes, sizes, wanted

# Every instance that a GPU calls, as tiles.h and tiers.h choose, and those that dispatch.cu calls in a library.
CALLED = r"""
#include <cstdio>
#include <initializer_list>
#include <string>
#include "ops/attention/cuda/tiers.h"
using namespace packing_ops::attention;
int kb(SmemTier tier) { return tier == SmemTier::k227KB ? 227 : tier == SmemTier::k163KB ? 163 : 99; }
const PaddedDims kDims[] = {{64, 64}, {96, 96}, {128, 128}, {192, 192}, {192, 128}, {256, 256}, {512, 512}};
std::string name_of(PaddedDims dims) {
  return std::to_string(dims.qk) + (dims.qk != dims.v ? "_" + std::to_string(dims.v) : "");
}
int main() {
  for (int shared : {99, 163, 227})
    for (const PaddedDims dims : kDims) {
      const int dim = dims.qk;
      const SmemTier tier = backward_tier(dim, dims.v, shared << 10);
      const std::string name = name_of(dims);
      std::printf("%d backward_%s_smem%d\n", shared, name.c_str(), kb(tier));
      if (is_wide(dim)) {
        std::printf("%d forward_wide_smem%d\n", shared, tier == SmemTier::k99KB ? 99 : 163);
        continue;
      }
      std::printf("%d forward_%s\n", shared, name.c_str());
      std::printf("%d backward_single_%s_smem%d\n", shared, name.c_str(), kb(backward_single_tier(dim, tier)));
      if (has_resident_forward(dim, shared << 10))
        std::printf("%d forward_resident_%d\n", shared, dim);
    }
  for (const int dim : {64, 96, 128})
    if (is_resident_built(dim)) std::printf("built forward_resident_%d\n", dim);
  for (const PaddedDims dims : kDims)
    for (const SmemTier tier : {SmemTier::k99KB, SmemTier::k163KB, SmemTier::k227KB})
      if (is_tier_built(dims.qk, dims.v, tier)) std::printf("built backward_%s_smem%d\n", name_of(dims).c_str(), kb(tier));
}
"""


def said_by_tiles(folder, *options):
    """The lines of the program above, as pairs of words."""
    (folder / "called.cpp").write_text(CALLED)
    compiler = os.environ.get("CXX", "c++").split()
    command = [*compiler, "-std=c++20", f"-I{ROOT / 'csrc'}", *options, "called.cpp", "-o", "called"]
    subprocess.run(command, cwd=folder, check=True)
    said = subprocess.run([folder / "called"], capture_output=True, text=True, check=True).stdout
    return {tuple(line.split()) for line in said.splitlines()}


def test_each_instance_is_compiled_for_the_gpus_that_call_it(tmp_path):
    called = {(int(size), name) for size, name in said_by_tiles(tmp_path) if size != "built"}
    folder = generate_instances.FOLDER
    compiled = {(shared, path.stem) for path in folder.iterdir() for shared in callers(str(path))}
    assert compiled == called


@pytest.mark.parametrize(
    ("archs", "shared"), [("9.0a", (227,)), ("8.0", (99, 163)), ("8.9;12.0", (99,)), ("8.0;9.0a", (99, 163, 227))]
)
def test_what_no_gpu_of_a_library_calls_is_left_out(tmp_path, archs, shared):
    """setup.py leaves out the files, and dispatch.cu the calls of what they hold."""
    assert sizes(archs) == shared
    said = said_by_tiles(tmp_path, f'-DPACKING_OPS_SHARED_MEMORY_KB="{" ".join(map(str, shared))}"')
    named = [*generate_instances.FOLDER.glob("forward_resident_*"), *generate_instances.FOLDER.glob("backward_[0-9]*")]
    left = {path.stem for path in named if {*callers(str(path))} & {*shared}}
    assert left == {name for built, name in said if built == "built"}


@pytest.mark.parametrize("archs", ["12.0+PTX", "9.0a+PTX", "13.0", "9.0a;13.0"])
def test_nothing_is_left_out_where_a_later_gpu_may_come(archs, monkeypatch):
    assert sizes(archs) == ANY
    monkeypatch.setenv("PACKING_OPS_EVERY_INSTANCE", "1")
    assert sizes("9.0a") == ANY


SM80 = "csrc/ops/attention/cuda/sm80/instances"
SM90 = "csrc/ops/attention/cuda/sm90/instances"
PORTABLE = [("sm", "80"), ("sm", "86"), ("sm", "90a"), ("sm", "100"), ("sm", "120"), ("compute", "120")]


@pytest.mark.parametrize(
    ("source", "asked", "images"),
    [
        ("csrc/ops/rope/rope_cuda.cu", PORTABLE, "80:sm_80 80:sm_86 90:sm_90 90:sm_100 90:sm_120 90:compute_90"),
        (f"{SM80}/backward_128_smem99.cu", PORTABLE, "80:sm_86 90:sm_120 90:compute_90"),
        (f"{SM80}/backward_128_smem227.cu", PORTABLE, "90:sm_90 90:sm_100 90:compute_90"),
        (f"{SM80}/backward_128_smem227.cu", [("sm", "90a")], "90:sm_90"),
        (f"{SM80}/backward_128_smem99.cu", [("sm", "90a")], "90:compute_90"),
        (f"{SM80}/backward_128_smem99.cu", [("sm", "80")], "80:compute_80"),
        (f"{SM90}/forward_128.cu", PORTABLE, "90a:sm_90a"),
        (f"{SM90}/forward_128.cu", [("sm", "80"), ("sm", "86")], "80:compute_80"),
        (f"{SM80}/backward_128_smem99.cu", [("sm", "75")], "80:sm_75"),
    ],
)
def test_images_of_a_file(source, asked, images):
    expected = ["-gencode=arch=compute_{},code={}".format(*image.split(":")) for image in images.split()]
    assert gencodes(asked, source) == expected


def test_every_instance_can_be_asked_for(monkeypatch):
    """What make test-gpu runs with PACKING_OPS_SHARED_MEMORY need not be compiled by the driver then."""
    source = f"{SM80}/backward_128_smem99.cu"
    assert gencodes([("sm", "90a")], source) == ["-gencode=arch=compute_90,code=compute_90"]
    monkeypatch.setenv("PACKING_OPS_EVERY_INSTANCE", "1")
    assert gencodes([("sm", "90a")], source) == ["-gencode=arch=compute_90,code=sm_90"]


def test_every_gpu_has_machine_code_or_ptx_for_every_file():
    """Whatever is asked for, no file is without an image."""
    for path in [*generate_instances.FOLDER.iterdir(), *(ROOT / SM90).iterdir()]:
        for arch in [*SHARED_MEMORY, "90a", "130"]:
            assert gencodes([("sm", arch)], str(path)), (path, arch)
    assert wanted("130", f"{SM80}/backward_128_smem99.cu"), "of a GPU that is not known all is compiled"


@pytest.mark.parametrize(
    ("asked", "added"),
    [([], "-MMD -MF x.o.d"), (["--generate-dependencies-with-compile", "--dependency-output", "x.o.d"], "")],
    ids=["torch without CUDA", "torch with CUDA"],
)
def test_nvcc_is_called_with_the_options_of_the_file(tmp_path, asked, added):
    """ccache in front of it, as torch's PYTORCH_NVCC has it, and a list of the headers, for which torch asks or not."""
    for name in ("ccache", "nvcc"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$CCACHE_DEPEND $@"\n')
        (tmp_path / name).chmod(0o755)
    gencode = ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_120,code=sm_120"]
    options = [*asked, "-O3", *gencode, "-c", "rope_cuda.cu", "-o", "x.o"]
    command = [sys.executable, ROOT / "tools" / "nvcc.py", tmp_path / "ccache", tmp_path / "nvcc", *options]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    images = "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_120"
    expected = f"1 {tmp_path / 'nvcc'} {images} {' '.join(asked)} -O3 -c rope_cuda.cu -o x.o {added}"
    assert told.split() == expected.split()


def test_a_second_wheel_has_no_file_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(wheel, "BUILD", tmp_path)
    folder = tmp_path / "packing_ops-1"

    def unpack(*names):
        with tarfile.open(tmp_path / "packing_ops-1.tar.gz", "w:gz") as file:
            for name in names:
                file.addfile(tarfile.TarInfo(f"packing_ops-1/{name}"))
        assert wheel.unpacked(tmp_path / "packing_ops-1.tar.gz") == folder

    unpack("setup.py", "csrc/core/fault.cu", "csrc/ops/gone.cu", "packing_ops/gone.py")
    (folder / "build" / "temp").mkdir(parents=True)
    (folder / "build" / "temp" / "fault.o").touch()
    unpack("setup.py", "csrc/core/fault.cu")
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == ["build/temp/fault.o", "csrc/core/fault.cu", "setup.py"]


def test_an_object_is_as_old_as_its_newest_header(tmp_path):
    """What a compiler lists: its paths, and those that ccache makes relative; spaces and line ends behind
    backslashes.
    """
    folder, header, source, other = (tmp_path / name for name in ("temp", "a header.h", "x.cu", "other.h"))
    folder.mkdir()
    for time, path in enumerate((header, source, folder / "x.o", other)):
        path.touch()
        os.utime(path, (time, time))
    older = build_checks.is_older_than_its_headers
    assert older(folder / "x.o", folder), "no list"
    (folder / "x.o.d").write_text(f"x.o : ../x.cu \\\n    {tmp_path}/a\\ header.h\n")
    assert not older(folder / "x.o", folder)
    os.utime(header, (5, 5))
    assert older(folder / "x.o", folder)
    (folder / "x.o.d").write_text("x.o : ../x.cu ../gone.h\n")
    assert older(folder / "x.o", folder)


def refusal(check, *arguments):
    with pytest.raises(SystemExit) as caught:
        check(*arguments)
    message = str(caught.value)
    assert message.startswith("packing_ops: ")
    assert "\n" not in message
    return message


def test_an_old_torch_is_refused():
    def torch(version):
        return SimpleNamespace(__version__=version, __file__="/site/torch/__init__.py")

    told = refusal(build_checks.check_torch, torch("2.9.1+cu128"))
    assert told == "packing_ops: expected torch 2.10 or later, got 2.9.1+cu128 in /site/torch"
    for version in ("2.10.0", "2.15.0+cpu", "3.0.0a0"):
        build_checks.check_torch(torch(version))


def test_a_free_threaded_python_is_refused(monkeypatch):
    build_checks.check_python()
    monkeypatch.setattr(build_checks.sysconfig, "get_config_var", lambda name: name == "Py_GIL_DISABLED")
    assert "expected a Python with the global interpreter lock" in refusal(build_checks.check_python)


def test_a_compiler_that_does_not_know_cxx20_is_refused(monkeypatch, tmp_path):
    build_checks.check_compiler()
    old = tmp_path / "old g++"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "g++ 9.4.0" && exit 0\necho "no <span>" >&2; exit 1\n')
    old.chmod(0o755)
    (tmp_path / "gxx").symlink_to(old)
    monkeypatch.setenv("CXX", str(tmp_path / "gxx"))
    told = refusal(build_checks.check_compiler)
    assert "expected a compiler of C++20" in told
    assert told.endswith(f"got {tmp_path / 'gxx'}: g++ 9.4.0: no <span>")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "found no no-such-compiler" in refusal(build_checks.check_compiler)
    monkeypatch.setenv("CXX", " ")
    build_checks.check_compiler()
    assert "CXX" not in os.environ, "torch would call it"


def test_a_full_disk_is_told(tmp_path):
    log = tmp_path / "build.log"
    assert build_checks.no_room(log) == ""
    log.write_text("[3/9] c++ -c a.cpp\n/tmp/cc1.s: fatal error: error writing: No space left on device\n")
    assert str(tmp_path) in build_checks.no_room(log)


def test_a_full_disk_is_told_where_it_cut_the_log_short(tmp_path, monkeypatch):
    monkeypatch.setattr(build_checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    assert str(tmp_path) in build_checks.no_room(tmp_path / "build.log")


def test_head_dims_that_are_asked_for(monkeypatch):
    assert (*generate_instances.HEAD_DIMS, generate_instances.WIDE) == build_checks.HEAD_DIMS
    monkeypatch.setenv("PACKING_OPS_HEAD_DIMS", "128, 64")
    assert build_checks.head_dims() == (64, 128)
    for wrong in ("80", "64,x", "²"):
        monkeypatch.setenv("PACKING_OPS_HEAD_DIMS", wrong)
        assert "PACKING_OPS_HEAD_DIMS: expected some of 64, 96, 128, 192, 256, 512" in refusal(build_checks.head_dims)


@pytest.mark.parametrize(
    ("source", "dims", "asked"),
    [
        (f"{SM80}/backward_single_128_smem99.cu", (64, 128), True),
        (f"{SM80}/backward_single_96_smem99.cu", (64, 128), False),
        (f"{SM80}/forward_64.cu", (96,), False),
        (f"{SM80}/backward_192_128_smem99.cu", (128,), False),
        (f"{SM80}/backward_192_128_smem99.cu", (192,), True),
        (f"{SM80}/forward_wide_smem99.cu", (64,), False),
        (f"{SM80}/forward_wide_smem99.cu", (512,), True),
        (f"{SM90}/forward_128.cu", (96,), True),
        (f"{SM90}/forward_64.cu", (96,), False),
        ("csrc/ops/rope/rope_cuda.cu", (96,), True),
    ],
)
def test_files_of_the_head_dims_that_are_asked_for(source, dims, asked):
    assert archs.is_asked(source, dims) == asked


def test_a_build_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "build").touch()
    told = refusal(build_checks.one_build_at_a_time(tmp_path / "build").__enter__)
    assert told.endswith(f"a build writes into {tmp_path / 'build'}: remove it, or make it yours")


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(build_checks.fcntl, "flock", flock)
    with build_checks.one_build_at_a_time(tmp_path):
        assert "(No locks available): run one build at a time" in capsys.readouterr().out


def test_a_second_build_waits_for_the_first(tmp_path):
    code = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tools.build_checks import one_build_at_a_time
with one_build_at_a_time(Path({str(tmp_path)!r})):
    print("in", flush=True)
    sys.stdin.read()
"""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    first = subprocess.Popen([sys.executable, "-c", code], **options)
    assert first.stdout.readline() == "in\n"
    second = subprocess.Popen([sys.executable, "-c", code], **options)
    assert second.stdout.readline() == f"packing_ops: waiting for another build in {tmp_path}\n"
    first.communicate("")
    assert second.communicate("")[0] == "in\n"
