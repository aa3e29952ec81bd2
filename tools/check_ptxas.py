"""Fails if ptxas serialises wgmma instructions of attention's Hopper kernels (warnings C75xx) or spills registers:
python3 tools/check_ptxas.py. Reads what ptxas said in `make build`, and compiles what was not built from these sources.
Without nvcc it checks nothing."""

import re
import subprocess
import sys
from pathlib import Path

from build_checks import is_older_than_its_headers
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


def report(source: Path, home: Path) -> str:
    """What ptxas says of an instance. tools/nvcc.py keeps it beside the object."""
    for folder in ROOT.glob("build/temp.*"):
        kept = folder / source.relative_to(ROOT).with_suffix(".o.ptxas")
        if kept.exists() and not is_older_than_its_headers(kept, folder):
            said = kept.read_text()
            if "for 'sm_90a'" in said:  # the library may be built for other GPUs
                return said
    command = [home / "bin" / "nvcc", *FLAGS, f"-I{ROOT / 'csrc'}", "-c", source, "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout + done.stderr


def main() -> int:
    home = find_cuda_home()
    if home is None:
        return 0
    sources = sorted(INSTANCES.glob("*.cu"))
    wrong = [f"{source.name}: {line}" for source in sources for line in findings(report(source, home))]
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
