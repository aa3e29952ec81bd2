"""The rules of the house, held by a test: what may include what, how long a file may be, what an op must have."""

import ast
import functools
import re
from types import ModuleType

import pytest
import torch
from helpers import ROOT
from helpers.native_functions import functions

from packing_ops._runtime import library
from tools import generate_instances

CSRC = ROOT / "csrc"
FAMILIES = ["attention", "boundaries", "conv", "logps", "packing", "padding", "rope", "scan"]
FOLDERS = {"attention": "varlen/", "logps": "losses/"}  # of packing_ops; the other families' modules are in its root
NATIVE = sorted(p for p in CSRC.rglob("*") if p.suffix in {".cpp", ".h", ".cu", ".cuh"})
PYTHON = sorted(
    p for folder in ("packing_ops", "tests", "benchmarks", "examples", "tools") for p in (ROOT / folder).rglob("*.py")
)


def name_of(path):
    return str(path.relative_to(ROOT))


def includes(path):
    return re.findall(r'^#include [<"](.+)[>"]', path.read_text(), re.M)


def families_of_ops():
    """{op: family} as csrc/schema.cpp groups them."""
    families, family = {}, None
    for line in (CSRC / "schema.cpp").read_text().splitlines():
        comment = re.match(r"\s*// (\w+)$", line)
        family = comment[1] if comment else family
        schema = re.match(r'\s*m\.def\("(\w+)\(', line)
        if schema and family in FAMILIES:
            families[schema[1]] = family
    return families


OPS = families_of_ops()


def test_schema_lists_every_op():
    assert {*OPS} | library.WITHOUT_TENSORS == set(library.op_names())


def is_torch_free(path):
    parts = path.relative_to(CSRC).parts
    params_header = path.suffix == ".h" and parts[0] == "ops" and path.stem == parts[1]
    return path.suffix in {".cu", ".cuh"} or parts[0] == "core" or "cuda" in parts or params_header


def found_in(paths, look):
    """Return {file: what look(path) finds wrong in it}. One test reads all files: a test for each takes longer."""
    assert len(paths) > 100
    wrong = {name_of(path): look(path) for path in paths}
    return {name: each for name, each in wrong.items() if each}


def test_torch_free():
    paths = [path for path in NATIVE if is_torch_free(path)]
    torch_s = "torch/", "ATen/", "c10/", "host/"
    assert found_in(paths, lambda path: [i for i in includes(path) if i.startswith(torch_s)]) == {}


def against_the_way(path):
    """Return what it includes of a floor that is not below its floor."""
    parts = path.relative_to(CSRC).parts
    own = [i for i in includes(path) if i.startswith(("core/", "host/", "ops/"))]
    below = {"core": ("core/",), "host": ("core/", "host/"), "ops": ("core/", "host/", f"ops/{parts[1]}/")}[parts[0]]
    wrong = [i for i in own if not i.startswith(below)]
    # cpu/, cuda/, cuda/sm80/: its folder and the floors above it. Only what picks an instance knows the instances.
    if parts[0] == "ops" and len(parts) > 3 and path.name != "dispatch.cu":
        floors = {"/".join(parts[:n]) for n in range(2, len(parts))}
        wrong += [i for i in own if i.startswith("ops/") and i.rpartition("/")[0] not in floors]
    return wrong


def test_includes_point_one_way():
    assert found_in([path for path in NATIVE if path.parent != CSRC], against_the_way) == {}


@pytest.mark.parametrize(
    ("path", "included"),
    [
        ("core/a.h", "host/b.h"),
        ("host/a.h", "ops/rope/rope.h"),
        ("ops/rope/a.h", "ops/conv/conv.h"),
        ("ops/attention/cuda/a.h", "ops/attention/cuda/sm80/forward.cuh"),
    ],
)
def test_what_points_the_other_way_is_found(path, included, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "CSRC", tmp_path)
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(f'#include "core/c.h"\n#include "{included}"\n')
    assert against_the_way(file) == [included]


def test_nothing_imports_integrations():
    package = ROOT / "packing_ops"
    hosts = package / "integrations", package / "contrib"  # test_contrib.py says what contrib may
    outside = [path for path in package.rglob("*.py") if not any(map(path.is_relative_to, hosts))]
    outside.remove(package / "__main__.py")  # a program that puts us into a model
    assert len(outside) > 50
    assert [
        name_of(path) for path in outside if modules_imported(path, {"packing_ops.integrations"}, within=True)
    ] == []


@pytest.mark.parametrize(
    "package", ["", "varlen.", "losses.", "invariance.", "_runtime.", "data.", "optim.", "parallel.", "reference."]
)
def test_no_public_name_hides_a_module(package):
    """``import packing_ops.X as M`` gives the module, which a function of that name in __init__.py would hide."""
    folder = ROOT / "packing_ops" / package.rstrip(".")
    names = [path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "__main__")]
    names += [path.parent.name for path in folder.glob("*/__init__.py")]
    assert names
    for name in names:
        found = {}
        exec(f"import packing_ops.{package}{name} as M", found)
        assert isinstance(found["M"], ModuleType), name


def modules_imported(path, modules, within=False):
    """Those of ``modules`` that a file imports anywhere, under TYPE_CHECKING too.

    within: what lies in them counts as they do.
    """
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    assert not any(node.level for node in froms), "a relative import"
    for node in froms:
        names += [
            f"{node.module}.{each.name}" if f"{node.module}.{each.name}" in modules else node.module
            for each in node.names
        ]
    if within:
        names = [module for name in names for module in modules if f"{name}.".startswith(f"{module}.")]
    return {name for name in names if name in modules}


def circle_among(imports):
    """Modules that import each other in a circle, or an empty set: what is left when those without imports are taken
    away.
    """
    left = {name: set(others) - {name} for name, others in imports.items()}
    while bare := [name for name, others in left.items() if not others]:
        for name in bare:
            del left[name]
        for others in left.values():
            others.difference_update(bare)
    return set(left)


def test_modules_import_each_other_in_no_circle():
    paths = sorted((ROOT / "packing_ops").rglob("*.py"))
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}
    imports = {name: modules_imported(path, modules) for name, path in modules.items()}
    assert imports["packing_ops.metadata"] > {"packing_ops.keys", "packing_ops._runtime.gate"}
    assert circle_among(imports) == set()
    assert not [name for name in imports["packing_ops.metadata"] if name.startswith("packing_ops.varlen")]


def test_a_circle_is_found(tmp_path):
    assert circle_among({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()}) == {"a", "b", "c"}
    file = tmp_path / "file.py"
    file.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import X\nfrom p import b, Y\n")
    assert modules_imported(file, {"p", "p.a", "p.b", "p.c"}) == {"p", "p.a", "p.b"}


def test_roots_hold_few_files():
    """The root of packing_ops: a module for each family, and for what belongs to none. Of tests: programs, and what
    conftest.py imports before torch."""
    assert len([*(ROOT / "packing_ops").glob("*.py")]) <= 16
    loose = [path for path in (ROOT / "tests").glob("*.py") if '__name__ == "__main__"' not in path.read_text()]
    assert {path.name for path in loose} == {"conftest.py"}


def test_folders_of_integrations_are_small():
    folders = [path for path in (ROOT / "packing_ops" / "integrations").rglob("*") if path.is_dir()]
    sizes = {name_of(path): len([*path.glob("*.py")]) for path in folders}
    assert {name: size for name, size in sizes.items() if size > 20} == {}


def imported(path):
    """The top-level names of what a Python file imports, at any depth of it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def test_benchmarks_and_examples_do_not_import_each_other():
    """A benchmark runs an example as a program; what examples share is in a folder of theirs, which can be copied."""
    files = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in ("benchmarks", "examples")}
    modules = {
        folder: {path.relative_to(ROOT / folder).parts[0].removesuffix(".py") for path in paths}
        for folder, paths in files.items()
    }
    assert {"common", "train_packed"} <= modules["examples"]
    assert not modules["benchmarks"] & modules["examples"]
    found = [
        (name_of(path), name)
        for folder, other in (("benchmarks", "examples"), ("examples", "benchmarks"))
        for path in files[folder]
        for name in imported(path) & {*modules[other], other, "tests", "tools"}
    ]
    assert found == []


def lines_too_many(path):
    kernel = path.suffix in {".cu", ".cuh"} or path.stem.endswith("_cpu") or path.parent.name == "cpu"
    tests = path.is_relative_to(ROOT / "tests")
    package = path.is_relative_to(ROOT / "packing_ops")
    longest = {"setup.py": 150, "render.py": 310}.get(path.name)
    longest = longest or (500 if package or tests else 400 if kernel else 250)
    return max(0, len(path.read_text().splitlines()) - longest)


def test_length_of_files():
    assert found_in([*NATIVE, *PYTHON, ROOT / "setup.py"], lines_too_many) == {}


def test_a_new_table_needs_no_code():
    """regions.toml describes tables and sentences."""
    assert sum(len(path.read_text().splitlines()) for path in (ROOT / "benchmarks").glob("render*.py")) < 500


# Kernels that hold a pipeline in the registers of one function, with a heading over each phase. No other should be
# added.
LONG_KERNELS = {
    "attend",
    "attend_to_keys",
    "attention_backward_kernel",
    "attention_backward_single_kernel",
    "attention_forward_kernel",
    "attention_forward_wide_kernel",
    "load_units",
    "write_kernel",
}


def long_functions(path):
    wrong = []
    for name, line, lines, parameters in functions(path.read_text()):
        a_list = path.name == "schema.cpp"  # of schemas
        if lines > 60 and not a_list and name not in LONG_KERNELS:
            wrong.append(f"line {line}: {name} has {lines} lines")
        if parameters > 8 and name not in OPS:
            wrong.append(f"line {line}: {name} takes {parameters} parameters")
    return wrong


def test_functions_are_short_and_take_few_parameters():
    assert found_in(NATIVE, long_functions) == {}


def test_long_kernels_are_long():
    lengths = {name: lines for path in NATIVE for name, _, lines, _ in functions(path.read_text())}
    assert all(lengths[name] > 60 for name in LONG_KERNELS)


def test_functions_are_found():
    source = """
template <int k>
__global__ void __launch_bounds__(F<k>::x, g(1)) kernel(int a, std::pair<int, int> b) {  // {
  f([&](int i, int j) { return i; });
}
struct A {
  template <>
  int half<int>() const {
    return 0;
  }
};
"""
    assert functions(source) == [("kernel", 2, 4, 2), ("half", 7, 4, 0)]


EXIT_OR_DEAD_CODE = re.compile(r"\b(?:exit|abort)\(|^\s*//.*[;{}]\s*$", re.M)


def test_no_exit_and_no_dead_code():
    assert found_in(NATIVE, lambda path: EXIT_OR_DEAD_CODE.findall(path.read_text())) == {}


# csrc has the words of PTX and of the papers: a slot, a ticket, row_max, wgmma, a TMA load.
REPLACED_WORDS = {
    "ops/attention/cuda/sm90": {"told", "place", "places", "turn", "turns", "most", "whole", "seam"},
    "core/ptx": {"product", "products", "box", "boxes"},
}


@pytest.mark.parametrize("folder", REPLACED_WORDS)
def test_replaced_words_stay_replaced(folder):
    paths = [path for path in (CSRC / folder).rglob("*") if path.is_file()]
    assert paths
    found = {
        (name_of(path), word)
        for path in paths
        for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", path.read_text())  # the words of snake_case and CamelCase
        if word.lower() in REPLACED_WORDS[folder]
    }
    assert found == set()


def test_object_stems_are_unique():
    stems = [p.with_suffix("") for p in NATIVE if p.suffix in {".cpp", ".cu"}]
    assert len(stems) == len(set(stems))


def test_assembly_lives_in_ptx():
    with_asm = [p for p in NATIVE if re.search(r"\basm\s*(volatile)?\s*\(", p.read_text())]
    assert all("ptx" in p.parts for p in with_asm)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_has_its_places(family):
    folder = CSRC / "ops" / family
    for device, suffix in ("cpu", ".cpp"), ("cuda", ".cu"):
        assert (folder / f"{family}_{device}{suffix}").exists() or list((folder / device).glob(f"*{suffix}"))
    wanted = [
        folder / f"{family}.h",
        folder / f"{family}_bind.cpp",
        ROOT / "packing_ops" / f"{FOLDERS.get(family, '')}{family}.py",
        ROOT / "packing_ops" / "reference" / f"{family}.py",
        ROOT / "tests" / "ops" / f"test_{family}.py",
        ROOT / "benchmarks" / f"bench_{family}.py",
    ]
    assert [name_of(p) for p in wanted if not p.exists()] == []


@functools.cache
def text_of_tests(family):
    return "".join(path.read_text() for path in (ROOT / "tests" / "ops").glob(f"test_{family}*.py"))


@pytest.mark.parametrize("op", OPS)
def test_op_is_complete(op):
    qualified = f"packing_ops::{op}"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CPU"), "CPU kernel"
    assert torch._library.simple_registry.singleton.find(qualified).fake_impl.kernel is not None, "fake"
    assert re.search(rf"ops\.{op}\b", text_of_tests(OPS[op])), "opcheck in its test"
    if library.build_info()["cuda"]:
        assert op not in library.without_cuda_kernel, "CUDA kernel"


def test_instances_are_the_generator_s():
    files = {path.name: path.read_text() for path in generate_instances.FOLDER.iterdir()}
    assert files == generate_instances.instances(), "run python3 tools/generate_instances.py"


def test_an_architecture_is_named_in_few_files():
    """CONTRIBUTING's "Add an architecture" names those where one is chosen; the others say it to users."""
    files = [
        path
        for folder in ("csrc", "tools", "packing_ops")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".cpp", ".h", ".cu", ".cuh", ".py", ".md"}
    ]
    outside = [path for path in (*files, ROOT / "setup.py") if "sm90" not in path.parts]
    assert 1 < sum("sm90" in path.read_text().lower() for path in outside) <= 8
