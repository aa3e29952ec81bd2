"""Patches the projects of docs/adopt, runs their unit tests on the CPU, and writes
benchmarks/results/adoption.json.

    python tests/adoption/run.py --checkouts FOLDER [--fetch] [skyrl unsloth ...]

A patch whose code is behind a flag is tested with the flag and without. The last output is a table of all projects.

FOLDER holds a checkout of each project, named as in projects.py or as its repository. A project without one is skipped,
or with --fetch its commit is cloned there from GitHub. Checkouts stay as they are: the patch is applied to a copy.
"""

import argparse
import datetime
import importlib.metadata
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
HOST = "https://github.com/"


def checkout_of(name: str, repository: str, folder: Path | None) -> Path | None:
    for known in (name, repository.partition("/")[2], repository.replace("/", "+")):
        if folder and (folder / known / ".git").exists():
            return folder / known
    return None


def fetch(name: str, repository: str, commit: str, folder: Path) -> Path:
    """A new checkout of only that commit."""
    checkout = folder / name
    checkout.mkdir(parents=True)
    try:
        patches.git("init", "-q", cwd=checkout)
        patches.git("fetch", "-q", "--depth", "1", HOST + repository, commit, cwd=checkout)
        patches.git("checkout", "-q", "FETCH_HEAD", cwd=checkout)
    except subprocess.CalledProcessError:
        shutil.rmtree(checkout)
        raise
    return checkout


def copy(checkout: Path, to: Path) -> Path:
    for name in patches.git("ls-files", "-z", cwd=checkout).split("\0"):
        source = checkout / name
        if name and source.is_file() and not source.is_symlink():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, to / name)
    return to


def environment(project, folder: Path, beside: list[Path], flag: bool) -> dict[str, str]:
    """What the project's code is run under."""
    search = [folder / p for p in project.path] + beside + [HERE, ROOT]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, search)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
        "ADOPTION_STAND_INS": ",".join(project.stand_ins.split()),
        "ADOPTION_FIXES": ",".join(project.fixes),
        "ADOPTION_VERSIONS": ",".join(f"{name}={version}" for name, version in project.versions.items()),
        **(project.flag if flag else {}),
    }


def run_tests(project, folder: Path, beside: list[Path], tests: list[str], flag: bool = False) -> dict:
    """{"outcomes": {test: {"outcome", "message"}}, "stand_ins": those used}, as stand_ins.py writes it."""
    if not tests:
        return {"outcomes": {}, "stand_ins": []}
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        settings = {**environment(project, folder, beside, flag), "ADOPTION_OUTCOMES": file.name}
        command = [sys.executable, "-m", "pytest", "-p", "stand_ins", "-p", "no:cacheprovider", "-q", "--tb=short"]
        command += ["--continue-on-collection-errors", *(["-k", project.only] if project.only else []), *tests]
        done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True)
        try:
            return json.load(file)
        except ValueError:
            raise RuntimeError(f"no tests ran in {folder}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}") from None


def train(project, folder: Path, beside: list[Path]) -> dict[str, dict[str, list[float]]]:
    """The losses that the project's training script prints, by run and way."""
    command = [sys.executable, str(HERE / project.training)]
    settings = environment(project, folder, beside, flag=True)
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:].strip() or f"exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def examine(name: str, folder: Path | None, fetched: bool = False) -> dict:
    """fetched: clone what is missing."""
    project = PROJECTS[name]
    texts = {patch: pages.patch_of(patch) for patch in project.patches}
    record = {"repository": project.repository, "commit": project.commit}
    needed = {name: (project.repository, project.commit), **project.beside}
    checkouts = {each: checkout_of(each, repository, folder) for each, (repository, _) in needed.items()}
    for each, found in checkouts.items():
        if found is None and not (folder and fetched):
            return {**record, "not_run": f"no checkout of {needed[each][0]} in CHECKOUTS"}
        try:
            checkouts[each] = found or fetch(each, *needed[each], folder)
        except subprocess.CalledProcessError as error:
            return {**record, "not_run": f"{needed[each][0]} was not cloned: {clean(error.stderr.strip())}"}
    checkout, *beside = checkouts.values()
    if wrong := [path for text in texts.values() for path in patches.changed(text, checkout)]:
        return {**record, "not_run": f"the checkout is not at {project.commit[:12]}: {', '.join(wrong)} differ"}
    with tempfile.TemporaryDirectory() as scratch:
        patched = copy(checkout, Path(scratch) / name)
        for text in texts.values():
            patches.apply(text, patched)
            for file in patches.files(text):
                compile((patched / file["path"]).read_text(), file["path"], "exec")
        run = run_tests(project, patched, beside, project.tests, flag=True)
        off = run_tests(project, patched, beside, project.tests)["outcomes"] if project.flag else {}
        failed = [_failed(outcomes) for outcomes in (run["outcomes"], off)]
        stock = copy(checkout, Path(scratch) / f"{name}-stock") if any(failed) else None
        before = run_tests(project, stock, beside, sorted({*failed[0], *failed[1]}))["outcomes"] if stock else {}
        losses, error = {}, ""
        if project.training:
            try:
                losses = train(project, patched, beside)
            except RuntimeError as failed_training:
                error = clean(str(failed_training).splitlines()[-1])
    record |= {
        "checkout": patches.git("rev-parse", "HEAD", cwd=checkout).strip(),
        "date": datetime.date.today().isoformat(),
        "packing_ops": patches.git("rev-parse", "HEAD", cwd=ROOT).strip(),
        "python": platform.python_version(),
        "patches": {patch: pages.digest(text) for patch, text in texts.items()},
        "tests": project.tests,
        **counts(run["outcomes"]),
        "failures": [failure(project, test, run["outcomes"], before) for test in failed[0]],
        "stand_ins": run["stand_ins"],
        "versions": versions(["torch", "transformers", *project.stand_ins.split()]),
        "beside": {other: commit for other, (_, commit) in project.beside.items()},
    }
    if project.flag:
        new = [failure(project, test, off, before) for test in failed[1]]
        record["without_flag"] = {**counts(off), "failures": new}
    if error:
        record["failures"].append({"test": project.training, "why": "open", "message": error})
        record["failed"] += 1
    if losses:
        record["losses"] = losses
    return record


def versions(packages: list[str]) -> dict[str, str]:
    """Of those that are installed."""
    names = importlib.metadata.packages_distributions()
    return {name: importlib.metadata.version(names[name][0]) for name in packages if name in names}


def counts(outcomes: dict) -> dict[str, int]:
    count = [came["outcome"] for came in outcomes.values()].count
    return {outcome: count(outcome) for outcome in ("passed", "failed", "skipped")}


def failure(project, test: str, outcomes: dict, before: dict) -> dict[str, str]:
    return {"test": test, "why": why(project, test, before), "message": clean(outcomes[test]["message"])}


def _failed(outcomes: dict) -> list[str]:
    return [test for test, came in outcomes.items() if came["outcome"] == "failed"]


def table(results: dict) -> str:
    """Host, commit, patch, passed, failed with reasons; one line per project."""
    rows = [("host", "commit", "patch", "passed", "failed", "why")]
    for name, result in results.items():
        start = (name, result["commit"][:12], " ".join(PROJECTS[name].patches))
        if "not_run" in result:
            rows.append((*start, "-", "-", "not run, " + result["not_run"]))
            continue
        reasons = [each["why"] for each in result["failures"]]
        whys = [f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons)]
        if not result["tests"]:
            whys = ["it has no unit tests: the patch applies, what it changes compiles"]
        rows.append((*start, str(result["passed"]), str(result["failed"]), "; ".join(whys)))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]).rstrip()
        for row in rows
    )


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
    parser.add_argument("--fetch", action="store_true")
    parser.add_argument("names", nargs="*", default=[])
    args = parser.parse_args()
    folder = args.checkouts.resolve() if args.checkouts and str(args.checkouts) != "." else None
    came, open_failures = {}, []
    for name in args.names or PROJECTS:
        came[name] = result = examine(name, folder, args.fetch)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        if "not_run" in result:
            results.setdefault(name, result)
        else:
            results[name] = result
        ordered = {each: results[each] for each in PROJECTS if each in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
        failures = result.get("failures", []) + result.get("without_flag", {}).get("failures", [])
        for failure in failures:
            print(f"{name}: {failure['test']}\n    {failure['why']}\n    {failure['message']}")
        open_failures += [failure for failure in failures if failure["why"] == "open"]
    print(table(came))
    pages.write()
    return 1 if open_failures else 0


if __name__ == "__main__":
    sys.exit(main())
