"""Patches without a line of the project: hunk headers say which lines are deleted, git's blob ids of which file.

``complete`` inserts the deleted lines from a checkout, so that git can apply the patch; the blob ids of the files
before and after verify the outcome. To apply one, or to write one from an edited checkout:

    python tests/adoption/patches.py docs/adopt/NAME.patch CHECKOUT
    python tests/adoption/patches.py CHECKOUT [FILE ...] > docs/adopt/NAME.patch  # of these files, or of all
"""

import re
import subprocess
import sys
from pathlib import Path

HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")
INDEX = re.compile(r"index (\w+)\.\.(\w+)")


def git(*args, cwd, **kwargs):
    return subprocess.run(["git", *args], cwd=cwd, check=True, capture_output=True, text=True, **kwargs).stdout


def files(patch: str) -> list[dict]:
    """Per file: path, blob ids ``before`` and ``after``, numbers of lines ``deleted`` and ``added``."""
    found = []
    for line in patch.splitlines():
        if line.startswith("diff --git "):
            found.append({"path": line.split(" b/")[-1], "deleted": 0, "added": 0})
        elif match := INDEX.match(line):
            found[-1]["before"], found[-1]["after"] = match.groups()
        elif match := HUNK.match(line):
            found[-1]["deleted"] += int(match[2] or 1)
        elif line.startswith("+") and not line.startswith("+++ "):
            found[-1]["added"] += 1
    return found


def changed(patch: str, checkout: Path) -> list[str]:
    """Paths whose file in the checkout is not the one that the patch was written for."""
    return [file["path"] for file in files(patch) if blob(checkout / file["path"]) != file["before"]]


def blob(path: Path) -> str | None:
    return git("hash-object", "--no-filters", str(path), cwd="/").strip() if path.exists() else None


def complete(patch: str, checkout: Path) -> str:
    """The patch with its deleted lines, as git takes it."""
    lines, old = [], []
    for line in patch.splitlines():
        lines.append(line)
        if line.startswith("--- a/"):
            old = (checkout / line.removeprefix("--- a/")).read_text().split("\n")
        elif match := HUNK.match(line):
            start, count = int(match[1]), int(match[2] or 1)
            lines += [f"-{text}" for text in old[start - 1 : start - 1 + count]]
    return "\n".join(lines) + "\n"


def apply(patch: str, folder: Path) -> None:
    """Changes the files in ``folder``; raises where git refuses or the outcome has another blob id."""
    full = complete(patch, folder)
    git("apply", "--unidiff-zero", "-", cwd=folder, input=full, env={"GIT_CEILING_DIRECTORIES": str(folder.parent)})
    for file in files(patch):
        if blob(folder / file["path"]) != file["after"]:
            raise ValueError(f"{file['path']}: expected blob {file['after']} after the patch, got another")


def make(checkout: Path, *only: str) -> str:
    """The patch of the uncommitted edits in a checkout, or in those files of it, without its deleted lines."""
    paths = git("diff", "--diff-filter=M", "--name-only", "HEAD", "--", *only, cwd=checkout).split()
    patch = git("diff", "-U0", "--full-index", "HEAD", "--", *paths, cwd=checkout)
    kept = []
    for line in patch.splitlines():
        if match := HUNK.match(line):
            kept.append(match[0])
        elif not line.startswith("-") or line.startswith("--- a/"):
            kept.append(line)
    return "\n".join(kept) + "\n"


if __name__ == "__main__":
    first, *others = sys.argv[1:]
    if first.endswith(".patch"):
        apply(Path(first).read_text(), Path(*others).resolve())
    else:
        sys.stdout.write(make(Path(first).resolve(), *others))
