"""One wheel in fresh environments: python tests/matrix.py dist/packing_ops-*.whl [--torch 2.10.0 2.15.1] [--python 3.10
3.13].

For each Python that this machine has and each torch, from the oldest to the newest: an environment, that torch as pip
gives it, the wheel, and tests/project/test_quick.py where no source of packing_ops is in the way. Rows of
benchmarks/results/matrix.csv are replaced by what was run; docs/release.md is made of that file (make readme). Then
tests/integrations/transformers with the oldest transformers of pyproject.toml, in an environment over the one that runs
this.

An environment with a CUDA build of torch takes 7 GB and is removed when it passed, unless --keep.
"""

import argparse
import csv
import datetime
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "matrix.csv"
QUICK = ROOT / "tests" / "project" / "test_quick.py"
MINORS = range(10, 15)  # of Python 3
COLUMNS = ["torch", "python", "torch_cuda", "gpu", "result", "wheel", "date", "commit"]
CONFTEST = """
import pytest
import torch


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request):
    return request.param
"""
ABOUT = """
import platform, torch, packing_ops
assert packing_ops.build_info()["library_from"] == "this package"
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
print(torch.__version__, platform.python_version(), torch.version.cuda or "none", gpu, sep="|")
"""


def torches() -> list[str]:
    """Of each minor version that packing_ops takes the last patch release, oldest first."""
    oldest = re.search(r'"torch>=(\d+)\.(\d+)', (ROOT / "pyproject.toml").read_text()).groups()
    listed = run(sys.executable, "-m", "pip", "index", "versions", "torch", cwd=ROOT).stdout
    (line,) = re.findall(r"^Available versions: (.+)$", listed, re.M)
    last = {}
    for version in re.findall(r"(\d+)\.(\d+)\.(\d+)(?=,|$)", line):
        number = tuple(map(int, version))
        if number[:2] >= tuple(map(int, oldest)):
            last[number[:2]] = max(number, last.get(number[:2], number))
    return [".".join(map(str, last[minor])) for minor in sorted(last)]


def pythons() -> dict[str, Path]:
    """{"3.10": its executable}: on PATH, or where pyenv and uv keep them."""
    homes = [Path.home() / ".pyenv" / "versions", Path.home() / ".local" / "share" / "uv" / "python"]
    found = {}
    for version in (f"3.{minor}" for minor in MINORS):
        kept = [path for home in homes for path in sorted(home.glob(f"*{version}.*/bin/python{version}"))]
        paths = [*kept, *filter(None, [shutil.which(f"python{version}")])]
        works = [
            path for path in paths if not subprocess.run([path, "-c", "import venv"], capture_output=True).returncode
        ]
        if works:
            found[version] = Path(works[0])
    return found


def run(*command, cwd: Path) -> subprocess.CompletedProcess:
    hidden = ("PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [str(part) for part in command]
    return subprocess.run(command, cwd=cwd, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def tried(
    python: Path, torch: str, wheel: Path, folder: Path, index: tuple[str, ...] = ()
) -> tuple[dict[str, str], str]:
    """A row of the results, and what the last command said."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tests").mkdir(parents=True)
    shutil.copy(QUICK, folder / "tests")
    (folder / "tests" / "conftest.py").write_text(CONFTEST)
    own = folder / "venv" / "bin" / "python"
    pip = (own, "-m", "pip", "install", "--quiet", "--no-compile")
    steps = {
        "no environment": (python, "-m", "venv", folder / "venv"),
        "no such torch": (*pip, *index, f"torch=={torch}"),
        "not installed": (*pip, wheel, "pytest", "numpy"),
        "not imported": (own, "-c", ABOUT),
        "failed": (own, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", folder, folder / "tests"),
    }
    row, about = {"torch": torch, "python": ".".join(python.name.removeprefix("python").split(".")[:2])}, ""
    for outcome, command in steps.items():
        done = run(*command, cwd=folder)
        if done.returncode:
            return {**row, "result": outcome}, done.stdout
        about = done.stdout.splitlines()[-1] if outcome == "not imported" else about
    row |= dict(zip(("torch", "python", "torch_cuda", "gpu"), about.split("|"), strict=True))
    return {**row, "result": re.search(r"\d+ passed", done.stdout)[0]}, done.stdout


def oldest_transformers() -> str:
    return re.search(r'^hf = \["transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]


def tried_with_transformers(version: str, wheel: Path, folder: Path) -> tuple[str, str]:
    """The result of the integration's tests, and what the last command said. Everything else is of this environment."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    own, below = folder / "venv" / "bin" / "python", sysconfig.get_path("purelib")
    over = f"import pathlib, sysconfig; pathlib.Path(sysconfig.get_path('purelib'), 'below.pth').write_text({below!r})"
    pip = (own, "-m", "pip", "install", "--quiet", "--no-compile")
    spread = ("-n", "auto", "--maxprocesses", "4", "--dist", "worksteal")  # as make test
    steps = {
        "no environment": (sys.executable, "-m", "venv", folder / "venv"),
        "not over this environment": (own, "-c", over),
        "no such transformers": (*pip, f"transformers=={version}.*"),
        "not installed": (*pip, "--no-deps", wheel),
        "failed": (own, "-m", "pytest", "-q", *spread, "tests/integrations/transformers"),
    }
    for outcome, command in steps.items():
        done = run(*command, cwd=ROOT)
        if done.returncode:
            return outcome, done.stdout
    return re.search(r"\d+ passed", done.stdout)[0], done.stdout


def commit() -> str:
    """Containers without git name it in PACKING_OPS_COMMIT."""
    told = os.environ.get("PACKING_OPS_COMMIT", "unknown")
    if not shutil.which("git"):
        return told[:12]
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or told[:12]


def key(row: dict[str, str]) -> tuple:
    """Of torch and Python without the patch release, and the GPU: a later run of the same takes the row's place."""
    minors = [tuple(map(int, re.findall(r"\d+", row[name])[:2])) for name in ("torch", "python")]
    return (*minors, row.get("gpu", ""))


def save(rows: list[dict[str, str]]) -> None:
    old = list(csv.DictReader(RESULTS.open(newline=""))) if RESULTS.exists() else []
    merged = {key(row): row for row in [*old, *rows]}
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for _, row in sorted(merged.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", nargs="+", help="versions (default: the last of each minor version)")
    parser.add_argument("--python", nargs="+", help="such as 3.10 (default: those found here)")
    parser.add_argument("--torch-index", help="where pip finds torch, and nothing else")
    parser.add_argument("--keep", action="store_true", help="the environments that passed too")
    arguments = parser.parse_args()
    found = pythons()
    wanted = arguments.python or list(found)
    missing = [version for version in wanted if version not in found]
    if missing:
        sys.exit(f"tests/matrix.py: no Python {', '.join(missing)} here; found {', '.join(found) or 'none'}")
    wheel, rows = arguments.wheel.resolve(), []
    index = ("--index-url", arguments.torch_index) if arguments.torch_index else ()
    if not wheel.is_file():  # before a row of the results is replaced by a failure
        sys.exit(f"tests/matrix.py: expected a wheel, found no {wheel}: make wheel")
    for torch in arguments.torch or torches():
        for version in wanted:
            folder = ROOT / "build" / "matrix" / f"torch-{torch}-python-{version}"
            row, said = tried(found[version], torch, wheel, folder, index)
            rows.append(row | {"wheel": wheel.name, "date": datetime.date.today().isoformat(), "commit": commit()})
            print(f"torch {torch}, Python {version}: {row['result']}", flush=True)
            passed = row["result"].endswith("passed")
            if not passed:
                print(said[-3000:], flush=True)
            if passed and not arguments.keep:
                shutil.rmtree(folder)
            save(rows)
    print(f"written: {RESULTS.relative_to(ROOT)}")
    version = oldest_transformers()
    result, said = tried_with_transformers(version, wheel, ROOT / "build" / "matrix" / f"transformers-{version}")
    print(f"transformers {version}: {result}")
    if not result.endswith("passed"):
        print(said[-3000:])
    sys.exit(any(not each.endswith("passed") for each in (result, *(row["result"] for row in rows))))


if __name__ == "__main__":
    main()
