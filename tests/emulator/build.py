"""Compiles CUDA kernels for the CPU: python3 tests/emulator/build.py, with no library but Python's,
so that it runs while everything else is installed."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.find_cuda import find_cuda_home

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "emulator"
FAMILIES = {"attention": ["attention"], "hybrid": ["conv", "scan"]}  # of ops, by library
FLAGS = ["-std=c++20", "-w", "-fPIC", "-pthread", "-DPACKING_OPS_SM90"]
# No test transforms the scores (softcap) of these: of 96 columns; of sm80's forward and backward in float16, or of 192
# and 256 columns; of its backward of one tile with the least shared memory.
NOT_TESTED = re.compile(
    r"template (void run_(?:\w+<\w+, 96, (?:[^()]*\([^()]*\), |\w+, )?true(?!, false)"
    r"|(?:forward|backward)<(?:__half, (?:64|128|192|256)|\w+, (?:192|256)), (?:true, |false, )?true(?!, false)"
    r"|backward_single<\w+, (?:192|256), .*, true, SmemTier::k99KB).*\));"
)
TOGETHER = 4  # units of instances: each instantiates what they share
OPTIMISED = "-Og"  # -O1 would cost more time here than tests then save
PRECOMPILED = ["cuda_bf16.h", "cuda_fp16.h", "array"]  # with emulator.h; each unit would read them for half a second
FULLY_OPTIMISED = [HERE / "emulator.cpp", HERE / "products.cpp"]  # tests spend half of their time in these


def cuda_headers() -> Path | None:
    """include/ of the toolkit that the library is built with."""
    home = find_cuda_home()
    headers = home / "include" if home else None
    return headers if headers and (headers / "cuda_bf16.h").exists() else None


def for_the_emulator(source: str) -> str:
    """CUDA's syntax as C++."""
    dynamic = "uint8_t* const shared = emulator::shared;"
    source = re.sub(r"extern __shared__ [^;]*\bshared\[\];", dynamic, source)
    static = r"static const emulator::SharedVariable<\1\3> \2_of_blocks; auto& \2 = \2_of_blocks.here();"
    source = re.sub(r"__shared__ ([^;]+?) (\w+)((?:\[[^\]]*\])*);", static, source)
    source = re.sub(r"__grid_constant__ const (\w+) ", r"const \1& ", source)
    source = NOT_TESTED.sub(
        r'template <> \1 { throw std::logic_error("left out by tests/emulator/build.py"); }', source
    )
    source = source.replace("defined(__CUDA_ARCH_FEAT_SM90_ALL)", "1")
    return re.sub(r"(\w+(?:<[\w, ]+>)?)<<<(.*?)>>>\(", r"emulator::launch(\1, \2)(", source)


def compiled(headers: Path, name: str) -> Path:
    """The shared library of some FAMILIES, made once for each state of the sources, by whichever process comes
    first.
    """
    folders = ["core", *(f"ops/{family}" for family in FAMILIES[name])]
    sources = sorted(path for folder in folders for path in (ROOT / "csrc" / folder).rglob("*.*"))
    sources = [path for path in sources if path.suffix in (".h", ".cuh", ".cu")]
    ours = [path for path in sorted(HERE.iterdir()) if path.is_file()]
    state = hashlib.sha256(b"".join(path.read_bytes() for path in (*sources, *ours))).hexdigest()
    library = BUILD / name / f"{name}-{state[:16]}.so"
    BUILD.mkdir(exist_ok=True, parents=True)
    with (BUILD / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            shutil.rmtree(library.parent, ignore_errors=True)
            compile_into(library, sources, headers)
    return library


def compile_into(library: Path, sources: list[Path], headers: Path) -> None:
    folder = library.parent
    for path in sources:
        copy = folder / path.relative_to(ROOT / "csrc")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(for_the_emulator(path.read_text()))
    for path in HERE.glob("*.cuh"):
        shutil.copy(path, folder / "core" / "ptx" / path.name)
    instances = sorted(folder.glob("ops/attention/cuda/*/instances/*.cu"))
    units = [folder / f"instances_{i}.cpp" for i in range(TOGETHER)] if instances else []
    for i, unit in enumerate(units):
        unit.write_text("".join(f'#include "{path.relative_to(folder)}"\n' for path in instances[i::TOGETHER]))
    units += [path for path in folder.glob("ops/**/*.cu") if path not in instances]
    units += [folder / "core" / "launch.cu", HERE / f"{folder.name}.cpp", *FULLY_OPTIMISED]
    compiler = [*([shutil.which("ccache")] if shutil.which("ccache") else []), os.environ.get("CXX", "c++")]
    first = folder / "first.h"
    first.write_text("".join(f'#include "{header}"\n' for header in (HERE / "emulator.h", *PRECOMPILED)))
    includes = [f"-I{folder}", f"-I{headers}"]
    if len(compiler) == 1:  # ccache knows no precompiled headers
        made = ["-x", "c++-header", first, "-o", folder / "first.h.gch"]
        subprocess.run([*compiler, *FLAGS, OPTIMISED, *includes, *made], check=True)

    def compile_one(unit: Path) -> Path:
        target = folder / f"{'_'.join(unit.relative_to(ROOT).with_suffix('').parts)}.o"
        options = (
            ["-O3", "-include", HERE / "emulator.h"] if unit in FULLY_OPTIMISED else [OPTIMISED, "-include", first]
        )
        made = ["-x", "c++", "-c", unit, "-o", target]
        subprocess.run([*compiler, *FLAGS, *options, *includes, *made], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, units))
    # Bsymbolic: the CUDA runtime that torch may have loaded has functions of the same names.
    whole = library.with_suffix(".whole")
    subprocess.run([*compiler[-1:], "-shared", "-pthread", "-Wl,-Bsymbolic", *objects, "-o", whole], check=True)
    whole.rename(library)


if __name__ == "__main__":
    found = cuda_headers()
    if found:
        for library in FAMILIES:
            compiled(found, library)
