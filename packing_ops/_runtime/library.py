"""Finds the compiled library, loads it and says what it is; or why it is missing."""

import json
import re
import struct
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

import torch

from packing_ops._runtime import driver

VERSION = "0.2.0"  # pyproject.toml and setup.py read it here
PACKAGE = Path(__file__).parents[1]
BUILD_COMMAND = "pip install .   (in a clone: python setup.py build_ext --inplace)"
# Of csrc/schema.cpp: what this package calls.
OPS = """
    build_info attention_kernels
    cu_seqlens_from_lengths position_ids_from_cu_seqlens seq_idx_from_cu_seqlens cu_seqlens_from_position_ids
    prompt_end_indices mask_boundary_labels mask_boundary_labels_shifted_ shift_labels segment_sum segment_sum_backward
    router_sums gae count_target_tokens block_causal_mask check_documents checked_documents check_unchanged
    unpad_layout trim_padding_range unpad_rows gather_rows gather_rows_many scatter_rows scatter_rows_many
    pack_sequences pack_ffd pack_prefix_tree
    rope_qk rope_qk_
    causal_conv1d causal_conv1d_backward
    gated_delta_rule gated_delta_rule_backward mamba2_scan mamba2_scan_backward
    mamba2_gate mamba2_gate_backward
    attention_plan varlen_attention varlen_attention_backward prefix_paths prefix_attention prefix_attention_backward
    paged_attention_plan paged_attention
    logps_targets logps_rows logps_allowed logps_allowed_mask logps_chunk_ logps_chunk_backward_ mm_by_rows_
    token_logps token_logps_backward token_logps_backward_
    kl_rows kl_chunk_backward_ kl_scale_kept_ token_kl token_kl_backward
"""


def _find_library() -> tuple[Path, str]:
    """Find the library, and return it and its origin. Inside a clone, which hides the installed package, it is the
    installed one's.
    """
    own, found = PACKAGE / "_C.so", []
    for distribution in () if own.exists() else metadata.distributions(name="packing_ops"):  # in sys.path's order
        found.append(Path(str(distribution.locate_file("packing_ops/_C.so"))).absolute())
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            found.append(Path(unquote(urlsplit(origin["url"]).path), "packing_ops", "_C.so"))
    installed = next((library for library in found if library.exists()), None)
    return (
        (own, "this package") if installed is None else (installed, f"the installed packing_ops, as {PACKAGE} has none")
    )


LIBRARY, LIBRARY_FROM = _find_library()


def why_missing() -> str:
    """Return why there is no library to load, or an empty string."""
    if not sys.platform.startswith("linux"):
        return f"packing_ops: its compiled library runs on Linux only, and this is {sys.platform}"
    if not LIBRARY.exists():
        return f"packing_ops: no compiled library at {LIBRARY}; build it with: {BUILD_COMMAND}"
    return ""


def named_arguments(name: str) -> Callable[[tuple[Any, ...]], SimpleNamespace]:
    """Return what binds an op's arguments to their names in csrc/schema.cpp, those left out to their defaults."""
    arguments = getattr(torch.ops.packing_ops, name).default._schema.arguments
    names = [argument.name for argument in arguments]
    defaults = [argument.default_value for argument in arguments]  # torch strips what equals its default
    return lambda args: SimpleNamespace(**dict(zip(names, [*args, *defaults[len(args) :]], strict=True)))


def load_library() -> frozenset[str]:
    """Register ``torch.ops.packing_ops``; return the ops that have no CUDA kernel. Raises ImportError with the path
    and the build command.
    """
    try:
        # Check the size against the ELF header: loading a truncated .so kills the process instead of raising.
        with LIBRARY.open("rb") as file:
            header = file.read(64)
        whole = header[:4] == b"\x7fELF" and len(header) == 64
        if whole:
            (sections,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
            whole = sections + size * count <= LIBRARY.stat().st_size
        if not whole:
            raise OSError("not a whole ELF library")
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        why = error.__cause__ or error  # the loader's message; since 2.13 torch's names only the file
        raise ImportError(
            f"packing_ops: {LIBRARY} does not load in torch {torch.__version__}: {why}; "
            f"build it again with: {BUILD_COMMAND}"
        ) from error
    if build_info()["version"] != VERSION:
        raise ImportError(
            f"packing_ops: {PACKAGE} is version {VERSION}, and the library that was found for it is version "
            f"{build_info()['version']}, {LIBRARY}; build it again with: {BUILD_COMMAND}"
        )
    _check_ops()
    return _explain_missing_cuda_kernels()


def _check_ops() -> None:
    """Check that the library has every op: one of the same version may be built from older sources."""
    found = set(op_names())
    if missing := [name for name in OPS.split() if name not in found]:
        raise ImportError(
            f"packing_ops: {LIBRARY} is of other sources than {PACKAGE}, though both are version {VERSION}: it has no "
            f"{', '.join(missing)}; build it again with: {BUILD_COMMAND}"
        )


def build_info() -> dict[str, str]:
    """Return what the compiled library was built from, and its path.

    Returns:
        dict with ``version``, ``built_with_torch``, ``compiler``, ``cuda`` (toolkit version, "" for a CPU-only
        library), ``cuda_archs``, ``attention_kernels`` (those compiled in, such as "cpu, fp32, sm80";
        select_attention_backend says which serve a call), ``torch`` (the running one), ``library`` (path) and
        ``library_from``: "this package", or "the installed packing_ops, ..." inside a clone that was not built in
        place.

    Example:
        >>> build_info()["version"]
        '0.2.0'

    Raises:
        ImportError: there is no library.
    """
    if MISSING:
        raise ImportError(MISSING)
    info = dict(entry.split("=", 1) for entry in torch.ops.packing_ops.build_info().split("|"))
    return {**info, "torch": torch.__version__, "library": str(LIBRARY), "library_from": LIBRARY_FROM}


def op_names() -> list[str]:
    """Return every op that the library registers, without its namespace."""
    prefix = "packing_ops::"
    names = (schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(prefix))
    return sorted(name.removeprefix(prefix) for name in names)


# Python loops over other ops and matmuls; losses/op.py registers them for every device.
IN_PYTHON = {"prefix_attention", "prefix_attention_backward"}
IN_PYTHON |= {"token_logps", "token_logps_backward", "token_logps_backward_", "token_kl", "token_kl_backward"}
IN_PYTHON |= {"router_sums"}
WITHOUT_TENSORS = {"build_info", "attention_kernels"}
_fallbacks = torch.library.Library("packing_ops", "IMPL", "CUDA")


def _explain_missing_cuda_kernels() -> frozenset[str]:
    """Register a kernel that raises one sentence for ops without a CUDA kernel, in place of the dispatcher's page of
    backends.
    """
    built_for_cuda = bool(build_info()["cuda"])
    lacking = frozenset(
        name
        for name in {*op_names()} - WITHOUT_TENSORS - IN_PYTHON
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"packing_ops::{name}", "CUDA")
    )
    for name in lacking:
        why = "not written yet" if built_for_cuda else f"this library was built without CUDA; {BUILD_COMMAND}"

        def missing(*args: object, _name: str = name, _why: str = why, **kwargs: object) -> NoReturn:
            raise NotImplementedError(f"packing_ops::{_name} has no CUDA kernel: {_why}")

        _fallbacks.impl(name, missing)
    return lacking


def built_as() -> str:
    """Return "wheel" and its platform for a library that was built for every machine, "source" for one that was
    built here.
    """
    for distribution in metadata.distributions(name="packing_ops"):
        if Path(str(distribution.locate_file("packing_ops/_C.so"))).absolute() == LIBRARY:
            tag = re.search(r"^Tag: \S+-(manylinux\S+)$", distribution.read_text("WHEEL") or "", re.M)
            return f"wheel, {tag[1]}" if tag else "source"
    return "source"


def warn_of_gpu() -> None:
    """Warn of a GPU that the library does not serve, at the import rather than at the first CUDA tensor."""
    # device_count asks NVML: CUDA is not started, which a process that is forked later could not use then.
    if not torch.version.cuda or torch.cuda.device_count() == 0:
        return
    toolkit = build_info()["cuda"]
    told = (
        driver.misfit(toolkit)
        if toolkit
        else (
            f"packing_ops: torch sees a GPU, but {LIBRARY} was built without CUDA kernels; where nvcc is installed, "
            f"build it again with: {BUILD_COMMAND}"
        )
    )
    if told:
        warnings.warn(told, stacklevel=4)  # whoever imports packing_ops


def _asks_for_info() -> bool:
    """Return whether this process is ``python -m packing_ops info`` or ``packing-ops info``, which reports what is
    wrong with a library.
    """
    script = Path(sys.argv[0]).name if sys.argv else ""
    return sys.argv[1:2] == ["info"] and (
        script == "packing-ops" or (script == "-m" and "packing_ops" in sys.orig_argv)
    )


# Without a library the import goes on: packing_ops.data works without it, and every other op says what is missing
# (_runtime/gate.py). A library that is there and does not load is an error of the import.
MISSING, NOT_LOADED = why_missing(), False
without_cuda_kernel: frozenset[str] = frozenset()
if not MISSING:
    try:
        without_cuda_kernel = load_library()
    except ImportError as error:
        if not _asks_for_info():
            raise
        MISSING, NOT_LOADED = " ".join(str(error).split()), True
    else:
        warn_of_gpu()
