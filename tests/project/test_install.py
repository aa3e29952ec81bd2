"""`pip install .` as a user runs it: build isolation, an environment that has torch, then an import from elsewhere."""

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch
from helpers import ROOT

import packing_ops as po

USE = "import torch, packing_ops as po; print(po.__file__, po.position_ids_from_cu_seqlens(po.cu_seqlens_from_lengths([2, 1])).tolist())"


def pip(python, *arguments):
    """The command, in an environment without pip: to put one there takes seconds."""
    return [sys.executable, "-m", "pip", "--python", python, *arguments]


def run(*command, **options):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The source archive, unpacked where names have spaces; the build folder of this checkout stays what it is."""
    folder = tmp_path_factory.mktemp("a user's sources")
    made = ["egg_info", "--egg-base", folder, "sdist", "-d", folder]
    run(sys.executable, "setup.py", "-q", *made, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


# Reads every source with all it includes, in place of compiling it, and links by a copy of the library that is built
# here.
COMPILER = """\
#!/bin/bash
made=${{@: -1}} arguments=()
for argument in "$@"; do
    [ "$last" = -o ] && made=$argument
    [ "$argument" = -c ] && arguments+=(-E) || arguments+=("$argument")
    [ "$argument" = -shared ] && links=1
    last=$argument
done
[ -z "$links" ] && exec {compiler} "${{arguments[@]}}"
cp {library} "$made"
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Without the settings that `make test` exports, and only the CPU half."""
    hidden = {"TORCH_CUDA_ARCH_LIST", "PYTHONPATH"}
    compiler = tmp_path_factory.mktemp("compiler") / "g++"
    library = shlex.quote(po.build_info()["library"])
    compiler.write_text(COMPILER.format(compiler=os.environ.get("CXX", "c++"), library=library))
    compiler.chmod(0o755)
    links = f"{compiler} -shared"
    return {key: value for key, value in os.environ.items() if key not in hidden} | {
        "CXX": str(compiler),
        "LDSHARED": links,
        "LDCXXSHARED": links,
        "CCACHE_DISABLE": "1",
        "FORCE_CUDA": "0",
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A conda-like environment, whose packages nobody may write: links to what is installed here. Its Python, and what
    there is in it.
    """
    folder = tmp_path_factory.mktemp("base")
    python, site = prefix(folder)
    for path in Path(torch.__file__).parent.parent.iterdir():
        if not re.match(r"packing_ops|pip|__pycache__|.*\.pth$", path.name):
            (site / path.name).symlink_to(path)
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink())]
    for each in folders:
        each.chmod(0o555)
    # Root writes bytecode there too, where the environment lets Python.
    yield (
        python,
        lambda: sorted(
            (str(path), path.lstat().st_mtime)
            for each in folders
            for path in each.iterdir()
            if path.name != "__pycache__"
        ),
    )
    for each in folders:
        each.chmod(0o755)


@pytest.fixture(scope="module")
def python(base, tmp_path_factory):
    """Of an environment that has torch, which is below it, and no packing_ops."""
    return venv(tmp_path_factory.mktemp("environment"), base[0], "--system-site-packages")[0]


@pytest.fixture(scope="module")
def installed(sources, environment, python, base):
    """Where; with a module that is not there any more when the next wheel is built. Nothing is written below."""
    gone, before = sources / "packing_ops" / "gone.py", base[1]()
    gone.touch()
    run(*pip(python, "install", "-q", "."), cwd=sources, env=environment, preexec_fn=as_a_user)
    gone.unlink()
    assert base[1]() == before
    return next(python.parent.parent.glob("lib/python*/site-packages/packing_ops"))


@pytest.fixture(scope="module")
def wheel(sources, environment, python, installed, tmp_path_factory):
    """From the same folder: nothing is compiled twice."""
    folder = tmp_path_factory.mktemp("wheel")
    run(*pip(python, "wheel", "-q", "--no-deps", "-w", folder, sources), env=environment)
    return next(folder.glob("*.whl"))


def test_isolated_build_gives_one_wheel_for_every_python(wheel):
    assert "-cp310-abi3-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "packing_ops/_C.so" in names
    assert "packing_ops/py.typed" in names
    assert not [n for n in names if n.startswith(("tests", "benchmarks", "csrc", "docs", "tools"))]


# What manylinux_2_28 has, and what a newer glibc gives another version without changing it: tools/glibc.py links the
# old one.
MANYLINUX = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0)}
AGAIN_VERSIONED = re.compile(r"exp|log|pow|expf|logf|powf|(pthread|sem|shm)_\w+|dl\w+|__libc_single_threaded")


def test_the_library_needs_no_newer_system_than_the_released_wheel_names(wheel, tmp_path):
    library = zipfile.ZipFile(wheel).extract("packing_ops/_C.so", tmp_path)
    found = re.findall(r"\(?(GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)\)? +(\S+)$", run("objdump", "-T", library), re.M)
    assert len(found) > 20
    newer = [f for f in found if tuple(map(int, f[1].split("."))) > MANYLINUX[f[0]]]
    assert [f for f in newer if f[0] != "GLIBC" or not AGAIN_VERSIONED.fullmatch(f[2])] == []


def test_modules_that_are_gone_are_not_in_the_next_wheel(installed, wheel):
    assert (installed / "gone.py").exists()
    modules = {n.removeprefix("packing_ops/") for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".py")}
    assert modules == {str(p.relative_to(ROOT / "packing_ops")) for p in (ROOT / "packing_ops").rglob("*.py")}


def test_installs_into_an_environment_that_has_torch(installed, python, environment, tmp_path):
    output = run(python, "-W", "ignore", "-c", USE, cwd=tmp_path, env=environment)
    assert str(installed) in output
    assert "[0, 1, 0]" in output


def commands_of_the_page():
    """Those of docs/install.md that say what was built, and the function that they call."""
    text = " ".join((ROOT / "docs" / "install.md").read_text().split())
    commands = re.findall(r"`(python -[cm] [^`]+)`", text)
    found = [command for command in dict.fromkeys(commands) if command.endswith("packing_ops info")]
    return [*found, 'python -c "import packing_ops; print(packing_ops.build_info())"']


@pytest.mark.parametrize("inside", [True, False])
def test_commands_of_the_page_find_the_library(inside, installed, sources, python, environment, tmp_path):
    """The clone that was installed from hides the installed package from a Python that runs inside."""
    path = os.pathsep.join([str(python.parent), environment["PATH"]])
    options = {"cwd": sources if inside else tmp_path, "env": environment | {"PATH": path}}
    commands = commands_of_the_page()
    assert len(commands) == 2
    whose = f"the installed packing_ops, as {sources / 'packing_ops'} has none" if inside else "this package"
    for command in commands:
        told = run("bash", "-c", command, **options)
        assert str(installed / "_C.so") in told
        assert whose in told
    if inside:  # a script is not hidden
        told = run("packing-ops", "info", **options).splitlines()
        assert told[1:3] == [f"library: {installed / '_C.so'}", "library from: this package"]


def test_the_import_warns_where_only_torch_can_use_the_gpu(installed, python, environment, tmp_path):
    code = """
        import warnings, torch
        torch.version.cuda, torch.cuda.device_count = "13.0", lambda: 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import packing_ops
        messages = [str(w.message) for w in caught if "packing_ops" in str(w.message)]
        print(len(messages) == (not packing_ops.build_info()["cuda"]), [w.filename for w in caught])
    """
    told = run(python, "-c", textwrap.dedent(code), cwd=tmp_path, env=environment)
    assert told.startswith("True")
    assert "library.py" not in told


def prefix(folder):
    """A Python with its site-packages, as conda and images have it: the standard library is linked. Returns
    both.
    """
    library = Path(os.__file__).parent
    site = folder / "lib" / library.name / "site-packages"
    site.mkdir(parents=True)
    for path in library.iterdir():
        if path.name not in {"site-packages", "dist-packages", "__pycache__"}:
            (site.parent / path.name).symlink_to(path)
    python = folder / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    python.parent.mkdir()
    shutil.copy(os.path.realpath(sys.executable), python)
    return python, site


def venv(folder, python, *options):
    """An environment without pip: a tenth of a second. Returns its Python and its site-packages."""
    run(python, "-m", "venv", "--without-pip", *options, folder)
    return folder / "bin" / "python", next(folder.glob("lib/python*/site-packages"))


# As pip isolates a build: site-packages of the environment and of those below are taken off.
ISOLATED = "import sys; sys.path = [path for path in sys.path if 'site-packages' not in path]"
FIND = "from tools.build_checks import find_torch as f; f(); import torch; print(torch.__file__)"


@pytest.mark.parametrize(
    "layout", ["plain", "over another", "over another by .pth", "prefix", "copies", "two below", "uv"]
)
def test_a_build_finds_the_torch_of_the_environment(layout, tmp_path):
    (tmp_path / "isolation").mkdir()
    (tmp_path / "isolation" / "sitecustomize.py").write_text(ISOLATED)
    hidden = {"UV", "PYTHONHOME", "VIRTUAL_ENV"}
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    base, site = prefix(tmp_path / "base")
    python, upper = venv(tmp_path / "upper", base, *["--copies"] * (layout == "copies"), "--system-site-packages")
    if layout == "plain":
        site = upper
    elif layout in ("over another by .pth", "two below"):
        python, top = venv(tmp_path / "top", base)
        (top / "below.pth").write_text(f"{upper}\n{site}\n")
        site = site if layout == "two below" else upper
    elif layout == "prefix":
        python = base
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").touch()
    if layout == "uv":  # builds in a separate environment, in front of the active one
        (python.parent / "uv").touch()
        path = os.pathsep.join([str(tmp_path / "build" / "bin"), str(python.parent), variables["PATH"]])
        variables |= {"UV": str(python.parent / "uv"), "PATH": path}
        python, _ = venv(tmp_path / "build", base)
    variables |= {"PYTHONPATH": str(tmp_path / "isolation"), "PYTHONNOUSERSITE": "1"}
    assert run(python, "-c", FIND, cwd=ROOT, env=variables).strip() == str(site / "torch" / "__init__.py")


def test_pip_finds_the_torch_below_and_stops_before_it_compiles(sources, environment, tmp_path):
    """A real pip, in an environment over another one whose torch is too old."""
    _, site = venv(tmp_path / "below", sys.executable)
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("__version__ = '2.9.1'")
    python, above = venv(tmp_path / "above", sys.executable)
    (above / "below.pth").write_text(f"{site}\n")
    said = refused(pip(python, "install", sources), environment)
    assert f"expected torch 2.10 or later, got 2.9.1 in {site / 'torch'}" in said


def test_without_torch_the_error_says_what_to_do(sources, environment, tmp_path):
    """Before pip downloads a torch."""
    python, _ = venv(tmp_path / "env", sys.executable)
    said = refused(pip(python, "install", sources), environment)
    assert "no torch was found" in said
    assert "pip install torch" in said
    assert "--no-build-isolation" in said
    assert "Collecting torch" not in said


def as_a_user():
    """Permissions hold for root too: this process loses CAP_DAC_OVERRIDE when it runs another program."""
    if os.geteuid() == 0:
        pr_capbset_drop, cap_dac_override = 24, 1
        ctypes.CDLL(None).prctl(pr_capbset_drop, cap_dac_override, 0, 0, 0)


NO_OBJECTS = """\
#!/bin/bash
[[ " $* " == *" -c "* ]] || exec {compiler} "$@"
"""


def test_installs_over_a_read_only_environment_without_isolation(sources, environment, base, tmp_path):
    """A real pip; with isolation it is what ``installed`` is. Nothing is compiled: a copy of the library that is built
    here replaces the one that is linked.
    """
    below, here = base
    python, _ = venv(tmp_path / "above", below, "--system-site-packages")
    compiler = tmp_path / "g++"
    compiler.write_text(NO_OBJECTS.format(compiler=shlex.quote(environment["CXX"])))
    compiler.chmod(0o755)
    active = os.pathsep.join([str(python.parent), str(Path(sys.executable).parent), environment["PATH"]])
    variables = environment | {"CXX": str(compiler), "PATH": active}
    before = here()
    if subprocess.run(["touch", below.parent / "new"], preexec_fn=as_a_user).returncode == 0:
        pytest.skip("this root may not give up its capabilities")
    command = pip(python, "install", "-q", "--no-build-isolation", sources)
    run(*command, env=variables, preexec_fn=as_a_user)
    assert here() == before
    output = run(python, "-W", "ignore", "-c", USE, cwd=tmp_path, env=variables, preexec_fn=as_a_user)
    assert str(python.parent.parent) in output
    assert "[0, 1, 0]" in output


def refused(command, environment):
    """What pip says."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    return done.stdout + done.stderr


def other_pythons_with_torch():
    found = []
    for minor in range(10, 15):
        python = shutil.which(f"python3.{minor}")
        if python and minor != sys.version_info.minor:
            probe = subprocess.run([python, "-c", "import torch"], capture_output=True)
            found += [python] if probe.returncode == 0 else []
    return found


def test_wheel_loads_under_another_python(wheel, tmp_path):
    pythons = other_pythons_with_torch()
    if not pythons:
        pytest.skip("no other Python with torch is at hand")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    for python in pythons:
        assert "[0, 1, 0]" in run(python, "-c", USE, cwd=tmp_path)
