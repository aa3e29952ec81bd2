"""tools/units.py: what the CPU half compiles as one file, and in which order."""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from setuptools import Distribution, Extension

from tools.units import UNITS, includes_torch, longest_first, parts_of, units

CPP = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))
TORCH = re.compile(r"^#include <torch/csrc/", re.M)


def reaches_torch(source):
    """By its headers; torch/headeronly, which kernels may have, is small."""
    texts, waiting = [], [ROOT / source]
    seen = set(waiting)
    while waiting:
        texts.append(waiting.pop().read_text())
        found = {ROOT / "csrc" / name for name in re.findall(r'^#include "(.+)"', texts[-1], re.M)} - seen
        seen |= found
        waiting += found
    return any(TORCH.search(text) for text in texts)


@pytest.mark.parametrize("source", CPP)
def test_the_files_that_include_torch_are_those_that_go_together(source):
    assert includes_torch(source) == reaches_torch(source)


def test_every_file_is_compiled_once(tmp_path):
    made = units(CPP, ROOT, tmp_path)
    included = [
        name for unit in made[:UNITS] for name in re.findall(r'^#include "(.+)"$', Path(unit).read_text(), re.M)
    ]
    assert sorted([*(f"csrc/{name}" for name in included), *made[UNITS:]]) == CPP
    assert not any(map(includes_torch, made[UNITS:]))


def test_a_unit_that_stays_is_not_written_again(tmp_path):
    first, *others = units(CPP, ROOT, tmp_path)[:UNITS]
    for unit in (first, *others):
        os.utime(unit, (1, 1))
    with open(first, "a") as file:
        file.write("// another\n")
    units(CPP, ROOT, tmp_path)
    assert os.path.getmtime(first) > 1
    assert [os.path.getmtime(unit) for unit in others] == [1] * len(others)


def test_beside_cuda_kernels_each_file_is_compiled_by_itself(tmp_path):
    sources = [*CPP, "csrc/core/fault.cu"]
    assert units(sources, ROOT, tmp_path) == sources


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([1, 1, 1, 1], 2, ["ab", "cd"]),
        ([3, 1, 1, 1], 2, ["a", "bcd"]),
        ([1, 1, 1, 3], 2, ["abc", "d"]),
        ([9, 1], 3, ["a", "b"]),
        ([1], 5, ["a"]),
    ],
)
def test_parts_are_neighbours_of_about_one_size(sizes, count, expected):
    files = list("abcd"[: len(sizes)])
    assert ["".join(part) for part in parts_of(files, sizes, count)] == expected


def test_what_takes_long_is_compiled_first(tmp_path):
    texts = {
        "a.cpp": "//",
        "b.cpp": "// longer",
        "c.cpp": "PACKING_OPS_MULTIVERSION void f();",
        "d.cpp": '#include "ops/e_bind.cpp"\n#include "ops/f_bind.cpp"\n',
        "e.cu": "//",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert longest_first(sorted(texts), tmp_path) == ["e.cu", "c.cpp", "d.cpp", "b.cpp", "a.cpp"]


def test_the_build_hands_units_to_the_compiler(tmp_path, monkeypatch):
    """After setuptools has sorted an extension's sources by name."""
    from distutils.unixccompiler import UnixCCompiler

    from torch.utils.cpp_extension import BuildExtension

    class Stop(Exception):
        pass

    class Compiler(UnixCCompiler):
        def compile(self, sources, **_):
            raise Stop(sources)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    setup = runpy.run_path(str(ROOT / "setup.py"))
    setup["with_progress"].__globals__["BUILD"] = tmp_path
    command = setup["with_progress"](BuildExtension)(Distribution({"ext_modules": [Extension("packing_ops._C", CPP)]}))
    command.ensure_finalized()  # setuptools', or Cython's where it is installed
    command.build_lib, command.compiler, command.force = str(tmp_path), Compiler(), True
    command.extensions = command.distribution.ext_modules
    with pytest.raises(Stop) as stopped:
        command.build_extension(command.extensions[0])
    (handed,) = stopped.value.args
    assert handed == longest_first(units(CPP, ROOT, tmp_path / "units"), ROOT)
    assert command.extensions[0].sources == CPP, "what a source archive lists"
