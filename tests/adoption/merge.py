"""Whether the patches of docs/adopt still fit: merged three-way onto another commit of a project, hunk by hunk.

    python tests/adoption/merge.py --checkouts FOLDER [--fetch] [--onto COMMIT] [skyrl unsloth ...]

COMMIT is what the checkout has at HEAD by default; with --fetch HEAD of GitHub. The checkout must also have the commit
of projects.py, which the patches were written for. Hunks that conflict are named; where none does, the project's tests
run with the flag. benchmarks/results/adoption_merges.json keeps the outcome, and docs/adopt/README.md has it as a
table.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pages
import patches
import run
from projects import PROJECTS


def hunks(patch: str) -> dict[str, list[dict]]:
    """Per path: its hunks, each ``start`` and ``count`` of the lines that go and the ``added`` lines."""
    found: dict[str, list[dict]] = {}
    for line in patch.splitlines():
        if line.startswith("diff --git "):
            found[line.split(" b/")[-1]] = into = []
        elif match := patches.HUNK.match(line):
            into.append({"start": int(match[1]), "count": int(match[2] or 1), "added": []})
        elif line.startswith("+") and not line.startswith("+++ "):
            into[-1]["added"].append(line[1:])
    return found


def edited(text: str, its_hunks: list[dict]) -> str:
    lines = text.split("\n")
    for hunk in reversed(its_hunks):
        start = hunk["start"] - (hunk["count"] > 0)  # a hunk that only adds follows its line
        lines[start : start + hunk["count"]] = hunk["added"]
    return "\n".join(lines)


def merged(current: str, before: str, after: str) -> str | None:
    """``current`` with the changes from ``before`` to ``after``; None where they conflict."""
    with tempfile.TemporaryDirectory() as folder:
        names = ("current", "before", "after")
        for name, text in zip(names, (current, before, after), strict=True):
            (Path(folder) / name).write_text(text)
        done = subprocess.run(["git", "merge-file", "-p", *names], cwd=folder, capture_output=True, text=True)
    return None if done.returncode else done.stdout


def merge(texts: list[str], checkout: Path, commit: str, folder: Path) -> tuple[int, list[str]]:
    """Writes the merged files of ``folder``; the number of hunks, and those that conflict."""
    count, conflicts = 0, []
    for path, its_hunks in (item for text in texts for item in hunks(text).items()):
        count += len(its_hunks)
        before, there = patches.git("show", f"{commit}:{path}", cwd=checkout), folder / path
        current = there.read_text() if there.exists() else ""
        came = merged(current, before, edited(before, its_hunks)) if current else None
        if came is not None:
            there.write_text(came)
            continue
        alone = [hunk for hunk in its_hunks if not current or merged(current, before, edited(before, [hunk])) is None]
        conflicts += [f"{path}:{hunk['start']}" for hunk in alone or its_hunks]
    return count, conflicts


def tree(checkout: Path, commit: str, folder: Path) -> Path:
    """The files of a commit. Some may be missing: a partial clone has no large ones."""
    folder.mkdir()
    settings = {**os.environ, "GIT_INDEX_FILE": str(folder.parent / f"{folder.name}.index")}
    patches.git("read-tree", commit, cwd=checkout, env=settings)
    command = ["git", "checkout-index", "-a", "-q", f"--prefix={folder}/"]
    subprocess.run(command, cwd=checkout, env=settings, capture_output=True, check=False)
    return folder


def examine(name: str, folder: Path | None, onto: str, fetched: bool) -> dict:
    project = PROJECTS[name]
    checkout = run.checkout_of(name, project.repository, folder)
    beside = [run.checkout_of(each, repository, folder) for each, (repository, _) in project.beside.items()]
    if checkout is None and folder and fetched:
        checkout = run.fetch(name, project.repository, onto, folder)
        patches.git("fetch", "-q", "--depth", "1", run.HOST + project.repository, project.commit, cwd=checkout)
    if checkout is None or None in beside:
        return {"not_run": "no checkout in CHECKOUTS"}
    try:
        commit = patches.git("rev-parse", f"{onto}^{{commit}}", cwd=checkout).strip()
        patches.git("cat-file", "-e", project.commit, cwd=checkout)
    except subprocess.CalledProcessError:
        return {"not_run": f"the checkout has no {onto[:12]}, or no {project.commit[:12]}, which the patches are for"}
    with tempfile.TemporaryDirectory() as scratch:
        stock, patched = (tree(checkout, commit, Path(scratch) / each) for each in ("stock", "patched"))
        count, conflicts = merge(
            [pages.patch_of(patch) for patch in project.patches], checkout, project.commit, patched
        )
        record = {
            "commit": commit,
            "committed": patches.git("show", "-s", "--format=%cs", commit, cwd=checkout).strip(),
            "date": datetime.date.today().isoformat(),
            "hunks": count,
            "conflicts": conflicts,
        }
        tests = [test for test in project.tests if (patched / test).exists()]
        if conflicts or not tests:
            return record
        outcomes = run.run_tests(project, patched, beside, tests, flag=True)["outcomes"]
        failed = [test for test, came in outcomes.items() if came["outcome"] == "failed"]
        before = run.run_tests(project, stock, beside, sorted({test.split("::")[0] for test in failed}))["outcomes"]
    new = [test for test in failed if before.get(test, {}).get("outcome") != "failed"]
    kept = [test for test in new if any(test.endswith(end) for end in project.kept)]
    return record | run.counts(outcomes) | {"new": len(new) - len(kept), "kept": len(kept)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkouts", type=Path)
    parser.add_argument("--fetch", action="store_true")
    parser.add_argument("--onto", default="HEAD")
    parser.add_argument("names", nargs="*", default=[], help=f"of {', '.join(PROJECTS)}; all by default")
    args = parser.parse_args()
    if unknown := {*args.names} - {*PROJECTS}:
        parser.error(f"expected some of {', '.join(PROJECTS)}, got {', '.join(sorted(unknown))}")
    folder = args.checkouts.resolve() if args.checkouts else None
    worst = 0
    for name in args.names or PROJECTS:
        came = examine(name, folder, args.onto, args.fetch)
        if "not_run" in came:
            print(f"{name}: {came['not_run']}")
            continue
        merges = json.loads(pages.MERGES.read_text()) if pages.MERGES.exists() else {}
        tried = {each["commit"]: each for each in merges.get(name, [])} | {came["commit"]: came}
        newest_first = sorted(tried.values(), key=lambda each: each["committed"], reverse=True)
        merges = {each: newest_first if each == name else merges.get(each, []) for each in PROJECTS}
        pages.MERGES.write_text(json.dumps({each: rows for each, rows in merges.items() if rows}, indent=1) + "\n")
        print(f"{name} at {came['commit'][:12]}: {came['hunks']} hunks, {len(came['conflicts'])} conflict")
        print("".join(f"    {hunk}\n" for hunk in came["conflicts"]), end="")
        if "passed" in came:
            print("    " + pages.of_tests(came))
        worst = max(worst, len(came["conflicts"]), came.get("new", 0))
    pages.write()
    return 1 if worst else 0


if __name__ == "__main__":
    sys.exit(main())
