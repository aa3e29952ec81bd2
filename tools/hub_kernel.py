"""Makes a Hub kernel, the folder that Hugging Face's `kernels` loads, from a wheel built with an op namespace of its own:

    PACKING_OPS_NAMESPACE=packing_ops_hub_1 python tools/wheel.py --out build/hub
    python tools/hub_kernel.py build/hub/packing_ops-*.whl packing_ops_hub_1 build/hub/kernel

A kernel is loaded by path, under a name that is not "packing_ops", perhaps beside the installed package: so its modules
import each other relatively, and its ops are in torch.ops.<namespace>. It has the ops, packing_ops.data and flash-attn's
functions; the integrations, which patch other libraries, and the report stay in the package. The library uses torch's stable
ABI and links CUDA's runtime statically: one file for every torch, copied to each variant.
"""

import argparse
import base64
import hashlib
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ("integrations", "report", "reference", "__main__.py")
# Beside packing_ops.flash_attn's those of packed projections, from the one module of the integrations that a kernel has.
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
NAMESPACE = "_namespace"  # the module that names the ops' namespace
RENAMED = {"_ops": "_gate"}  # kernel-builder writes an _ops.py of its own


def relative(path: str, depth: int) -> str:
    """ ".data.rows" as a module ``depth`` folders below the package names it."""
    return "." * (depth + 1) + RENAMED.get(path.removeprefix("."), path.removeprefix("."))


def import_line(match: re.Match, depth: int) -> str:
    names = match["names"]
    for ours, theirs in RENAMED.items():
        names = re.sub(rf"\b{ours}\b", f"{theirs} as {ours}", names) if not match["path"] else names
    return f"{match['indent']}from {relative(match['path'], depth)} import {names}"


def as_kernel(source: str, depth: int) -> str:
    """A module of the package with relative imports and the namespace of _namespace.py. Messages to the
    user stay as they are."""
    before = source = re.sub(
        rf"^(?P<indent>\s*)from {OWN} import (?P<names>.*)", lambda m: import_line(m, depth), source, flags=re.M
    )
    source = source.replace("torch.ops.packing_ops", "getattr(torch.ops, NAMESPACE)")
    source = source.replace('Library("packing_ops"', "Library(NAMESPACE")
    source = re.sub(r'(register_fake|register_autograd|_dispatch_key)\(f"packing_ops::', r'\1(f"{NAMESPACE}::', source)
    source = source.replace('prefix = "packing_ops::"', 'prefix = f"{NAMESPACE}::"')
    source = source.replace('re.compile(r"packing_ops::', 're.compile(NAMESPACE + r"::')
    if source != before:
        named = f"import torch\n\nfrom {'.' * (depth + 1)}{NAMESPACE} import NAMESPACE\n"
        source = source.replace("import torch\n", named, 1)
    return source


def kernel_files(package: dict[str, bytes]) -> dict[str, bytes]:
    """{path in the kernel: content} of the package's files by their path; without _namespace.py."""
    files = {}
    for name, content in package.items():
        if name.startswith(LEFT_OUT) and name != FLASH_ATTN:
            continue
        path = Path(name if name != FLASH_ATTN else Path(name).name)
        if path.suffix == ".py":
            content = as_kernel(content.decode(), len(path.parents) - 1).encode()
        files[str(path.with_stem(RENAMED.get(path.stem, path.stem)))] = content
    files["__init__.py"] += EXPORTS.encode()
    return files


def metadata(namespace: str, version: int, backend: str, files: dict[str, bytes]) -> str:
    """metadata.json: the ops are in torch.ops.<id>, as kernels asks, and every file has its digest."""
    archs = re.search(rb"\|cuda_archs=([^|]+)\|", files["_C.so"])
    of_cuda = {"archs": archs[1].decode().split(";")} if backend == "cuda" and archs else {}
    digests = {path: base64.b64encode(hashlib.sha256(content).digest()).decode() for path, content in files.items()}
    about = {
        "id": namespace,
        "name": "packing-ops",
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend} | of_cuda,
        "digest": {"algorithm": "sha256", "files": dict(sorted(digests.items()))},
    }
    return json.dumps(about, indent=2) + "\n"


def write(wheel: Path, namespace: str, folder: Path, version: int) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("packing_ops/")]
        files = kernel_files({name.partition("/")[2]: archive.read(name) for name in names})
    if namespace == "packing_ops" or f"\0{namespace}\0".encode() not in files["_C.so"]:
        sys.exit(
            f"{wheel}: expected a library whose ops are in {namespace}: PACKING_OPS_NAMESPACE={namespace} tools/wheel.py"
        )
    files[f"{NAMESPACE}.py"] = f'NAMESPACE = "{namespace}"\n'.encode()
    for variant, backend in VARIANTS.items():
        target = folder / "build" / variant
        shutil.rmtree(target, ignore_errors=True)
        for path, content in files.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(content)
        (target / "metadata.json").write_text(metadata(namespace, version, backend, files))
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
