"""A wrapper of nvcc that chooses the architectures of each file: `python3 tools/nvcc.py nvcc <options>`.

A kernel instance of attention is compiled only for the architectures whose GPUs call it (tiers.h chooses by the size of
shared memory). If no asked architecture calls it, but a later minor version does, it is compiled to PTX. What ptxas
reports of the instances of one architecture (archs.py) stays beside their objects (.ptxas), for tools/check_ptxas.py.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

if not __package__:  # a program, not a module of setup.py, where tools/wheel.py would hide the package wheel
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.archs import only_arch

# Shared memory that a block may have, in KB, by compute capability. An architecture that is not here calls every
# instance.
SHARED_MEMORY = {"80": 163, "87": 163, "90": 227, "100": 227, "103": 227, "110": 227}
SHARED_MEMORY |= {"86": 99, "88": 99, "89": 99, "120": 99, "121": 99}
ANY = (99, 163, 227)
GENCODE = re.compile(r"-gencode=arch=compute_\w+,code=(sm|compute)_(\w+)")
RESOURCES = re.compile(r"ptxas info +: (?!\(C)| +\d+ bytes stack frame")  # -v says these; (C7510) comes without it


def callers(source: str) -> tuple[int, ...]:
    """The sizes of shared memory of the GPUs that call what this file holds, as tiles.h and tiers.h choose."""
    path = Path(source)
    if path.parent.name != "instances" or path.parent.parent.name != "sm80":
        return ANY
    if wide := re.fullmatch(r"forward_wide_smem(\d+)", path.stem):
        return (99,) if wide[1] == "99" else (163, 227)
    name = re.fullmatch(r"(forward|forward_resident|backward|backward_single)_(\d+)(?:_\d+)?(?:_smem(\d+))?", path.stem)
    if not name or name[1] == "forward":
        return ANY
    kind, head_dim, tier = name[1], int(name[2]), int(name[3] or 0)
    if kind == "forward_resident":
        return (227,)
    if head_dim == 64:  # 163 KB hold the tiles of tier 227, and 99 KB those of tier 163
        return ANY if kind == "backward_single" else (163, 227) if tier == 227 else (99,)
    if kind == "backward_single" and tier == 163 and head_dim < 256:
        return (163, 227)
    return (tier,)


def every_instance() -> bool:
    return os.environ.get("PACKING_OPS_EVERY_INSTANCE") == "1"


def wanted(arch: str, source: str) -> bool:
    """Whether GPUs of this architecture ("90a", "120") call what the file holds; PACKING_OPS_EVERY_INSTANCE=1: any
    may.
    """
    if only := only_arch(source):
        return arch == only
    number = arch.rstrip("af")
    if every_instance():
        return True
    return number not in SHARED_MEMORY or SHARED_MEMORY[number] in callers(source)


def sizes(archs: str) -> tuple[int, ...]:
    """Returns the sizes of shared memory of the GPUs that a library for TORCH_CUDA_ARCH_LIST is for: machine code runs
    on later minor versions too. Instances that none of them calls are left out.

    >>> sizes("9.0a"), sizes("8.0"), sizes("12.0+PTX")
    ((227,), (99, 163), (99, 163, 227))
    """
    asked = [tuple(map(int, re.findall(r"\d+", arch))) for arch in archs.split(";")]
    known = {tuple(map(int, (number[:-1], number[-1]))): size for number, size in SHARED_MEMORY.items()}
    if "PTX" in archs or not set(asked) <= set(known) or every_instance():
        return ANY
    return tuple(
        sorted({size for (major, minor), size in known.items() for a, b in asked if a == major and b <= minor})
    )


def ptx_of(arch: str) -> str:
    """The PTX that an image for ``arch`` is made of. What csrc asks of __CUDA_ARCH__ is 900 or not, so that there are
    two.
    """
    return "80" if int(arch.rstrip("af")) < 90 else "90"


def gencodes(asked: list[tuple[str, str]], source: str) -> list[str]:
    """Returns nvcc's options for a file. asked: ("sm" or "compute", architecture) of each -gencode."""
    only = only_arch(source)
    if only and ("sm", only) in asked:
        return [f"-gencode=arch=compute_{only},code=sm_{only}"]
    machine = [arch.rstrip("af") for kind, arch in asked if kind == "sm" and wanted(arch, source)]
    ptx = {ptx_of(arch) for kind, arch in asked if kind == "compute"}
    if not (machine or ptx):
        ptx.add(max(ptx_of(arch) for _, arch in asked))
    images = [(ptx_of(arch), f"sm_{arch}") for arch in machine]
    images += [(arch, f"compute_{arch}") for arch in sorted(ptx)]
    return [f"-gencode=arch=compute_{ptx},code={image}" for ptx, image in dict.fromkeys(images)]


def compile_and_report(command: list[str], built: str) -> NoReturn:
    """Shows what nvcc says, as for every file. Keeps ptxas's report, and beside it the list of headers, which ninja
    removes.
    """
    kept, listed = Path(f"{built}.ptxas"), Path(f"{built}.d")
    kept.unlink(missing_ok=True)
    done = subprocess.run([*command, "-Xptxas=-v"], stderr=subprocess.PIPE, text=True)
    if done.returncode == 0 and listed.exists():
        shutil.copy(listed, f"{kept}.d")
        kept.write_text(done.stderr)
    sys.stderr.writelines(line for line in done.stderr.splitlines(keepends=True) if not RESOURCES.match(line))
    sys.exit(done.returncode)


def main(arguments: list[str]) -> None:
    first = next((i for i, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    compiler, options = arguments[:first], arguments[first:]  # ccache may be in front of nvcc
    source = next((option for option in options if option.endswith(".cu")), "")
    asked = [match.groups() for match in map(GENCODE.fullmatch, options) if match]
    if source and asked:
        options = [*gencodes(asked, source), *(option for option in options if not GENCODE.fullmatch(option))]
        if "-o" in options and not any(option.startswith(("-M", "--generate-dep")) for option in options):
            options += ["-MMD", "-MF", f"{options[options.index('-o') + 1]}.d"]  # torch without CUDA asks for no list
    if Path(compiler[0]).name == "ccache":  # what it would preprocess itself has nothing of what __CUDA_ARCH__ guards
        os.environ.setdefault("CCACHE_DEPEND", "1")
    if only_arch(source) and "-o" in options:
        compile_and_report([*compiler, *options], options[options.index("-o") + 1])
    os.execvp(compiler[0], [*compiler, *options])


if __name__ == "__main__":
    main(sys.argv[1:])
