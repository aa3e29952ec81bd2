"""Patches the projects of docs/adopt, runs their own unit tests on the CPU, and writes benchmarks/results/adoption.json.

    python tests/adoption/run.py --checkouts FOLDER [skyrl unsloth ...]

FOLDER holds a checkout of each project, named as in projects.py or as its repository; nothing is fetched. A project
without one is skipped. Checkouts stay as they are: the patch is applied to a copy.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pages
import patches
from projects import PROJECTS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "adoption.json"


def checkout_of(name: str, repository: str, folder: Path | None) -> Path | None:
    for known in (name, repository.partition("/")[2], repository.replace("/", "+")):
        if folder and (folder / known / ".git").exists():
            return folder / known
    return None


def copy(checkout: Path, to: Path) -> Path:
    for name in patches.git("ls-files", "-z", cwd=checkout).split("\0"):
        source = checkout / name
        if name and source.is_file() and not source.is_symlink():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, to / name)
    return to


def run_tests(project, folder: Path, beside: list[Path], tests: list[str]) -> dict:
    """{"outcomes": {test: {"outcome", "message"}}, "stand_ins": those used}, as stand_ins.py writes it."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        search = [folder / p for p in project.path] + beside + [HERE, ROOT]
        settings = {
            "PYTHONPATH": os.pathsep.join(map(str, search)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "2",
            "HF_HUB_OFFLINE": "1",
            "ADOPTION_STAND_INS": ",".join(project.stand_ins.split()),
            "ADOPTION_FIXES": ",".join(project.fixes),
            "ADOPTION_VERSIONS": ",".join(f"{name}={version}" for name, version in project.versions.items()),
            "ADOPTION_OUTCOMES": file.name,
        }
        command = [sys.executable, "-m", "pytest", "-p", "stand_ins", "-p", "no:cacheprovider", "-q", "--tb=short"]
        command += ["--continue-on-collection-errors", *(["-k", project.only] if project.only else []), *tests]
        done = subprocess.run(command, cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True)
        try:
            return json.load(file)
        except ValueError:
            raise RuntimeError(f"no tests ran in {folder}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}") from None


def examine(name: str, folder: Path | None) -> dict:
    project = PROJECTS[name]
    patch = (ROOT / "docs" / "adopt" / f"{name}.patch").read_text()
    record = {"repository": project.repository, "commit": project.commit}
    checkout = checkout_of(name, project.repository, folder)
    if checkout is None:
        return {**record, "not_run": f"no checkout of {project.repository} in CHECKOUTS"}
    if wrong := patches.changed(patch, checkout):
        return {**record, "not_run": f"the checkout is not at {project.commit[:12]}: {', '.join(wrong)} differ"}
    beside = [checkout_of(other, other, folder) for other in project.beside]
    if None in beside:
        return {**record, "not_run": f"no checkout of {', '.join(project.beside)} in CHECKOUTS"}
    with tempfile.TemporaryDirectory() as scratch:
        patched = copy(checkout, Path(scratch) / name)
        patches.apply(patch, patched)
        for file in patches.files(patch):
            compile((patched / file["path"]).read_text(), file["path"], "exec")
        nothing = {"outcomes": {}, "stand_ins": []}
        run = run_tests(project, patched, beside, project.tests) if project.tests else nothing
        failed = [test for test, came in run["outcomes"].items() if came["outcome"] == "failed"]
        before = {}
        if failed:
            stock = copy(checkout, Path(scratch) / f"{name}-stock")
            before = run_tests(project, stock, beside, failed)["outcomes"]
    failures = [
        {"test": test, "why": why(project, test, before), "message": clean(run["outcomes"][test]["message"])}
        for test in failed
    ]
    count = [came["outcome"] for came in run["outcomes"].values()].count
    return {
        **record,
        "checkout": patches.git("rev-parse", "HEAD", cwd=checkout).strip(),
        "date": datetime.date.today().isoformat(),
        "packing_ops": patches.git("rev-parse", "HEAD", cwd=ROOT).strip(),
        "python": platform.python_version(),
        "tests": project.tests,
        "passed": count("passed"),
        "failed": len(failed),
        "skipped": count("skipped"),
        "failures": failures,
        "stand_ins": run["stand_ins"],
        "beside": project.beside,
    }


def clean(message: str) -> str:
    """At most 160 characters, without addresses and folders of this machine."""
    message = re.sub(r" at 0x[0-9a-f]+|/\S*/(?=\w)", "", message)
    return message if len(message) <= 160 else message[:157] + "..."


def why(project, test: str, before: dict) -> str:
    if before.get(test, {}).get("outcome") == "failed":
        return "fails without the patch too: " + clean(before[test]["message"])
    return next((f"kept: {reason}" for end, reason in project.kept.items() if test.endswith(end)), "open")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkouts", type=Path)
    parser.add_argument("names", nargs="*", default=[])
    args = parser.parse_args()
    folder = args.checkouts.resolve() if args.checkouts and str(args.checkouts) != "." else None
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = {name: results[name] for name in PROJECTS if name in results}
    open_failures = []
    for name in args.names or PROJECTS:
        result = examine(name, folder)
        if "not_run" in result:
            print(f"{name}: not run, {result['not_run']}")
            results.setdefault(name, result)
            continue
        results[name] = result
        print(f"{name}: {result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped")
        for failure in result["failures"]:
            print(f"  {failure['test']}\n    {failure['why']}\n    {failure['message']}")
        open_failures += [failure for failure in result["failures"] if failure["why"] == "open"]
    RESULTS.write_text(json.dumps({name: results[name] for name in PROJECTS if name in results}, indent=1) + "\n")
    pages.write()
    return 1 if open_failures else 0


if __name__ == "__main__":
    sys.exit(main())
