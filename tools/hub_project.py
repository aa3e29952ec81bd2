"""Lays the sources of a Hub kernel out for Hugging Face's kernel-builder, which compiles them for each torch and CUDA:

    python tools/hub_project.py build/hub-project --repo-id somebody/packing-ops

See tools/hub_kernel.py for what a kernel contains. Here kernel-builder chooses the op namespace. build.toml lists every file
of csrc, sorted by path.
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.find_cuda import PORTABLE_ARCHS  # noqa: E402
from tools.hub_kernel import NAMESPACE, kernel_files  # noqa: E402

NAME = "packing-ops"
HOPPER = "csrc/ops/attention/cuda/sm90/instances/"
OLDEST_TORCH = "2.10"
# Included first by every source: what setup.py gives as options.
OPTIONS = """\
// What setup.py gives as options, of kernel-builder's.
#pragma once

#define PACKING_OPS_NAMESPACE TORCH_EXTENSION_NAME
#define PACKING_OPS_VERSION "{version}"
#if defined(CUDA_KERNEL)
#include <cuda_runtime_api.h>
#if CUDART_VERSION >= 13000
#define PACKING_OPS_WITH_CUDA "13.0"
#else
#define PACKING_OPS_WITH_CUDA "12.0"
#endif
#define PACKING_OPS_CUDA_ARCHS "{archs}"
#define PACKING_OPS_SM90
#endif
"""
BINDING = """\
// The ops register themselves: csrc/ops/*/*_bind.cpp. This makes the library a module that Python imports.
#include "registration.h"

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
"""
NAMESPACE_OF_BUILDER = """\
import sys
from pathlib import Path

from ._ops import add_op_namespace_prefix

NAMESPACE = add_op_namespace_prefix("").removesuffix("::")
LIBRARY = Path(sys.modules[f"{__package__}.{NAMESPACE}"].__file__)
"""
FLAKE = """\
{
  description = "packing_ops";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""


def sources(*suffixes: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.suffix in suffixes)


def table(title: str, /, **values: object) -> str:
    """A table of TOML; lists with an item a line."""

    def text(value: object) -> str:
        if not isinstance(value, list):
            return json.dumps(value)
        return "[\n" + "".join(f"  {json.dumps(item)},\n" for item in value) + "]"

    return f"[{title}]\n" + "".join(f"{key.replace('_', '-')} = {text(value)}\n" for key, value in values.items())


def build_toml(version: int, repo_id: str) -> str:
    """The C++ is compiled for every backend, since the CUDA library has the CPU's kernels too."""
    cuda = {"backend": "cuda", "depends": ["torch"], "include": ["csrc"]}
    flags = ["-std=c++20", "--expt-relaxed-constexpr", "-Xfatbin=-compress-all"]
    halves = ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS")
    cuda["cuda_flags"] = [*flags, *(f"-U__CUDA_NO_{name}__" for name in halves)]
    kernels = sources(".cu")
    hopper = [path for path in kernels if path.startswith(HOPPER)]
    others = [path for path in kernels if path not in hopper]
    backends, headers = ["cpu", "cuda"], sources(".h")
    tables = [
        table("general", name=NAME, version=version, edition=5, license="Apache-2.0", backends=backends),
        table("general.hub", repo_id=repo_id),
        table(
            "torch",
            src=["torch-ext/torch_binding.cpp", "csrc/kernel_builder.h", *headers, *sources(".cpp")],
            include=["csrc"],
            cxx_flags=["-std=c++20"],
        ),
        table("torch.stable-abi", cpu=OLDEST_TORCH, cuda=OLDEST_TORCH),
        table("kernel.packing_ops", **cuda, cuda_capabilities=PORTABLE_ARCHS, src=[*sources(".cuh"), *others]),
        table("kernel.packing_ops_sm90", **cuda, cuda_capabilities=["9.0a"], src=hopper),
    ]
    return "\n".join(["# Written by tools/hub_project.py.", *tables])


def write(folder: Path, version: int, repo_id: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    package = {str(path.relative_to(ROOT / "packing_ops")): path for path in (ROOT / "packing_ops").rglob("*.py")}
    files = kernel_files({name: path.read_bytes() for name, path in package.items()})
    own = b'own = PACKAGE / "_C.so"'
    library = files["_library.py"]
    assert library.count(own) == 1
    library = library.replace(own, b"own = LIBRARY_OF_BUILDER")
    named = f"from .{NAMESPACE} import NAMESPACE\n"
    named_both = named + f"from .{NAMESPACE} import LIBRARY as LIBRARY_OF_BUILDER\n"
    files["_library.py"] = library.replace(named.encode(), named_both.encode(), 1)
    files[f"{NAMESPACE}.py"] = NAMESPACE_OF_BUILDER.encode()
    written = {f"torch-ext/{NAME.replace('-', '_')}/{path}": content.decode() for path, content in files.items()}
    version_of_package = re.search(r'^VERSION = "(.+?)"', package["_library.py"].read_text(), re.M)[1]
    for path in sources(".cpp", ".cu", ".h", ".cuh"):
        compiled = path.endswith((".cpp", ".cu"))
        written[path] = ('#include "kernel_builder.h"\n' if compiled else "") + (ROOT / path).read_text()
    written["csrc/kernel_builder.h"] = OPTIONS.format(version=version_of_package, archs=";".join(PORTABLE_ARCHS))
    written |= {"torch-ext/torch_binding.cpp": BINDING, "flake.nix": FLAKE, "build.toml": build_toml(version, repo_id)}
    for path, text in written.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    shutil.copy(ROOT / "LICENSE", folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repo-id", required=True, help="where kernel-builder uploads it, as somebody/packing-ops")
    parser.add_argument("--version", type=int, default=1, help="of the kernel, which users name (default: %(default)s)")
    arguments = parser.parse_args()
    write(arguments.folder, arguments.version, arguments.repo_id)


if __name__ == "__main__":
    main()
