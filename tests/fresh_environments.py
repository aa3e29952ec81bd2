"""The scripts of examples/first in environments made from nothing: python tests/fresh_environments.py [torch==2.12.1
...]

Without arguments in two: the oldest torch that packing_ops takes, and the newest there is. In each, torch as pip gives
it, packing_ops built there as README says and its extras; then in the first one the oldest libraries that each extra
allows, one extra after the other: the oldest megatron-core wants a NumPy that is too old for the others. What runs is
tests/examples/test_first_scripts.py next to a copy of the examples, where no source of packing_ops is in the way.

An environment takes 7 GB, and pip has to fetch half of that once. One that passed is removed, unless --keep.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NOT_SOURCES = shutil.ignore_patterns(".venv*", ".git", "build", "dist", "*.so", "*.egg-info", "__pycache__", ".*_cache")
TESTS = "tests/examples/test_first_scripts.py"
EXTRAS = {"hf": "not megatron", "megatron": "megatron"}  # and the tests of each, as pytest selects them
# In place of tests/helpers/fresh_process.py: scripts that have imported nothing before they start.
PROCESS = """
import subprocess
import sys


def run(*command, cwd, folder):
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout
"""
COLUMNS = ["torch", "transformers", "trl", "megatron-core", "packing_ops"]


class Outcome(NamedTuple):
    """Of one run: {library: version}, and the outcome."""

    versions: dict[str, str]
    passed: bool
    said: str


def oldest(requirement: str) -> str:
    """The lowest version that a requirement allows: "trl>=1; extra == 'hf'" as "trl==1.0.*"."""
    name, major, minor = re.fullmatch(r"([\w-]+)>=(\d+)(?:\.(\d+))?", requirement.partition(";")[0].strip()).groups()
    return f"{name}=={major}.{minor or 0}.*"


def torches() -> list[str]:
    """The oldest and the newest, as pip is asked for them."""
    needed = re.search(r'^dependencies = \["(torch>=[\d.]+)"\]', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    return [oldest(needed), "torch"]


def came_of(code: int, output: str) -> tuple[bool, str]:
    """pytest's exit code and output: whether all passed, a skipped test being a script that did not run; and the
    counts.
    """
    last = output.splitlines()[-1] if output else ""
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", last)
    passed = code == 0 and len(counts) == 1 and counts[0].endswith("passed")
    return passed, ", ".join(counts) or f"pytest ended with {code}"


def table(outcomes: list[Outcome]) -> str:
    rows = [[*COLUMNS, "scripts"]]
    rows += [[*(outcome.versions.get(name, "–") for name in COLUMNS), outcome.said] for outcome in outcomes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


class Environment:
    """A virtual environment in a separate folder, with the settings of a shell that knows nothing of this clone."""

    def __init__(self, folder: Path):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder, self.python, self.log = folder, folder / "venv" / "bin" / "python", folder / "log"
        hidden = {"PYTHONPATH", "TORCH_CUDA_ARCH_LIST", "LD_LIBRARY_PATH"}
        self.variables = {name: value for name, value in os.environ.items() if name not in hidden}
        self.variables |= {"FORCE_CUDA": "0", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        self.run(sys.executable, "-m", "venv", folder / "venv")

    def run(self, *command, cwd: Path | None = None, check=True) -> subprocess.CompletedProcess:
        command = [str(part) for part in command]
        done = subprocess.run(
            command,
            cwd=cwd or self.folder,
            env=self.variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n{done.stdout}\n")
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}\nexit code {done.returncode}")
        return done

    def pip(self, *arguments, cwd: Path | None = None) -> None:
        self.run(self.python, "-m", "pip", "install", "--quiet", "--no-compile", *arguments, cwd=cwd)

    def install(self, torch: str) -> None:
        """As README says: torch, `pip install .` in a clone, the extras."""
        self.pip(torch)
        shutil.copytree(ROOT, self.folder / "sources", ignore=NOT_SOURCES)
        self.pip(".", cwd=self.folder / "sources")
        self.pip(f"packing_ops[{','.join(EXTRAS)}]", "pytest")

    def bounds(self, extra: str) -> list[str]:
        """What an extra asks for at least."""
        code = "import importlib.metadata as m; print(*m.requires('packing_ops'), sep='\\n')"
        wanted = [line for line in self.run(self.python, "-c", code).stdout.splitlines() if ">=" in line]
        return [line for line in wanted if re.search(f"extra == .{extra}\\b", line)]

    def versions(self) -> dict[str, str]:
        code = "import importlib.metadata as m; print(*(f'{d.name} {d.version}' for d in m.distributions()), sep='\\n')"
        return dict(line.split(" ") for line in self.run(self.python, "-c", code).stdout.splitlines())

    def outcome(self, selected: str = "") -> Outcome:
        place = self.folder / "place"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(ROOT / "examples", place / "examples", ignore=NOT_SOURCES)
        (place / TESTS).parent.mkdir(parents=True)
        helpers = (place / TESTS).with_name("helpers")
        helpers.mkdir()
        (helpers / "fresh_process.py").write_text(PROCESS)
        shutil.copy(ROOT / TESTS, place / TESTS)
        start = time.monotonic()
        options = ["-q", "-rs", "-c", os.devnull, "--rootdir", ".", "-k", selected]
        done = self.run(self.python, "-m", "pytest", *options, TESTS, cwd=place, check=False)
        passed, said = came_of(done.returncode, done.stdout)
        if not passed:
            print(done.stdout[-6000:], flush=True)
        return Outcome(self.versions(), passed, f"{said} in {time.monotonic() - start:.0f} s")


def outcomes_of(torch: str, with_oldest: bool, keep: bool) -> list[Outcome]:
    folder = ROOT / "build" / "fresh" / re.sub(r"[^\w.]+", "-", torch).strip("-.")
    environment = Environment(folder)
    print(f"{torch}: installing into {folder}", flush=True)
    environment.install(torch)
    found = [environment.outcome()]
    for extra, selected in EXTRAS.items() if with_oldest else ():
        lowest = [oldest(bound) for bound in environment.bounds(extra)]
        print(f"{torch}: {' '.join(lowest)}", flush=True)
        environment.pip(*lowest)
        found.append(environment.outcome(selected))
    if all(outcome.passed for outcome in found) and not keep:
        shutil.rmtree(folder)
    else:
        print(f"{torch}: kept, with a log: {folder}", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", nargs="*", default=torches(), help="requirements of pip")
    parser.add_argument("--keep", action="store_true", help="the environments that passed too")
    arguments = parser.parse_args()
    found, broken = [], []
    for number, torch in enumerate(arguments.torch):
        try:
            found += outcomes_of(torch, number == 0, arguments.keep)
        except RuntimeError as error:  # of an installation: the others run all the same
            print(f"{torch}: {error}", flush=True)
            broken.append(torch)
    print(f"\n{table(found)}")
    broken += [f"torch {outcome.versions['torch']}: {outcome.said}" for outcome in found if not outcome.passed]
    sys.exit(f"failed: {'; '.join(broken)}" if broken else None)


if __name__ == "__main__":
    main()
