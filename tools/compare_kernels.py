"""Compares the machine code of every CUDA kernel of two states of csrc: python3 tools/compare_kernels.py BEFORE AFTER
[NAME]. Each is a csrc folder; NAME: only sources whose path has it. For changes that must not change a kernel.
"""

import os
import re
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from archs import ONE_ARCH, compute_capability, macros
from find_cuda import find_cuda_home

ARCH = list(ONE_ARCH.values())[-1]
FLAGS = [
    "-std=c++20",
    "-O3",
    "--expt-relaxed-constexpr",
    *macros(compute_capability(ARCH)),
    f"-arch=sm_{ARCH}",
    "-cubin",
]


def kernels(cubin: bytes) -> dict[str, bytes]:
    """{section: its bytes} of machine code and constants in a 64-bit ELF file; a kernel's is .text.<its mangled
    name>.
    """
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    # name, type, flags, address, offset, bytes, link, info (of a kernel's: its registers), alignment, entry bytes
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    start = headers[names][4]
    found = {}
    for name, kind, _, _, offset, length, _, _, _, _ in headers:
        label = cubin[start + name : cubin.index(b"\0", start + name)].decode()
        label = re.sub(r"\d+_GLOBAL__N__\w{8}_\d+_\w+?_cu_\w{8}", "anonymous", label)  # has a hash of the file's path
        if label.startswith((".text.", ".nv.constant", ".nv.info.", ".nv.shared.")):
            found[label] = b"" if kind == 8 else cubin[offset : offset + length]  # 8: without bytes in the file
    return found


def compiled(csrc: Path, part: str) -> dict[tuple[str, str], bytes]:
    nvcc = find_cuda_home() / "bin" / "nvcc"

    def compile_one(path: Path) -> dict[tuple[str, str], bytes]:
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernels.cubin"
            subprocess.run([nvcc, *FLAGS, f"-I{csrc}", path, "-o", cubin], check=True)
            found = kernels(cubin.read_bytes())
        return {(str(path.relative_to(csrc)), label): code for label, code in found.items()}

    paths = sorted(path for path in csrc.rglob("*.cu") if part in str(path.relative_to(csrc)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {label: code for found in pool.map(compile_one, paths) for label, code in found.items()}


def main(before: str, after: str, part: str = "") -> int:
    old, new = (compiled(Path(folder).resolve(), part) for folder in (before, after))
    different = sorted(label for label in {*old, *new} if old.get(label) != new.get(label))
    for path, label in different:
        print(f"{path}: {label} differs")
    count = sum(label.startswith(".text.") for _, label in old)
    print(
        f"{count} kernels before, {sum(label.startswith('.text.') for _, label in new)} after, {len(different)} differ"
    )
    return 1 if different or not count else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
