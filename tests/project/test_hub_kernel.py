"""tools/hub_kernel.py: what Hugging Face's `kernels` loads by path, beside the package, and tools/hub_project.py: its sources
for kernel-builder. A process of its own for each."""

import base64
import hashlib
import json
import re
import zipfile
from pathlib import Path

import fresh_process
import pytest
from helpers import ROOT

from packing_ops import _library
from tools import hub_kernel, hub_project
from tools.find_cuda import PORTABLE_ARCHS

NAMESPACE = "packing_opz"  # as long as the library's own
CPU = "torch-stable-abi210-cpu-x86_64-linux"
# As kernels' loader imports a variant.
LOAD = """
import importlib.util, json, sys, torch
from pathlib import Path
variant = Path({variant!r})
about = json.loads((variant / "metadata.json").read_text())
spec = importlib.util.spec_from_file_location(about["id"], variant / "__init__.py")
kernel = importlib.util.module_from_spec(spec)
sys.modules[about["id"]] = kernel
spec.loader.exec_module(kernel)
"""
# As kernel-builder's, but for the library: that of the package is no module of Python.
OPS_OF_BUILDER = """
import sys, torch, types
from pathlib import Path
module = types.ModuleType(__package__ + ".{namespace}")
module.__file__ = str(Path(__file__).with_name("{namespace}.abi3.so"))
sys.modules[module.__name__] = module
torch.ops.load_library(module.__file__)
ops = torch.ops.{namespace}
def add_op_namespace_prefix(op_name: str):
    return f"{namespace}::{{op_name}}"
"""


def library():
    """The one that is built here, with its namespace replaced: compiling one takes minutes."""
    built = _library.LIBRARY.read_bytes()
    assert built.count(b"\0packing_ops\0") == 1
    return built.replace(b"\0packing_ops\0", f"\0{NAMESPACE}\0".encode())


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    with zipfile.ZipFile(folder / "packing_ops.whl", "w") as wheel:
        wheel.writestr("packing_ops/_C.so", library())
        for path in (ROOT / "packing_ops").rglob("*.py"):
            wheel.write(path, path.relative_to(ROOT))
    hub_kernel.write(folder / "packing_ops.whl", NAMESPACE, folder / "kernel", 1)
    return folder / "kernel" / "build"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "project"
    hub_project.write(folder, 3, "somebody/packing-ops")
    return folder


@pytest.fixture(scope="module")
def build_toml(project):
    return pytest.importorskip("tomllib").loads((project / "build.toml").read_text())


@pytest.fixture(scope="module")
def compiled_project(project):
    """What kernel-builder makes of it, with the library that is built here."""
    variant = project / "build" / CPU
    variant.parent.mkdir()
    (project / "torch-ext" / "packing_ops").rename(variant)
    (variant / f"{NAMESPACE}.abi3.so").write_bytes(library())
    (variant / "_ops.py").write_text(OPS_OF_BUILDER.format(namespace=NAMESPACE))
    about = {"id": NAMESPACE, "name": "packing-ops", "version": 3, "license": "Apache-2.0", "backend": {"type": "cpu"}}
    (variant / "metadata.json").write_text(json.dumps(about | {"python-depends": []}))
    return variant.parent


def run(kernel, code, folder):
    load = LOAD.format(variant=str(kernel / CPU))
    return fresh_process.run("-c", load + code, cwd=folder, paths=[], folder=folder)


@pytest.mark.parametrize("of", ["kernel", "compiled_project"])
def test_a_kernel_is_loaded_without_the_package(of, request, tmp_path):
    kernel = request.getfixturevalue(of)
    code = f"""
q = torch.randn(5, 2, 16, dtype=torch.float64).float().requires_grad_()
cu_seqlens = kernel.cu_seqlens_from_lengths([2, 3])
out = kernel.flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 3, 3, causal=True)
out.sum().backward()
from torch.nn.functional import scaled_dot_product_attention as sdpa
rows = q.detach().transpose(0, 1)
expected = torch.cat([sdpa(*[rows[:, span]] * 3, is_causal=True) for span in (slice(0, 2), slice(2, 5))], 1).transpose(0, 1)
torch.testing.assert_close(out.detach(), expected)
windows = [kernel.flash_attn_func(*[q.detach()[None]] * 3, causal=True, window_size=sides, s_aux=torch.zeros(2)) for sides in ((2, 2), (2, 0))]
assert torch.equal(*windows), "flash-attn's rule"
assert q.grad is not None
import importlib
importlib.import_module(about["id"] + ".data")
assert hasattr(torch.ops.{NAMESPACE}, "varlen_attention") and not hasattr(torch.ops.packing_ops, "varlen_attention")
registered = lambda name, key: torch._C._dispatch_has_kernel_for_dispatch_key(f"{{name}}::varlen_attention", key)
assert registered("{NAMESPACE}", "CPU") and registered("{NAMESPACE}", "CUDA")  # without CUDA: one that says so
assert not [name for name in sys.modules if name.partition(".")[0] == "packing_ops"]
print("ran")
"""
    assert run(kernel, code, tmp_path).endswith("ran\n")


def test_beside_the_package(kernel, tmp_path):
    code = f"""
sys.path.insert(0, {str(ROOT)!r})
import packing_ops
compiled = torch.compile(lambda c: kernel.position_ids_from_cu_seqlens(c) + packing_ops.position_ids_from_cu_seqlens(c),
                         fullgraph=True, backend="aot_eager")
print(compiled(packing_ops.cu_seqlens_from_lengths([2, 1])).tolist())
"""
    assert run(kernel, code, tmp_path).endswith("[0, 2, 0]\n")


def test_nothing_of_the_package_s_name_is_imported_or_registered(kernel):
    for path in (kernel / CPU).rglob("*.py"):
        code = re.sub(r'"""(.|\n)*?"""|#.*', "", path.read_text())
        assert not re.search(r"^\s*(from|import) packing_ops\b", code, re.M), path
        assert "torch.ops.packing_ops" not in code
    assert {path.name for path in kernel.iterdir()} == {*hub_kernel.VARIANTS}


def test_metadata_is_as_kernels_asks(kernel):
    for variant, backend in hub_kernel.VARIANTS.items():
        about = json.loads((kernel / variant / "metadata.json").read_text())
        assert (about["id"], about["backend"]["type"]) == (NAMESPACE, backend), "the ops are in torch.ops.<id>"
        archs = about["backend"].get("archs", [])
        assert ";".join(archs) == (_library.build_info()["cuda_archs"] if backend == "cuda" else "")
        paths = [path for path in (kernel / variant).rglob("*") if path.is_file() and path.suffix != ".pyc"]
        files = {str(path.relative_to(kernel / variant)) for path in paths}
        assert {*about["digest"]["files"]} == files - {"metadata.json"}
        digest = base64.b64encode(hashlib.sha256((kernel / variant / "_C.so").read_bytes()).digest()).decode()
        assert about["digest"]["files"]["_C.so"] == digest


def test_kernels_takes_both(kernel, project, compiled_project):
    rust = pytest.importorskip("kernels._rust")
    assert [str(backend) for backend in rust.Build.open(project).general.backends] == ["cpu", "cuda"]
    for variant in kernel / CPU, compiled_project / CPU:
        assert rust.Metadata.read_from_file(variant / "metadata.json").id == NAMESPACE


def test_build_toml_names_every_source_once(project, build_toml):
    tables = [build_toml["torch"], *build_toml["kernel"].values()]
    named = [path for table in tables for path in table["src"]]
    assert len(named) == len(set(named))
    assert all((project / path).exists() for path in named)
    needed = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".h", ".cu", ".cuh")}
    assert len(needed) > 100
    assert {*named} == needed | {"torch-ext/torch_binding.cpp", "csrc/kernel_builder.h"}
    for path in needed:
        assert (project / path).read_text().endswith((ROOT / path).read_text())


def test_build_toml_compiles_each_file_for_its_gpus(build_toml):
    of_archs = {tuple(table["cuda-capabilities"]): table["src"] for table in build_toml["kernel"].values()}
    hopper = [path for path in of_archs[("9.0a",)] if "/sm90/instances/" not in path]
    assert hopper == []
    others = of_archs[tuple(PORTABLE_ARCHS)]
    assert not [path for path in others if "/sm90/instances/" in path or Path(path).suffix not in (".cu", ".cuh")]
    assert not [path for path in build_toml["torch"]["src"] if path.endswith((".cu", ".cuh"))]


def test_a_library_of_the_package_s_namespace_is_refused(kernel):
    with pytest.raises(SystemExit, match="expected a library whose ops are in other"):
        hub_kernel.write(kernel.parent.parent / "packing_ops.whl", "other", kernel.parent, 1)


def test_a_build_with_a_namespace_passes_it_to_both_compilers(tmp_path):
    """Every bind file registers its CPU and its CUDA ops by that name: csrc/host/register.h."""
    code = "import setup; print(*[NAME in options for options in setup.extension()[0].extra_compile_args.values()])"
    code = code.replace("NAME", f"'-DPACKING_OPS_NAMESPACE={NAMESPACE}'")
    environment = {"PACKING_OPS_NAMESPACE": NAMESPACE, "FORCE_CUDA": "0"}
    printed = fresh_process.run("-c", code, cwd=ROOT, folder=tmp_path, environment=environment)
    assert printed.splitlines()[-1] == "True True"
