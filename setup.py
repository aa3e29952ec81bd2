"""Builds packing_ops/_C.so: the CPU kernels, and the CUDA kernels if cuda_wanted says so."""

import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_py import build_py
from setuptools.errors import CCompilerError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # pip runs this file without its folder on sys.path

from tools import build_checks as checks  # noqa: E402
from tools.archs import is_asked, macros  # noqa: E402
from tools.build_progress import progress  # noqa: E402
from tools.find_cuda import archs_to_build, cuda_version, find_cuda_home, nvcc_of_each_file  # noqa: E402
from tools.nvcc import ANY, callers, sizes  # noqa: E402
from tools.units import longest_first, units  # noqa: E402

# A read-only source tree is built in a temporary folder.
BUILD = ROOT / "build" if os.access(ROOT, os.W_OK) else Path(tempfile.mkdtemp(prefix="packing_ops-"))
LOG = BUILD / "build.log"
VERSION = re.search(r'^VERSION = "(.+?)"', (ROOT / "packing_ops" / "_runtime" / "library.py").read_text(), re.M)[1]
CXX_FLAGS = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA", f'-DPACKING_OPS_VERSION="{VERSION}"']
CXX_FLAGS += ["-O3", "-std=c++20", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]
NVCC_FLAGS = ["-O3", "-std=c++20", "--expt-relaxed-constexpr", "-Xcompiler=-fvisibility=hidden"]
NVCC_FLAGS += ["-Xfatbin=-compress-all"]  # a third of the size; every driver expands it
# torch turns the half types' own operators off; we include no torch header in .cu files, so we may have them.
NVCC_FLAGS += [
    f"-U__CUDA_NO_{t}__" for t in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS")
]
LINK_FLAGS = ["-Wl,--as-needed", "-Wl,--exclude-libs,ALL"]


def cuda_wanted(torch, home):
    """FORCE_CUDA decides; without it CUDA is built where nvcc is found and torch is a CUDA build."""
    forced = os.environ.get("FORCE_CUDA", "").strip()
    if forced not in ("", "0", "1"):
        sys.exit(f"packing_ops: FORCE_CUDA: expected 0 or 1, got {forced!r}")
    if forced == "1" and home is None:
        sys.exit("packing_ops: FORCE_CUDA=1: no CUDA toolkit found; set CUDA_HOME or put nvcc on PATH")
    why = "FORCE_CUDA=0" if forced == "0" else "no nvcc was found" if home is None else ""
    if not why and torch.version.cuda is None and forced != "1":
        why = "this torch is a CPU build; FORCE_CUDA=1 overrides"
    half = f"without CUDA ({why})" if why else f"for CUDA {cuda_version(home)}"
    print(f"packing_ops: building {half}; the whole output: {os.path.relpath(LOG)}", flush=True)
    return not why


def sources(*suffixes):
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in suffixes)


class CleanBuild(build_py):
    """Starts with an empty package: an earlier build may have copied modules that are deleted since."""

    def run(self):
        shutil.rmtree(Path(self.build_lib) / "packing_ops", ignore_errors=True)
        super().run()


def with_progress(build_extension):
    class Build(build_extension):
        def swig_sources(self, files, module):
            """build_ext calls this before it compiles; sdist does not, so the archive lists the files themselves."""
            return longest_first(units(files, ROOT, BUILD / "units"), ROOT)

        def build_extensions(self):
            try:
                start = time.monotonic()
                with progress(LOG, ROOT / "csrc"):
                    super().build_extensions()
                print(f"packing_ops: built in {time.monotonic() - start:.0f} s", flush=True)
            except (RuntimeError, ValueError, OSError, CCompilerError) as error:
                sys.exit(f"packing_ops: {checks.no_room(LOG) or checks.in_brief(error)}; the whole output is in {LOG}")

    return Build.with_options(no_python_abi_suffix=True)


def extension():
    checks.check_python()
    torch = checks.import_torch()
    checks.check_torch(torch)
    checks.check_compiler()
    from torch.utils import cpp_extension

    compiler = shutil.which(checks.compiler()[0]) or ""
    if "ccache" in os.path.realpath(compiler):  # torch takes the wrapper for an unknown compiler
        os.environ.setdefault("TORCH_DONT_CHECK_COMPILER_ABI", "1")
    home = find_cuda_home()
    define, library_dirs, include_dirs = [], [], [str(ROOT / "csrc")]
    libraries = ["dl"]  # of libc itself from glibc 2.34 on
    cxx, nvcc, files = [*CXX_FLAGS, *checks.contraction_flags()], list(NVCC_FLAGS), sources(".cpp")
    if cuda_wanted(torch, home):
        archs = os.environ["TORCH_CUDA_ARCH_LIST"] = archs_to_build(torch, home)
        print(f"packing_ops: for GPUs of compute capability {archs.replace(';', ', ')}", flush=True)
        cpp_extension.CUDA_HOME = str(home)  # a CPU build of torch leaves it None
        cpp_extension._check_cuda_version = lambda *_: None  # any CUDA will do: docs/errors-and-env.md
        define += [f'-DPACKING_OPS_WITH_CUDA="{cuda_version(home)}"', f'-DPACKING_OPS_CUDA_ARCHS="{archs}"']
        define += macros(archs)
        nvcc_of_each_file(home)
        shared = sizes(archs)
        define += [f'-DPACKING_OPS_SHARED_MEMORY_KB="{" ".join(map(str, shared))}"'] if shared != ANY else []
        dims = checks.head_dims()
        define += [f'-DPACKING_OPS_HEAD_DIMS="{" ".join(map(str, dims))}"'] if dims != checks.HEAD_DIMS else []
        files += [file for file in sources(".cu") if is_asked(file, dims) and {*callers(file)} & {*shared}]
        if torch.version.cuda is None:
            checks.drop_stale_cuda_objects(ROOT, units(files, ROOT, BUILD / "units"))
        include_dirs += [str(home / "include"), str(home / "include" / "cccl")]
        library_dirs = [str(home / d) for d in ("lib64", "lib", "targets/x86_64-linux/lib")]
        libraries = ["cudart_static", *libraries, "rt", "pthread"]
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
    ), with_progress(cpp_extension.BuildExtension)


if __name__ == "__main__":  # also where pip runs it
    checks.check_setuptools(setuptools.__version__)
    elsewhere = {"egg_info": {"egg_base": str(BUILD)}, "build": {"build_base": str(BUILD)}}
    options = {} if BUILD == ROOT / "build" else elsewhere
    if not sys.platform.startswith("linux"):
        print(f"packing_ops: nothing is compiled for {sys.platform}; packing_ops.data runs in plain torch", flush=True)
        setup(cmdclass={"build_py": CleanBuild}, options=options)
    elif {"sdist", "egg_info", "dist_info"} & set(sys.argv) and not {"build_ext", "bdist_wheel"} & set(sys.argv):
        checks.check_torch_before_downloads()
        headers = [*sources(".h", ".cuh"), *(f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py"))]
        setup(ext_modules=[Extension("packing_ops._C", sources(".cpp", ".cu"), depends=headers)], options=options)
    else:
        with checks.one_build_at_a_time(BUILD):
            module, build_ext = extension()
            commands = {"build_ext": build_ext, "build_py": CleanBuild}
            options["bdist_wheel"] = {"py_limited_api": "cp310"}
            setup(ext_modules=[module], cmdclass=commands, options=options)
