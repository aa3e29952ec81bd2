"""The folders of attention's kernels that are compiled for one architecture alone. A new one is a line here."""

import re
from pathlib import Path

KERNELS = Path("csrc", "ops", "attention", "cuda")
# {folder in KERNELS: what nvcc calls its architecture}. "a": its instructions are of no later one.
ONE_ARCH = {"sm90": "90a"}
# {(folder, head_dim of an instance): other head_dims that it serves}.
ALSO_SERVES = {("sm90", "128"): (96,)}


def compute_capability(arch: str) -> str:
    """Returns the architecture as TORCH_CUDA_ARCH_LIST names it.

    >>> compute_capability("90a")
    '9.0a'
    """
    digits = arch.rstrip("af")
    return f"{digits[:-1]}.{digits[-1]}{arch[len(digits) :]}"


def only_arch(source: str) -> str | None:
    """Returns the architecture that an instance is compiled for, None where any may be.

    >>> only_arch("csrc/ops/attention/cuda/sm90/instances/forward_64.cu")
    '90a'
    """
    parts = Path(source).parts
    return ONE_ARCH.get(parts[-3]) if parts[-2:-1] == ("instances",) else None


def macros(archs: str) -> list[str]:
    """Returns the compilers' definitions for TORCH_CUDA_ARCH_LIST: which of these folders are in the library.

    >>> macros("8.0;9.0a")
    ['-DPACKING_OPS_SM90']
    """
    asked = archs.split(";")
    return [f"-DPACKING_OPS_{name.upper()}" for name, arch in ONE_ARCH.items() if compute_capability(arch) in asked]


def is_asked(source: str, asked: tuple[int, ...]) -> bool:
    """Returns whether a source file is needed for one of the head_dims in ``asked``. Where v has another head_dim, that
    of q and k counts.
    """
    path = Path(source)
    name = path.stem.replace("_wide", "_512")
    number = re.search(r"_(\d+)(?:_\d+)?(?:_smem\d+)?$", name) if path.parent.name == "instances" else None
    if number is None:
        return True
    serves = {int(number[1]), *ALSO_SERVES.get((path.parent.parent.name, number[1]), ())}
    return bool(serves & set(asked))
