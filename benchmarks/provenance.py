"""Where the figures of benchmarks/results come from."""

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str | None:
    """Of the sources, changed results aside. PACKING_OPS_COMMIT says it where they are not in a git checkout."""
    if os.environ.get("PACKING_OPS_COMMIT"):
        return os.environ["PACKING_OPS_COMMIT"]

    def git(*arguments):
        return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    except FileNotFoundError:  # no git
        return None
    return head + ("-dirty" if changed else "") if head else None


def add_commit(path: Path, **origin) -> None:
    """Writes the commit, and ``origin``, in front of the results that a program wrote to ``path`` as JSON."""
    results = json.loads(path.read_text())
    path.write_text(json.dumps({**origin, "commit": commit(), **results}, indent=1) + "\n")
