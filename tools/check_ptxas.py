"""Compiles attention's Hopper kernels and fails if ptxas serialises wgmma instructions (warnings C75xx) or spills registers:
python3 tools/check_ptxas.py. Without nvcc it checks nothing."""

import re
import subprocess
import sys
from pathlib import Path

from find_cuda import find_cuda_home

ROOT = Path(__file__).resolve().parent.parent
INSTANCES = ROOT / "csrc" / "ops" / "attention" / "cuda" / "sm90" / "instances"
FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v"]


def findings(said: str) -> list[str]:
    """Lines of ptxas's report that must not be there."""
    wrong = []
    for line in said.splitlines():
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if re.search(r"\(C75\d\d\)", line) or (spilled and spilled.groups() != ("0", "0")):
            wrong.append(line.strip())
    return wrong


def main() -> int:
    home = find_cuda_home()
    if home is None:
        return 0
    wrong = []
    for path in sorted(INSTANCES.glob("*.cu")):
        command = [home / "bin" / "nvcc", *FLAGS, f"-I{ROOT / 'csrc'}", "-c", path, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True)
        said = done.stdout + done.stderr
        if done.returncode:
            sys.exit(said)
        wrong += [f"{path.name}: {line}" for line in findings(said)]
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
