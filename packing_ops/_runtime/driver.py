"""Whether NVIDIA's driver is new enough for a library that was built with some CUDA toolkit. CUDA is not started."""

import ctypes
import functools
import re
from pathlib import Path

VERSION_FILE = Path("/proc/driver/nvidia/version")
# The oldest driver of each line of toolkits: all toolkits of a line run on it.
OLDEST = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


@functools.cache
def cuda_of_driver() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver runs; None without a driver."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def found() -> str:
    """Describe this machine's driver, "570.124.06, for CUDA 12.8"; an empty string without one."""
    cuda = cuda_of_driver()
    text = VERSION_FILE.read_text() if VERSION_FILE.exists() else ""
    number = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    parts = [number[0]] if number else []
    return ", ".join(parts + ([f"for CUDA {cuda[0]}.{cuda[1]}"] if cuda else []))


def needed(toolkit: str) -> str:
    """Return the driver that a library of this toolkit ("12.4") needs: "525.60.13 or later (CUDA 12)"."""
    major = int(toolkit.partition(".")[0])
    return f"{OLDEST[major]} or later (CUDA {major})" if major in OLDEST else f"one for CUDA {major}"


def misfit(toolkit: str) -> str:
    """Say what to do about a driver that is too old for the library; return an empty string if it is not."""
    cuda = cuda_of_driver()
    if cuda is None or cuda[0] >= int(toolkit.partition(".")[0]):
        return ""
    return (
        f"packing_ops: it was built with CUDA {toolkit}, which needs NVIDIA driver {needed(toolkit)}; the driver here "
        f"is {found()}. Install a newer driver, or a wheel that was built with CUDA {cuda[0]}, or build it from source "
        "with the "
        f"CUDA {cuda[0]} toolkit: CUDA_HOME=/path/to/cuda-{cuda[0]} pip install --no-binary packing_ops packing_ops"
    )
