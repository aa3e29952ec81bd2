"""Builds packing_ops/_C.so: C++ always, CUDA where it can run (or where FORCE_CUDA=1 asks for it)."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
NO_TORCH = """packing_ops builds against the torch that you train with, and no torch was found here.
  no torch yet:  install it first, then `pip install .`
  uv:            uv pip install --no-build-isolation .   (uv builds in an environment of its own)"""

# Every architecture the kernels support, for builds where no GPU is visible (containers, CI).
PORTABLE_ARCHS = "8.0;8.6;8.9;9.0;10.0;12.0+PTX"
DEFINES = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA", f'-DPACKING_OPS_VERSION="{VERSION}"']
CXX_FLAGS = ["-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]
NVCC_FLAGS = ["-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fvisibility=hidden"]
# torch turns the half types' own operators off; we include no torch header in .cu files, so we may have them.
NVCC_FLAGS += [
    f"-U__CUDA_NO_{t}__" for t in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS")
]
LINK_FLAGS = ["-Wl,--as-needed", "-Wl,--exclude-libs,ALL"]


def import_torch():
    """torch of the environment that we are being installed into, also from inside pip's build environment."""
    try:
        import torch
    except ImportError:
        sys.path.append(sysconfig.get_path("platlib"))
        try:
            import torch
        except ImportError:
            sys.exit(NO_TORCH)
    return torch


def find_cuda_home():
    """The toolkit's root: CUDA_HOME, CUDA_PATH, or what nvcc itself says (nvcc on PATH may be a wrapper)."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            return Path(os.environ[name])
    if not shutil.which("nvcc"):
        return None
    dryrun = subprocess.run(["nvcc", "--dryrun", "x.cu"], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", dryrun, re.M)
    return Path(top[1].strip()).resolve() if top else None


def cuda_version(home):
    nvcc = subprocess.run([str(home / "bin" / "nvcc"), "--version"], capture_output=True, text=True).stdout
    return re.search(r"release (\d+\.\d+)", nvcc)[1]


def cuda_wanted(torch, home):
    if os.environ.get("FORCE_CUDA") == "1":
        if home is None:
            sys.exit("FORCE_CUDA=1: no CUDA toolkit found; set CUDA_HOME or put nvcc on PATH")
        return True
    if home is None or torch.version.cuda is None:
        why = "no CUDA toolkit (nvcc) was found" if torch.version.cuda else "this torch is a CPU build"
        print(f"packing_ops: building the CPU library only: {why}; FORCE_CUDA=1 overrides", flush=True)
        return False
    return True


def sources(*suffixes):
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in suffixes)


def drop_stale_cuda_objects():
    """A CPU build of torch writes ninja rules that do not see the headers of .cu files."""
    newest = max((ROOT / header).stat().st_mtime for header in sources(".h", ".cuh"))
    for source in sources(".cu"):
        for built in ROOT.glob(f"build/temp.*/{Path(source).with_suffix('.o')}"):
            if built.stat().st_mtime < newest:
                built.unlink()


def extension():
    torch = import_torch()
    from torch.utils import cpp_extension

    home = find_cuda_home()
    define, libraries, library_dirs, include_dirs = list(DEFINES), [], [], [str(ROOT / "csrc")]
    cxx, nvcc, files = list(CXX_FLAGS), list(NVCC_FLAGS), sources(".cpp")
    if cuda_wanted(torch, home):
        if "TORCH_CUDA_ARCH_LIST" not in os.environ and not torch.cuda.is_available():
            os.environ["TORCH_CUDA_ARCH_LIST"] = PORTABLE_ARCHS
        cpp_extension.CUDA_HOME = str(home)  # a CPU build of torch leaves it None
        if torch.version.cuda is None:
            drop_stale_cuda_objects()
        archs = os.environ.get("TORCH_CUDA_ARCH_LIST", "of the visible GPUs").replace(" ", ";")
        define += [f'-DPACKING_OPS_WITH_CUDA="{cuda_version(home)}"', f'-DPACKING_OPS_CUDA_ARCHS="{archs}"']
        files += sources(".cu")
        include_dirs += [str(home / "include"), str(home / "include" / "cccl")]
        library_dirs = [str(home / d) for d in ("lib64", "lib", "targets/x86_64-linux/lib")]
        libraries = ["cudart_static", "dl", "rt", "pthread"]
    return cpp_extension.CppExtension(
        "packing_ops._C",
        files,
        include_dirs=include_dirs,
        library_dirs=library_dirs,
        libraries=libraries,
        extra_compile_args={"cxx": define + cxx, "nvcc": define + nvcc},
        extra_link_args=LINK_FLAGS,
        depends=sources(".h", ".cuh"),
        py_limited_api=True,
    ), cpp_extension.BuildExtension.with_options(no_python_abi_suffix=True)


if __name__ == "__main__":  # also where pip runs it; tests import find_cuda_home
    if {"sdist", "egg_info", "dist_info"} & set(sys.argv) and not {"build_ext", "bdist_wheel"} & set(sys.argv):
        setup()
    else:
        module, build_ext = extension()
        setup(ext_modules=[module], cmdclass={"build_ext": build_ext})
