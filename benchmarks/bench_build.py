"""python benchmarks/bench_build.py: how long a build of the sources takes from nothing, into
benchmarks/results/build.csv.

FORCE_CUDA, TORCH_CUDA_ARCH_LIST and MAX_JOBS choose what is built, as for pip install. Without a cache of compilers;
the library of this checkout stays what it is. largest_job_mib: the most memory that one process had.
`taskset -c 0,1 python benchmarks/bench_build.py`: on two cores.
"""

import csv
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from provenance import commit
from result_rows import RESULTS

ROOT = Path(__file__).resolve().parent.parent
FILE = RESULTS / "build.csv"
FIELDS = ["built", "cores", "seconds", "cpu_seconds", "load", "torch", "date", "commit", "largest_job_mib"]


def build() -> tuple[str, float, float]:
    """What was built, the seconds, and those of all cores together."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "setup.py",
            "-q",
            "build_ext",
            "--build-temp",
            f"{folder}/temp",
            "--build-lib",
            folder,
        ]
        start, before = time.monotonic(), cpu_seconds()
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"CCACHE_DISABLE": "1"}, stdout=subprocess.PIPE, text=True, check=True
        )
        seconds = time.monotonic() - start
    gpus = re.search(r"for GPUs of compute capability (.+)", done.stdout)
    return f"CPU and CUDA, {gpus[1]}" if gpus else "CPU only", seconds, cpu_seconds() - before


def cpu_seconds() -> float:
    """Of the processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    import torch

    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    built, seconds, of_cores = build()
    row = [
        built,
        cores,
        f"{seconds:.0f}",
        f"{of_cores:.0f}",
        f"{load:.1f}",
        torch.__version__,
        date.today(),
        commit() or "",
        resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
    ]
    rows = list(csv.reader(FILE.open()))[1:] if FILE.exists() else []
    rows = [other for other in rows if other[:2] != [built, str(cores)]] + [[str(value) for value in row]]
    rows = [other + [""] * (len(FIELDS) - len(other)) for other in rows]
    with FILE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([FIELDS, *sorted(rows)])
    print(f"{built}, {cores} cores: {seconds:.0f} s")


if __name__ == "__main__":
    main()
