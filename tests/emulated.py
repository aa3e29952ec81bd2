"""The CUDA kernels of attention on the CPU: their own source, compiled for the emulator in tests/emulator."""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from setup import find_cuda_home

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "tests" / "emulator"
BUILD = ROOT / "build" / "emulator"
DTYPES = {torch.bfloat16: 6, torch.float16: 7, torch.float32: 8}  # csrc/core/dtype.h
GPUS = ["sm_90", "sm_80", "sm_89"]  # emulator.cpp's: what differs is the shared memory of a block


def cuda_headers() -> Path | None:
    """include/ of the toolkit that the library is built with."""
    home = find_cuda_home()
    headers = home / "include" if home else None
    return headers if headers and (headers / "cuda_bf16.h").exists() else None


def for_the_emulator(source: str) -> str:
    """CUDA's own syntax as C++."""
    source = source.replace("extern __shared__", "extern __thread")
    return re.sub(r"(\w+(?:<[\w, ]+>)?)<<<(.*?)>>>\(", r"emulator::launch(\1, \2)(", source)


def compiled(headers: Path) -> Path:
    """The shared library, made once for each state of the sources."""
    sources = sorted(path for folder in ("core", "ops/attention") for path in (ROOT / "csrc" / folder).rglob("*.*"))
    sources = [path for path in sources if path.suffix in (".h", ".cuh", ".cu")]
    state = hashlib.sha256(b"".join(path.read_bytes() for path in (*sources, *sorted(HERE.iterdir())))).hexdigest()
    library = BUILD / f"attention-{state[:16]}.so"
    if library.exists():
        return library
    shutil.rmtree(BUILD, ignore_errors=True)
    for path in sources:
        copy = BUILD / path.relative_to(ROOT / "csrc")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(for_the_emulator(path.read_text()))
    shutil.copy(HERE / "mma.cuh", BUILD / "core" / "ptx" / "mma.cuh")
    units = [path for path in BUILD.glob("ops/attention/**/*.cu")] + [HERE / "attention.cpp", HERE / "emulator.cpp"]
    compiler = [*([shutil.which("ccache")] if shutil.which("ccache") else []), os.environ.get("CXX", "c++")]

    def compile_one(unit: Path) -> Path:
        target = BUILD / f"{unit.stem}.o"
        command = [
            *compiler,
            "-x",
            "c++",
            "-std=c++20",
            "-O1",
            "-w",
            "-fPIC",
            "-pthread",
            "-c",
            str(unit),
            "-o",
            str(target),
        ]
        command += ["-include", str(HERE / "emulator.h"), f"-I{BUILD}", f"-I{headers}"]
        subprocess.run(command, check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(target) for target in pool.map(compile_one, units)]
    # Bsymbolic: the CUDA runtime that torch may have loaded has functions of the same names.
    subprocess.run([*compiler[-1:], "-shared", "-pthread", "-Wl,-Bsymbolic", *objects, "-o", str(library)], check=True)
    return library


@functools.cache
def library(headers: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(compiled(headers)))
    loaded.emulated_attention.restype = ctypes.c_char_p
    loaded.emulated_plan_size.argtypes = [ctypes.c_int64] * 4
    loaded.emulated_plan_size.restype = ctypes.c_int64
    return loaded


def attention(
    case, headers: Path, gpu: str, *, late_copies: bool, seed: int, planned_for: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """out, lse and every gradient of an attention_case.Case, by the kernels that run on ``gpu``.

    planned_for: other cu_seqlens that the plan is made of.
    """
    window = case.options.get("window_size", (-1, -1))
    causal = case.options.get("causal", True)
    (total_q, heads, dim), (total_k, kv_heads, _) = case.q.shape, case.k.shape
    sizes = [total_q, total_k, len(case.cu_seqlens[0]) - 1, heads, kv_heads, dim]
    sizes += [window[0], 0 if causal else window[1], DTYPES[case.q.dtype], GPUS.index(gpu)]
    scale = case.options.get("softmax_scale")
    options = [dim**-0.5 if scale is None else scale, case.options.get("softcap", 0.0)]
    lse = torch.empty(heads, total_q)
    dsinks = None if case.sinks is None else torch.empty(heads)
    results = {
        "out": torch.empty_like(case.q),
        "lse": lse,
        "dq": torch.empty_like(case.q),
        "dk": torch.empty_like(case.k),
        "dv": torch.empty_like(case.v),
        "dsinks": dsinks,
    }
    inputs = [case.q, case.k.contiguous(), case.v.contiguous(), case.dout, *case.cu_seqlens, case.sinks, case.dlse]
    tensors = [*inputs, *results.values(), planned_for]
    pointers = (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
    code = library(headers)
    code.emulator_configure(GPUS.index(gpu), late_copies, seed)
    error = code.emulated_attention((ctypes.c_int64 * len(sizes))(*sizes), (ctypes.c_double * 2)(*options), pointers)
    if error:
        raise RuntimeError(error.decode())
    return {name: value for name, value in results.items() if value is not None}
