"""The ways to a library, each to its end: editable, without ninja, from sources that may only be read; and where a
build refuses. A script replaces the compiler, so that a build takes as long as torch's import.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers import ROOT

from tools.units import units

# Writes the file of -o, and the source's name into a list.
COMPILER = """\
#!/bin/bash
for argument in "$@"; do
    case $last in -o) : > "$argument"; made=$argument ;; esac
    case $argument in *.cpp | *.cu) compiled=$argument ;; esac
    last=$argument
done
[ -z "$made" ] || echo "${compiled:-linked}" >> "$COMPILED"
"""


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "a user's sources"
    folder.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("tools", "packing_ops", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return folder


@pytest.fixture
def variables(tmp_path):
    """Of a process that builds the CPU half with that compiler."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "c++").write_text(COMPILER)
    (programs / "c++").chmod(0o755)
    compiler = str(programs / "c++")
    (tmp_path / "temporary").mkdir()
    return os.environ | {
        "PYTHONPATH": "",
        "FORCE_CUDA": "0",
        "CC": compiler,
        "CXX": compiler,
        "LDSHARED": f"{compiler} -shared",
        "LDCXXSHARED": f"{compiler} -shared",
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",
        "CCACHE_DISABLE": "1",  # torch puts it in front
        "COMPILED": str(tmp_path / "compiled"),
        "TMPDIR": str(tmp_path / "temporary"),
    }


def run(command, sources, variables):
    """What was compiled."""
    done = subprocess.run(command, cwd=sources, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = Path(variables["COMPILED"]).read_text().splitlines()
    return sorted(name if name == "linked" else os.path.relpath(sources / name, sources) for name in names)


def hook(name, folder, before=""):
    """The command by which pip and uv ask for a wheel in ``folder``."""
    return [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        f"{before}\nfrom setuptools import build_meta as b; b.{name}({str(folder)!r})",
    ]


NO_TORCH = """import importlib.util as u
find = u.find_spec
u.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
"""
BUILD = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]


def everything(sources):
    """What is to be compiled, and the library."""
    files = [str(path.relative_to(sources)) for path in (sources / "csrc").rglob("*.cpp")]
    return sorted([*units(files, sources, sources / "build" / "units"), "linked"])


def test_an_editable_install_is_built_beside_its_sources(sources, variables, tmp_path):
    assert run(hook("build_editable", tmp_path), sources, variables) == everything(sources)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-cp310-abi3-" in wheel.name
    assert (sources / "packing_ops" / "_C.so").exists()
    with zipfile.ZipFile(wheel) as file:
        assert not [name for name in file.namelist() if name.startswith("packing_ops/")], "they are not copied"
        assert any(
            str(sources) in file.read(name).decode() for name in file.namelist() if name.endswith((".pth", ".py"))
        )


def test_sources_that_cannot_be_written_are_built_elsewhere(sources, variables, tmp_path):
    """No permission stops root, so the answer about permissions is replaced."""
    before = sorted(sources.rglob("*"))
    told = "import os; may = os.access; os.access = lambda path, mode, **_: mode != os.W_OK and may(path, mode)"
    found = run(hook("build_wheel", tmp_path, told), sources, variables | {"PYTHONDONTWRITEBYTECODE": "1"})
    assert sorted(sources.rglob("*")) == before
    assert len(found) == len(everything(sources))
    (wheel,) = tmp_path.glob("*.whl")
    assert "packing_ops/_C.so" in zipfile.ZipFile(wheel).namelist()


def test_without_ninja_the_same_files_are_compiled(sources, variables, tmp_path):
    (tmp_path / "programs" / "ninja").write_text("#!/bin/sh\nexit 1\n")  # torch asks for its version
    (tmp_path / "programs" / "ninja").chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "programs"), variables["PATH"]])
    assert run(BUILD, sources, variables | {"PATH": path}) == everything(sources)
    assert (sources / "packing_ops" / "_C.so").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"torch/__init__.py": "__version__ = '2.9.1'"}, "expected torch 2.10 or later, got 2.9.1 in "),
        ({"sitecustomize.py": NO_TORCH}, "no torch was found here"),
        (
            {"torch/__init__.py": "raise OSError('libcudart.so.13: cannot open')"},
            "the torch of this environment does not import: libcudart.so.13: cannot open",
        ),
        (
            {"torch/__init__.py": "__version__ = '2.13.0'", "CXX": "no-such-compiler"},
            "expected a C++ compiler, found no no-such-compiler",
        ),
        (
            {"sitecustomize.py": "import setuptools\nsetuptools.__version__ = '65.5.1'"},
            'expected setuptools 77 or later, got 65.5.1; pip install "setuptools>=77"',
        ),
        (
            {"sitecustomize.py": "import sysconfig\nsysconfig.get_config_var = lambda name: name == 'Py_GIL_DISABLED'"},
            "expected a Python with the global interpreter lock",
        ),
    ],
    ids=["old torch", "no torch", "broken torch", "no compiler", "old setuptools", "free-threaded"],
)
def test_a_build_refuses_before_it_compiles(sources, variables, tmp_path, given, message):
    site = tmp_path / "site"
    for name, text in given.items():
        if name == "CXX":
            variables |= {name: text}
            continue
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    done = subprocess.run(BUILD, cwd=sources, env=variables | {"PYTHONPATH": str(site)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path(variables["COMPILED"]).exists()
