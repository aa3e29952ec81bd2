"""Fails if ptxas serialises wgmma (warnings C75xx) or spills registers in attention's kernels of one architecture
(archs.py): python3 tools/check_ptxas.py. Reads what ptxas said in `make build`, and compiles what was not built from
these sources. Without nvcc it checks nothing.
"""

import re
import subprocess
import sys
from pathlib import Path

from archs import KERNELS, ONE_ARCH, only_arch
from build_checks import is_older_than_its_headers
from find_cuda import find_cuda_home

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas=-v"]


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
    arch = only_arch(str(source))
    for folder in ROOT.glob("build/temp.*"):
        kept = folder / source.relative_to(ROOT).with_suffix(".o.ptxas")
        if kept.exists() and not is_older_than_its_headers(kept, folder):
            said = kept.read_text()
            if f"for 'sm_{arch}'" in said:  # the library may be built for other GPUs
                return said
    gencode = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    command = [home / "bin" / "nvcc", *FLAGS, gencode, f"-I{ROOT / 'csrc'}", "-c", source, "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout + done.stderr


def main() -> int:
    home = find_cuda_home()
    if home is None:
        return 0
    sources = [source for name in ONE_ARCH for source in sorted((ROOT / KERNELS / name / "instances").glob("*.cu"))]
    wrong = [f"{source.name}: {line}" for source in sources for line in findings(report(source, home))]
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
