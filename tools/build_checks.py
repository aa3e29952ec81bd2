"""Checks that setup.py makes before it compiles. Each ends the build with an error that says what to do."""

import contextlib
import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

OLDEST_TORCH = (2, 10)
HEAD_DIMS = (64, 96, 128, 192, 256, 512)
NO_TORCH = """packing_ops builds against the torch that you train with, and no torch was found here.
  no torch yet:  pip install torch (pytorch.org names the index of your CUDA), then pip install .
  uv:            activate the environment that has torch, or
                 uv pip install "setuptools>=77" ninja, then uv pip install --no-build-isolation .
  elsewhere:     a torch that only PYTHONPATH shows needs pip install --no-build-isolation ."""
PROBE = "#include <bit>\n#include <concepts>\n#include <span>\nint main() { return std::popcount(0u); }\n"


def paths_of(python: str) -> list[str]:
    """sys.path of this Python outside of the isolation that pip and uv build in; empty for another version of
    Python.
    """
    ask = "import json, sys; print(json.dumps([sys.version_info[:2], sys.path]))"
    hidden = {"PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME"}
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run([python, "-W", "ignore", "-c", ask], env=variables, capture_output=True, text=True)
    if done.returncode:
        return []
    version, paths = json.loads(done.stdout.splitlines()[-1])
    return [path for path in paths if path] if tuple(version) == sys.version_info[:2] else []


def find_torch() -> None:
    """Puts torch on sys.path, or ends the build. pip's isolation hides what its own Python imports: .pth files and an
    environment below. uv builds with a Python of its own; that of the active environment follows on PATH."""
    python = sys.executable
    if "UV" in os.environ:
        own = Path(sys.executable).parent
        rest = os.pathsep.join(folder for folder in os.get_exec_path() if Path(folder) != own)
        python = shutil.which("python", path=rest) or python
    if importlib.util.find_spec("torch") is None:
        sys.path += [path for path in paths_of(python) if path not in sys.path]
    if importlib.util.find_spec("torch") is None:
        sys.exit(NO_TORCH)


def import_torch():
    """torch of the environment that we are being installed into, also from inside pip's build environment."""
    find_torch()
    try:
        import torch
    except (ImportError, OSError) as error:  # a library of CUDA that is not there, for one
        sys.exit(f"packing_ops: the torch of this environment does not import: {in_brief(error)}")
    return torch


def check_python() -> None:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        sys.exit(
            f"packing_ops: expected a Python with the global interpreter lock, got a free-threaded "
            f"{sys.version.split()[0]}, "
            "which takes no abi3 library"
        )


def check_setuptools(version: str) -> None:
    """Builds without isolation use the installed setuptools; before 77 it does not read the licence in
    pyproject.toml.
    """
    if int(version.partition(".")[0]) < 77:
        sys.exit(f'packing_ops: expected setuptools 77 or later, got {version}; pip install "setuptools>=77"')


def check_torch(torch) -> None:
    found = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if found < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        sys.exit(
            f"packing_ops: expected torch {oldest} or later, got {torch.__version__} in {Path(torch.__file__).parent}"
        )


def check_torch_before_downloads() -> None:
    """In the step of pip and uv that asks for metadata: they would download a torch before they build."""
    if "dist_info" in sys.argv and ("PIP_BUILD_TRACKER" in os.environ or "UV" in os.environ):
        check_torch(import_torch())


def compiler() -> list[str]:
    """The words of CXX; c++ where it is not set, or blank."""
    return os.environ.get("CXX", "").split() or ["c++"]


def check_compiler() -> None:
    """That there is one, and that it compiles C++20. A blank CXX is removed."""
    if not os.environ.get("CXX", "c++").strip():
        del os.environ["CXX"]  # torch would call it
    command = compiler()
    name = " ".join(command)
    if not shutil.which(command[0]):
        sys.exit(f"packing_ops: expected a C++ compiler, found no {name}; install g++, or name yours in CXX")
    options = [*command, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    probe = subprocess.run(options, input=PROBE, capture_output=True, text=True)
    if probe.returncode:
        version = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
        said = [text.strip().splitlines()[0] for text in (version, probe.stderr) if text.strip()]
        sys.exit(
            "packing_ops: expected a compiler of C++20 (GCC 11 or later, Clang 14 or later), "
            f"got {': '.join([name, *said])}"
        )


def no_room(log: Path) -> str:
    """After a failed build: an error message if the disk is full, otherwise an empty string."""
    folder = os.environ.get("TMPDIR", "/tmp")
    said = log.read_text(errors="replace") if log.exists() else ""
    existing = [path for path in (log.parent, Path(folder)) if path.exists()]
    full = any(shutil.disk_usage(path).free < 2**20 for path in existing)  # the log may be cut short then
    if not full and "No space left on device" not in said:
        return ""
    return f"no room is left on the disk of {log.parent} or of {folder}, where compilers keep their files (TMPDIR)"


def in_brief(error: Exception) -> str:
    """One line: distutils' errors hold the whole command."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:100]} ... {text[-100:]}"


def head_dims() -> tuple[int, ...]:
    """PACKING_OPS_HEAD_DIMS: the head_dims that attention's CUDA kernels are compiled for (default: all)."""
    wanted = os.environ.get("PACKING_OPS_HEAD_DIMS", "").strip()
    if not wanted:
        return HEAD_DIMS
    found = {int(part) if part.isdecimal() else 0 for part in re.split(r"[,; ]+", wanted)}
    if not found <= set(HEAD_DIMS):
        names = ", ".join(map(str, HEAD_DIMS))
        sys.exit(f"packing_ops: PACKING_OPS_HEAD_DIMS: expected some of {names}, with commas between, got {wanted!r}")
    return tuple(sorted(found))


def is_older_than_its_headers(built: Path, folder: Path) -> bool:
    """Reads the dependency file (.d) beside an object; its paths may be relative to ``folder``, where it was
    compiled.
    """
    listed = built.with_name(f"{built.name}.d")
    if not listed.exists():
        return True
    names = re.split(r"(?:\\\n|(?<!\\)\s)+", listed.read_text().partition(":")[2].strip())
    headers = [folder / name.replace("\\ ", " ") for name in names]
    return not all(header.exists() and header.stat().st_mtime <= built.stat().st_mtime for header in headers)


def drop_stale_cuda_objects(root: Path, sources: list[str]) -> None:
    """Removes objects of .cu files whose headers changed: with a CPU build of torch ninja does not track those headers,
    so tools/nvcc.py writes the dependency files.
    """
    for folder in root.glob("build/temp.*"):
        for built in (folder / Path(source).with_suffix(".o") for source in sources if source.endswith(".cu")):
            if built.exists() and is_older_than_its_headers(built, folder):
                built.unlink()


@contextlib.contextmanager
def one_build_at_a_time(folder: Path) -> Iterator[None]:
    """A lock: two builds of the same checkout would write the same objects."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as error:  # made by another user, for one
        sys.exit(
            f"packing_ops: {error.strerror}: {error.filename}; a build writes into {folder}: remove it, or make "
            "it yours"
        )
    with file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"packing_ops: waiting for another build in {folder}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems
            print(f"packing_ops: no lock in {folder} ({error.strerror}): run one build at a time", flush=True)
        yield


def contraction_flags() -> list[str]:
    """Of GCC: every multiply and add becomes one instruction. GCC 13 leaves some apart, depending on how many rows a
    loop has; then a row's bits depend on how many rows are beside it.
    """
    flag = "--param=avoid-fma-max-bits=0"
    compiler = os.environ.get("CXX", "c++").split()
    known = subprocess.run([*compiler, "-Werror", flag, "-x", "c++", "-fsyntax-only", os.devnull], capture_output=True)
    return [flag] if known.returncode == 0 else []
