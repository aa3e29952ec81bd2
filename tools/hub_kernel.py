"""The folder of a Hub kernel, as Hugging Face's `kernels` loads it, from a wheel whose ops have a namespace of their own:

    PACKING_OPS_NAMESPACE=packing_ops_hub_1 python tools/wheel.py --out build/hub
    python tools/hub_kernel.py build/hub/packing_ops-*.whl packing_ops_hub_1 build/hub/kernel

A kernel is loaded by path, under a name that is not "packing_ops", perhaps beside the installed package: so its modules
import each other relatively, and its ops are in torch.ops.<namespace>. It has the ops, packing_ops.data and flash-attn's
functions; the integrations, which patch other libraries, and the report stay in the package. The library uses torch's stable
ABI and links CUDA's runtime statically: one file for every torch, copied to each variant.
"""

import argparse
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ("integrations", "report", "reference", "__main__.py")
# In place of packing_ops.flash_attn's: with flash-attn's rule for the window of a causal call, which transformers relies on.
FLASH_ATTN = "integrations/flash_attn/flash_attn_interface.py"
NAMES = "flash_attn_func, flash_attn_varlen_func, flash_attn_qkvpacked_func, flash_attn_varlen_qkvpacked_func"
EXPORTS = f"\nfrom .flash_attn_interface import {NAMES}  # noqa: E402\n"
# Each serves the later torch versions, and the later versions of its line of CUDA.
VARIANTS = {
    "torch-stable-abi210-cpu-x86_64-linux": "cpu",
    "torch-stable-abi210-cu120-x86_64-linux": "cuda",
    "torch-stable-abi210-cu130-x86_64-linux": "cuda",
}
OWN = r"packing_ops(?P<path>(?:\.\w+)*)"


def relative(path: str, depth: int) -> str:
    """ ".data.rows" as a module ``depth`` folders below the package names it."""
    return "." * (depth + 1) + path.removeprefix(".")


def as_kernel(source: str, depth: int, namespace: str) -> str:
    """A module of the package with relative imports and that namespace. Texts that a user reads stay as they are."""
    source = re.sub(
        rf"^(\s*)from {OWN} import ", lambda m: f"{m[1]}from {relative(m['path'], depth)} import ", source, flags=re.M
    )
    source = source.replace("torch.ops.packing_ops", f"torch.ops.{namespace}")
    source = source.replace('Library("packing_ops"', f'Library("{namespace}"')
    source = re.sub(r'register_(fake|autograd)\(f"packing_ops::', rf'register_\1(f"{namespace}::', source)
    source = re.sub(r'_dispatch_key\(f"packing_ops::', f'_dispatch_key(f"{namespace}::', source)
    source = source.replace('prefix = "packing_ops::"', f'prefix = "{namespace}::"')
    return source.replace(r're.compile(r"packing_ops::', rf're.compile(r"{namespace}::')


def python_files(wheel: zipfile.ZipFile, namespace: str) -> dict[str, bytes]:
    """{path in the kernel: content}"""
    files = {}
    for name in wheel.namelist():
        folder, _, path = name.partition("/")
        if folder != "packing_ops" or (path.startswith(LEFT_OUT) and path != FLASH_ATTN):
            continue
        content = wheel.read(name)
        path = Path(path).name if path == FLASH_ATTN else path
        if path.endswith(".py"):
            content = as_kernel(content.decode(), path.count("/"), namespace).encode()
        files[path] = content
    files["__init__.py"] += EXPORTS.encode()
    return files


def metadata(namespace: str, version: int, backend: str) -> str:
    about = {
        "id": f"{namespace}_{backend}",
        "name": "packing-ops",
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    return json.dumps(about, indent=2) + "\n"


def write(wheel: Path, namespace: str, folder: Path, version: int) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = python_files(archive, namespace)
    if namespace == "packing_ops" or f"\0{namespace}\0".encode() not in files["_C.so"]:
        sys.exit(
            f"{wheel}: expected a library whose ops are in {namespace}: PACKING_OPS_NAMESPACE={namespace} tools/wheel.py"
        )
    for variant, backend in VARIANTS.items():
        target = folder / "build" / variant
        shutil.rmtree(target, ignore_errors=True)
        for path, content in files.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(content)
        (target / "metadata.json").write_text(metadata(namespace, version, backend))
    shutil.copy(ROOT / "LICENSE", folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("namespace")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", type=int, default=1, help="of the kernel, which users name (default: %(default)s)")
    arguments = parser.parse_args()
    write(arguments.wheel, arguments.namespace, arguments.folder, arguments.version)


if __name__ == "__main__":
    main()
