"""Loads the compiled library and says what it is."""

import struct
import sys
from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("_C.so")
BUILD_COMMAND = "pip install .   (in a clone: python setup.py build_ext --inplace)"


def load_library() -> None:
    """Register ``torch.ops.packing_ops``. Raises ImportError with the path and the build command."""
    if not sys.platform.startswith("linux"):
        raise ImportError(f"packing_ops: runs on Linux only, and this is {sys.platform}")
    if not LIBRARY.exists():
        raise ImportError(f"packing_ops: no compiled library at {LIBRARY}; build it with: {BUILD_COMMAND}")
    try:
        _check_whole(LIBRARY)
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"packing_ops: {LIBRARY} does not load in torch {torch.__version__}: {error}; "
            f"build it again with: {BUILD_COMMAND}"
        ) from error
    _explain_missing_cuda_kernels()


def _check_whole(library: Path) -> None:
    """A copy that was cut short makes the loader crash the process instead of failing; the ELF header tells."""
    with library.open("rb") as file:
        header = file.read(64)
    if header[:4] == b"\x7fELF" and len(header) == 64:
        (sections,) = struct.unpack_from("<Q", header, 40)
        size, count = struct.unpack_from("<HH", header, 58)
        if sections + size * count <= library.stat().st_size:
            return
    raise OSError("not a whole ELF library")


def build_info() -> dict:
    """What the compiled library was built from.

    Returns:
        dict with ``version``, ``built_with_torch``, ``compiler``, ``cuda`` (toolkit version, "" for a CPU-only
        library), ``cuda_archs``, ``torch`` (the running one) and ``library`` (path).

    Example:
        >>> packing_ops.build_info()["version"]
        '0.1.0'
    """
    info = dict(entry.split("=", 1) for entry in torch.ops.packing_ops.build_info().split("|"))
    return {**info, "torch": torch.__version__, "library": str(LIBRARY)}


def op_names() -> list[str]:
    """Every op that the library registers, without its namespace."""
    prefix = "packing_ops::"
    names = (schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(prefix))
    return sorted(name.removeprefix(prefix) for name in names)


def has_cuda_kernel(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"packing_ops::{name}", "CUDA")


# Loops over other ops and products of torch: logps.py registers them for every device.
IN_PYTHON = {"token_logps", "token_logps_backward"}
without_cuda_kernel: set[str] = set()
_fallbacks = torch.library.Library("packing_ops", "IMPL", "CUDA")


def _explain_missing_cuda_kernels() -> None:
    """An op without a CUDA kernel says so itself, instead of the dispatcher's page of backends."""
    built_for_cuda = bool(build_info()["cuda"])
    for name in op_names():
        if name == "build_info" or name in IN_PYTHON or has_cuda_kernel(name):
            continue
        without_cuda_kernel.add(name)
        why = "not written yet" if built_for_cuda else f"this library was built without CUDA; {BUILD_COMMAND}"

        def missing(*args, _name=name, _why=why, **kwargs):
            raise NotImplementedError(f"packing_ops::{_name} has no CUDA kernel: {_why}")

        _fallbacks.impl(name, missing)


load_library()
