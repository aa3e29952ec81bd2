"""tools/units.py: what is compiled as one file, and in which order."""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from setuptools import Distribution, Extension

from tools.nvcc import callers
from tools.units import UNITS, includes_torch, longest_first, parts_of, units

CPP, CU = (
    sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob(pattern)) for pattern in ("*.cpp", "*.cu")
)
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


def parts_of_unit(unit):
    return [f"csrc/{name}" for name in re.findall(r'^#include "(.+)"$', Path(unit).read_text(), re.M)]


@pytest.mark.parametrize("sources", [CPP, sorted([*CPP, *CU])], ids=["the CPU half", "both halves"])
def test_every_file_is_compiled_once(sources, tmp_path):
    made = units(sources, ROOT, tmp_path)
    in_units = [unit for unit in made if unit not in sources]
    alone = [source for source in made if source in sources]
    assert sorted([*(part for unit in in_units for part in parts_of_unit(unit)), *alone]) == sources
    assert not any(map(includes_torch, alone))
    assert len({*made}) == len(made)


def test_instances_of_one_unit_have_the_same_callers(tmp_path):
    """By the unit's name tools/nvcc.py finds for which GPUs it is compiled."""
    made = [unit for unit in units(CU, ROOT, tmp_path) if unit not in CU]
    assert len(made) > 5
    for unit in made:
        assert {callers(part) for part in parts_of_unit(unit)} == {callers(unit)}


def test_what_kernels_share_is_one_unit(tmp_path):
    (shared,) = (unit for unit in units(CU, ROOT, tmp_path) if unit.endswith("shared.cu"))
    assert {"csrc/core/fault.cu", "csrc/ops/attention/cuda/plan.cu"} < {*parts_of_unit(shared)}


def test_a_unit_that_stays_is_not_written_again(tmp_path):
    first, *others = units(CPP, ROOT, tmp_path)[:UNITS]
    for unit in (first, *others):
        os.utime(unit, (1, 1))
    with open(first, "a") as file:
        file.write("// another\n")
    units(CPP, ROOT, tmp_path)
    assert os.path.getmtime(first) > 1
    assert [os.path.getmtime(unit) for unit in others] == [1] * len(others)


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
        "e.cu": "// longer than the unit, which is alone",
        "f.cu": '#include "g.cu"\n#include "h.cu"\n',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert longest_first(sorted(texts), tmp_path) == ["f.cu", "e.cu", "c.cpp", "d.cpp", "b.cpp", "a.cpp"]


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
