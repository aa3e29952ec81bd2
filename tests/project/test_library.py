"""The binary itself: what it links against, how it fails, what it tells."""

import json
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from helpers import ROOT, assert_same, copy_of_package, cu_seqlens_of, data_toolkit, fresh_process

import packing_ops as po
from packing_ops._runtime import driver as _driver
from packing_ops._runtime import library as _library

ALLOWED = (ROOT / "tests" / "allowed_symbols.txt").read_text().split()


def symbols(*flags):
    found = subprocess.run(["nm", "-D", *flags, str(_library.LIBRARY)], capture_output=True, text=True, check=True)
    return [line.split()[-1].split("@")[0] for line in found.stdout.splitlines()]


def test_undefined_symbols_are_stable_abi_only():
    ours = re.compile("|".join(f"(?:{pattern})" for pattern in ALLOWED))
    foreign = re.compile(r"torch|c10|^at::|_ZN2at|^Py|_Py|cuda|^cu[A-Z]", re.I)
    assert [s for s in symbols("--undefined-only") if foreign.search(s) and not ours.fullmatch(s)] == []


def test_needed_libraries():
    dynamic = subprocess.run(
        ["readelf", "-d", str(_library.LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    needed = re.findall(r"NEEDED.*\[(.+?)\]", dynamic)
    assert not [n for n in needed if "python" in n or "cuda" in n]


def test_build_info():
    info = po.build_info()
    assert info["version"] == po.__version__
    assert info["torch"] == torch.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", info["built_with_torch"])
    assert Path(info["library"]) == _library.LIBRARY
    assert info["library_from"] == "this package"


@pytest.fixture
def imported(tmp_path):
    """What code prints after ``import packing_ops`` in a process that finds it in these folders."""

    def run(code, *folders):
        return fresh_process.run("-c", f"import packing_ops; {code}", paths=folders, folder=tmp_path)

    return run


@pytest.fixture
def import_error(tmp_path):
    """How ``import packing_ops`` ends there."""
    code = """
try:
    import packing_ops
except ImportError as error:
    print("ImportError:", error)
"""
    return lambda *folders: fresh_process.run("-c", code, paths=folders, folder=tmp_path).strip()


def test_without_a_library_data_runs_in_plain_torch_and_ops_name_what_is_missing(tmp_path):
    """A separate process: the library is loaded, or not, at the import."""
    library = copy_of_package(tmp_path) / "_C.so"
    library.unlink()
    code = """
import json, sys, warnings
sys.stderr = sys.stdout
warnings.simplefilter("always")
import packing_ops as po, torch
from helpers import data_toolkit
from packing_ops.report.info import describe_environment
with open("told.json", "w") as file:
    json.dump({"found": data_toolkit.found(), "info": describe_environment()}, file)
q = torch.ones(5, 1, 8)
assert po.attention(q, q, q, data_toolkit.CU_SEQLENS).shape == q.shape, "by SDPA"
try:
    po.varlen_attention(q, q, q, data_toolkit.CU_SEQLENS)
except ImportError as error:
    print("ImportError:", error)
"""
    paths = [tmp_path, ROOT / "tests"]
    printed = fresh_process.run("-c", code, paths=paths, cwd=tmp_path, folder=tmp_path)
    message = f"packing_ops: no compiled library at {library}; build it with: pip install ."
    assert printed.splitlines()[-1].startswith(f"ImportError: {message}")
    assert printed.count(message) == 2, "one warning, and the error"
    told = json.loads((tmp_path / "told.json").read_text())
    assert f"library: none ({message}" in told["info"]
    assert told["found"] == data_toolkit.found()


def test_broken_library_is_named(tmp_path, import_error):
    library = copy_of_package(tmp_path) / "_C.so"
    library.write_bytes(library.read_bytes()[:4096])
    message = import_error(tmp_path)
    assert message.startswith(f"ImportError: packing_ops: {library} does not load in torch {torch.__version__}")
    assert "pip install ." in message


def test_what_the_loader_says_of_a_library_is_told(tmp_path, import_error):
    """torch 2.13 and later say that it could not load, and why in the cause."""
    library = copy_of_package(tmp_path) / "_C.so"
    whole = library.read_bytes()
    library.write_bytes(whole.replace(b"\0torch_call_dispatcher\0", b"\0torch_call_dispatxher\0"))
    assert "undefined symbol: torch_call_dispatxher" in import_error(tmp_path)


@pytest.fixture
def clone(tmp_path):
    """Where packing_ops is without a library, as in a clone that it was installed from."""
    package = copy_of_package(tmp_path / "clone")
    (package / "_C.so").unlink()
    return package.parent


def installed(site, editable_in=None):
    """A distribution in ``site``, or one that is built where it was cloned to; its library."""
    folder = site / "packing_ops-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: packing_ops\nVersion: 0.1.0\n")
    if editable_in:
        (folder / "direct_url.json").write_text(
            json.dumps({"url": editable_in.as_uri(), "dir_info": {"editable": True}})
        )
    library = (editable_in or site) / "packing_ops" / "_C.so"
    library.parent.mkdir(parents=True)
    library.symlink_to(_library.LIBRARY)
    return library


@pytest.mark.parametrize("editable", [False, True])
def test_a_clone_takes_the_library_of_the_installed_package(tmp_path, clone, imported, editable):
    library = installed(tmp_path / "site", tmp_path / "another clone" if editable else None)
    info = "packing_ops.build_info()"
    printed = imported(f"print({info}['library'], {info}['library_from'], sep='\\n')", clone, tmp_path / "site")
    assert printed.splitlines() == [str(library), f"the installed packing_ops, as {clone / 'packing_ops'} has none"]


def test_its_own_library_comes_first(tmp_path, clone, imported):
    installed(tmp_path / "site")
    own = clone / "packing_ops" / "_C.so"
    own.symlink_to(_library.LIBRARY)
    assert imported("print(packing_ops.build_info()['library'])", clone, tmp_path / "site") == f"{own}\n"


def test_a_library_of_another_version_is_refused(tmp_path, clone, import_error):
    library = installed(tmp_path / "site")
    load = clone / "packing_ops" / "_runtime" / "library.py"
    load.write_text(load.read_text().replace(f'VERSION = "{po.__version__}"', 'VERSION = "7.8.9"'))
    message = import_error(clone, tmp_path / "site")
    assert f"{clone / 'packing_ops'} is version 7.8.9" in message
    assert f"version {po.__version__}, {library}; build it again with: pip install ." in message


def test_a_library_of_the_same_version_that_lacks_ops_is_refused(monkeypatch):
    assert sorted(_library.OPS.split()) == _library.op_names()
    monkeypatch.setattr(_library, "op_names", lambda: sorted({*_library.OPS.split()} - {"shift_labels", "token_logps"}))
    expected = (
        f"{_library.LIBRARY} is of other sources than .* it has no shift_labels, token_logps; build it again with: "
    )
    with pytest.raises(ImportError, match=expected):
        _library._check_ops()


@pytest.mark.parametrize(("cuda", "gpus", "told"), [("", 1, 1), ("13.0", 1, 0), ("", 0, 0)])
def test_a_gpu_without_kernels_for_it_is_told(monkeypatch, cuda, gpus, told):
    monkeypatch.setattr(_library, "build_info", lambda: {"cuda": cuda})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _library.warn_of_gpu()
    expected = "packing_ops: torch sees a GPU, but .* was built without CUDA kernels; .*pip install \\."
    assert len(caught) == told
    assert all(re.match(expected, str(w.message)) and w.category is UserWarning for w in caught)


@pytest.mark.parametrize(
    ("toolkit", "driver", "fits"),
    [
        ("12.4", (12, 0), True),
        ("12.9", (13, 0), True),
        ("13.0", (12, 8), False),
        ("12.4", (11, 8), False),
        ("13.0", None, True),
    ],
)
def test_a_driver_that_is_too_old_is_told_at_the_import_and_by_info(monkeypatch, tmp_path, toolkit, driver, fits):
    """Of one line of toolkits every driver runs what every toolkit built; a later line's driver runs it too."""
    from packing_ops.report.info import describe_environment

    monkeypatch.setattr(_driver, "cuda_of_driver", lambda: driver)
    monkeypatch.setattr(_driver, "VERSION_FILE", tmp_path / "none")  # this machine's
    build = {**po.build_info(), "cuda": toolkit, "cuda_archs": "9.0a"}
    monkeypatch.setattr(_library, "build_info", lambda: build)
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _library.warn_of_gpu()
    expected = f"packing_ops: it was built with CUDA {toolkit}, which needs NVIDIA driver "
    assert [str(w.message).startswith(expected) for w in caught] == ([] if fits else [True])
    told = dict(line.split(": ", 1) for line in describe_environment().splitlines())
    assert told["driver needed"].startswith(_driver.OLDEST[int(toolkit[:2])])
    assert told["driver fits"].startswith("yes" if fits and driver else "no GPU driver" if fits else expected)


def test_the_platform_of_a_wheel_tells_it_from_a_build_of_this_machine(monkeypatch, tmp_path):
    library = installed(tmp_path)
    monkeypatch.setattr(_library, "LIBRARY", library)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    tags = tmp_path / "packing_ops-0.1.0.dist-info" / "WHEEL"
    for tag, expected in ("manylinux_2_28_x86_64", "wheel, manylinux_2_28_x86_64"), ("linux_x86_64", "source"):
        tags.write_text(f"Wheel-Version: 1.0\nTag: cp310-abi3-{tag}\n")
        assert _library.built_as() == expected


def test_two_threads_at_once():
    lengths = [[3, 5, 2], [1, 1, 700, 40]]
    expected = [po.position_ids_from_cu_seqlens(cu_seqlens_of(each)) for each in lengths]
    wrong = []

    def work(i):
        cu_seqlens = cu_seqlens_of(lengths[i])
        for _ in range(300):
            if not torch.equal(po.position_ids_from_cu_seqlens(cu_seqlens), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_missing_cuda_kernel_says_so():
    if not torch.cuda.is_available() or not _library.without_cuda_kernel:
        pytest.skip("needs a CUDA GPU and an op without a CUDA kernel")
    for name in _library.without_cuda_kernel:
        schema = getattr(torch.ops.packing_ops, name).default._schema
        tensor = torch.ones(2, 2, 2, device="cuda")
        samples = {
            "Tensor": tensor,
            "List[Tensor]": [tensor],
            "List[int]": [],
            "int": 1,
            "float": 1.0,
            "bool": False,
            "str": "",
        }
        arguments = [samples.get(str(argument.type)) for argument in schema.arguments]
        with pytest.raises(NotImplementedError, match=f"packing_ops::{name} has no CUDA kernel"):
            getattr(torch.ops.packing_ops, name)(*arguments)


def test_cpu_result_does_not_depend_on_threads():
    cu_seqlens = cu_seqlens_of([300] * 200)
    values = torch.randn(60_000)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(po.segment_sum(values, cu_seqlens))
    torch.set_num_threads(threads)
    assert_same(*results)


def test_torch_without_the_parts_of_own_autograd_gets_its_own(monkeypatch):
    from packing_ops._runtime import autograd

    registered = []
    monkeypatch.setattr(torch.library, "register_autograd", lambda *args, **kwargs: registered.append((args, kwargs)))
    monkeypatch.setattr(autograd, "OWN", False)
    autograd.register_autograd("rope_qk", "backward", setup_context="context", linear=2)
    assert registered == [(("packing_ops::rope_qk", "backward"), {"setup_context": "context"})]


def test_torch_without_them_has_gradients_and_refuses_tangents(tmp_path):
    """Its registration would drop a tangent without a word."""
    code = """
import torch, torch._functorch.utils
part = torch.autograd.function._SingleLevelFunction
del torch.autograd.function._SingleLevelFunction  # as if renamed
import packing_ops as po
torch.autograd.function._SingleLevelFunction = part
from packing_ops._runtime import autograd
assert not autograd.OWN
cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
x = torch.randn(5, 2, 8, dtype=torch.float64, requires_grad=True)
calls = {"attention": lambda x: po.varlen_attention(x, x, x, cu_seqlens), "sum": lambda x: po.segment_sum(x, cu_seqlens)}
for name, call in calls.items():
    assert torch.autograd.gradcheck(call, x)
    for make in (lambda: torch.func.jvp(call, (x.detach(),), (x.detach(),)), lambda: dual(call)):
        try:
            make()
            print(name, "dropped a tangent")
        except NotImplementedError as error:
            print(name, error)
"""
    dual = """
def dual(call):
    from torch.autograd import forward_ad
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(x.detach(), x.detach()))
"""
    printed = fresh_process.run("-c", dual + code, paths=[ROOT], folder=tmp_path).splitlines()
    assert [line.partition(" in torch")[0] for line in printed] == [
        *2 * ["attention packing_ops::varlen_attention has no forward-mode derivative"],
        *2 * ["sum packing_ops::segment_sum has no forward-mode derivative"],
    ]


def test_parts_of_torch_that_own_autograd_needs():
    from packing_ops._runtime import autograd

    assert all(map(autograd._found, autograd._PARTS))
    assert autograd._found("torch.distributed.distributed_c10d._world.pg_map")  # parallel/collectives.py, after a fork
    assert not autograd._found("torch._C.a_name_that_torch_has_not")


def test_own_autograd_is_for_ops_without_defaults_but_none():
    """packing_ops._runtime.autograd passes arguments on as they are; the dispatcher leaves out those that equal a
    default, and it puts None in their place.
    """
    sources = [path.read_text() for path in _library.PACKAGE.rglob("*.py")]
    names = [
        n
        for text in sources
        for n in re.findall(r'^_?register(?:_autograd|_recurrence)?\(\s*"(\w+)"', text, re.MULTILINE)
    ]
    assert {"varlen_attention", "rope_qk", "segment_sum_backward", "unpad_rows"} <= set(names)
    for name in names:
        first, *others = getattr(torch.ops.packing_ops, name).default._schema.arguments
        assert not [
            a for a in (first, *others) if a.kwarg_only or (a.has_default_value() and a.default_value is not None)
        ]
        assert not [a for a in others if "List[Tensor" in str(a.type)]
