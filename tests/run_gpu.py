"""The test files in groups, several pytest processes at once: python tests/run_gpu.py [--only GROUP ...] [pytest arguments]

One log per group, its end printed as soon as it is done, then the counts of all. One after the other they would take
much longer. The processes share the cores out among them, so that tests that compare the CPU time of two calls are not
disturbed. Every process sees all GPUs, each group another one as its first.
"""

import argparse
import collections
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
# The longest first. Each takes what those before it left; the last takes every file that is in no other group.
GROUPS = {
    "sanitizer": ["test_sanitizer.py"],
    "families of transformers": ["test_hf_families.py"],
    "transformers a-f": ["test_hf_[a-f]*.py"],
    "transformers g-n": ["test_hf_[g-n]*.py"],
    "transformers o-r": ["test_hf_[o-r]*.py"],
    "transformers s-z": ["test_hf_[s-z]*.py"],
    "attention": ["test_attention.py"],
    "attention on a GPU": ["test_attention_cuda.py"],
    "attention, other files": ["test_attention*.py"],
    "megatron": ["test_megatron_*.py"],
    "log-probabilities": ["test_logps*.py", "test_prefix_token_logps.py"],
    "padding, packing": ["test_pack*.py", "test_padding*.py"],
    "other ops": ["test_boundaries.py", "test_cuda.py", "test_rope*.py", "test_prefix*.py"],
    "integrations": ["test_flash_attn_*.py", "test_trl.py", "test_unsloth.py", "test_strides.py"],
    "others": ["test_*.py"],
}
NOT_HERE = ["test_install.py", "test_emulated_*.py", "test_*example*.py"]  # they need a compiler, or train on the CPU
NOTHING_COLLECTED = 5  # such as where a library that all of them need is not installed
LINES = 12


def targets() -> dict[str, list[str]]:
    """{group: what pytest is given}."""
    left = set(TESTS.rglob("test_*.py")).difference(*(TESTS.rglob(pattern) for pattern in NOT_HERE))
    found = {}
    for name, patterns in GROUPS.items():
        files = sorted(path for path in left if any(path.match(pattern) for pattern in patterns))
        left.difference_update(files)
        found[name] = [str(path.relative_to(ROOT)) for path in files] or patterns  # pytest tells what is not there
    found["sanitizer"] += ["-n", "8"]  # each case is a process that waits for another
    return found


def visible_gpus() -> list[str]:
    """Returns the GPUs as CUDA_VISIBLE_DEVICES names them."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    return asked.split(",") if asked else [str(gpu) for gpu in range(torch.cuda.device_count())]


def environment(group: int, gpus: list[str], threads: int) -> dict[str, str]:
    """Returns the variables of a group's process: with GPUs 0 to 3, group 1 sees them as 1,2,3,0."""
    first = group % max(1, len(gpus))
    order = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first:] + gpus[:first])} if gpus else {}
    return {"OMP_NUM_THREADS": str(threads), **os.environ, **order}


def run(name: str, arguments: list[str], log: Path, variables: dict[str, str]) -> tuple[bool, collections.Counter]:
    """Whether the group passed, and how many tests came out how."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    start = time.perf_counter()
    with log.open("w") as file:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=variables,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    passed = done.returncode in (0, NOTHING_COLLECTED)
    lines = log.read_text(errors="replace").splitlines()
    shown = "\n".join(line[:200] for line in lines[-LINES if passed else -4 * LINES :])
    print(f"\n== {name}: exit {done.returncode}, {time.perf_counter() - start:.0f} s, {log}\n{shown}", flush=True)
    last = lines[-1] if lines else ""
    counts = re.findall(r"(\d+) (passed|failed|error|skipped|deselected|xfailed|xpassed)", last)
    return passed, collections.Counter({kind: int(count) for count, kind in counts})


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "test-gpu", help="folder, a file per group")
    parser.add_argument("--jobs", type=int, default=len(GROUPS), help="processes at once, at most one per core")
    parser.add_argument("--only", nargs="+", metavar="GROUP", choices=list(GROUPS), default=list(GROUPS))
    arguments, for_pytest = parser.parse_known_args()
    cores = len(os.sched_getaffinity(0))
    jobs = max(1, min(arguments.jobs, cores, len(arguments.only)))
    arguments.logs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        gpus, runs = visible_gpus(), {}
        for name, tests in targets().items():
            if name in arguments.only:
                log = arguments.logs / f"{name.replace(' ', '_')}.log"
                variables = environment(len(runs), gpus, cores // jobs)
                runs[name] = pool.submit(run, name, [*tests, *for_pytest], log, variables)
    counts = sum((done.result()[1] for done in runs.values()), collections.Counter())
    failed = [name for name, done in runs.items() if not done.result()[0]]
    print("\nall groups:", ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if failed or not counts["passed"]:
        sys.exit(f"failed: {failed or 'no test ran'}")


if __name__ == "__main__":
    main()
