"""tools/hub_kernel.py: what Hugging Face's `kernels` loads by path, beside the package. A process of its own for each."""

import re
import zipfile

import fresh_process
import pytest
from helpers import ROOT

from packing_ops import _library
from tools import hub_kernel

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


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """Of the library that is built here, its namespace replaced in a copy: compiling one takes minutes."""
    folder = tmp_path_factory.mktemp("hub")
    library = _library.LIBRARY.read_bytes()
    assert library.count(b"\0packing_ops\0") == 1
    with zipfile.ZipFile(folder / "packing_ops.whl", "w") as wheel:
        wheel.writestr("packing_ops/_C.so", library.replace(b"\0packing_ops\0", f"\0{NAMESPACE}\0".encode()))
        for path in (ROOT / "packing_ops").rglob("*.py"):
            wheel.write(path, path.relative_to(ROOT))
    hub_kernel.write(folder / "packing_ops.whl", NAMESPACE, folder / "kernel", 1)
    return folder / "kernel" / "build"


def run(kernel, code, folder):
    load = LOAD.format(variant=str(kernel / CPU))
    return fresh_process.run("-c", load + code, cwd=folder, paths=[], folder=folder)


def test_a_kernel_is_loaded_without_the_package(kernel, tmp_path):
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


def test_a_library_of_the_package_s_namespace_is_refused(kernel):
    with pytest.raises(SystemExit, match="expected a library whose ops are in other"):
        hub_kernel.write(kernel.parent.parent / "packing_ops.whl", "other", kernel.parent, 1)
