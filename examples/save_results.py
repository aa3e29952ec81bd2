"""What examples and benchmarks write down: figures, and where they come from."""

import json
import os
import subprocess
from pathlib import Path

import torch


def commit() -> str | None:
    """Of the sources, changed results aside. PACKING_OPS_COMMIT says it where they are not in a git checkout."""
    if os.environ.get("PACKING_OPS_COMMIT"):
        return os.environ["PACKING_OPS_COMMIT"]
    root = Path(__file__).parent.parent

    def git(*arguments):
        return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=root).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    except FileNotFoundError:  # no git
        return None
    return head + ("-dirty" if changed else "") if head else None


def machine(device: str) -> dict:
    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return {"device": name, "torch": torch.__version__, "commit": commit()}


def save_results(path: Path, results: dict, device: str) -> None:
    """``results`` as JSON, with the device, torch and commit that they come from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**machine(device), **results}, indent=1) + "\n")
    print(f"written: {path}")
