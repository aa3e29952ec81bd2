"""The rules of packing_ops.contrib: what it imports, who imports it, when its parts leave."""

import ast
import importlib

import pytest
from helpers import ROOT
from helpers.public_names import CONTRIB, HOSTS, public_names

from packing_ops import contrib
from packing_ops._runtime.library import VERSION
from packing_ops.integrations import adapters

PACKAGE = ROOT / "packing_ops"
FILES = sorted((PACKAGE / "contrib").rglob("*.py"))
MAY_SEE = {"packing_ops", "packing_ops.data", "packing_ops.parallel", *(f"packing_ops.integrations.{h}" for h in HOSTS)}


def imports(text):
    """(module, name) of each import of packing_ops in a file; the name is empty where a module is imported whole."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names if each.name.partition(".")[0] == "packing_ops")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "packing_ops":
            yield from ((node.module, each.name) for each in node.names)


def not_public(text, own):
    """What a file of the part ``own`` of contrib imports against the rule."""
    shown = {name: {*public_names(name)} for name in {module for module, _ in imports(text)} & MAY_SEE}
    shown["packing_ops.integrations.adapters"] = {*adapters.__all__}
    rest = [(module, name) for module, name in imports(text) if not f"{module}.{name}.".startswith(f"{own}.")]
    return [f"{module}.{name}" for module, name in rest if name not in shown.get(module, set())]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE / "contrib").as_posix())
def test_contrib_imports_public_names_alone(path):
    part = path.relative_to(PACKAGE / "contrib").parts[0].removesuffix(".py")
    allowed = ["packing_ops._runtime.lazy.lazy_modules"] if part == "__init__" else []  # how every package is lazy
    assert not_public(path.read_text(), f"packing_ops.contrib.{part}") == allowed


def test_a_private_import_is_seen():
    text = """
import packing_ops
from packing_ops import PackedMetadata, metadata
from packing_ops._runtime.arguments import integer
from packing_ops.integrations.adapters import integer, nothing
from packing_ops.contrib.unsloth.rope import x
from packing_ops.contrib.ring_flash_attn import y
from packing_ops.data._examples import Documents
"""
    assert not_public(text, "packing_ops.contrib.unsloth") == [
        "packing_ops.",
        "packing_ops.metadata",
        "packing_ops._runtime.arguments.integer",
        "packing_ops.integrations.adapters.nothing",
        "packing_ops.contrib.ring_flash_attn.y",
        "packing_ops.data._examples.Documents",
    ]


def test_every_name_of_adapters_is_used():
    used = {
        name
        for path in FILES
        for module, name in imports(path.read_text())
        if module == "packing_ops.integrations.adapters"
    }
    assert used == {*adapters.__all__}


def test_only_old_names_import_contrib():
    outside = [path for path in PACKAGE.rglob("*.py") if path not in FILES]
    found = {path for path in outside for module, _ in imports(path.read_text()) if "contrib" in module}
    assert found == {PACKAGE / "integrations" / f"{name}.py" for name in CONTRIB}


@pytest.mark.parametrize("name", CONTRIB)
def test_old_names_show_the_same(name):
    old = importlib.import_module(f"packing_ops.integrations.{name}")
    assert {public: getattr(old, public) for public in old.__all__} == public_names(f"packing_ops.contrib.{name}")


def test_nothing_stays_longer_than_it_says():
    assert {*contrib.LEAVES} == {*CONTRIB}
    number = tuple(map(int, VERSION.split(".")))
    late = [name for name, (version, _) in contrib.LEAVES.items() if tuple(map(int, version.split("."))) <= number]
    assert late == []
