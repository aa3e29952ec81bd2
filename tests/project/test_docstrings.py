"""The examples of all docstrings run and give what they say."""

import ast
import doctest
import importlib.util
import inspect
import re

import pytest
import torch
from helpers import ROOT

import packing_ops
import packing_ops.data

NEEDS = {"transformers": "transformers", "trl": "trl", "megatron": "megatron.core"}  # to import an integration
NOT_RUN = {  # lines that say +SKIP
    "packing_ops.boundaries": 1,  # xformers, which needs a GPU
    "packing_ops.integrations.unsloth": 1,  # the same
    "packing_ops.integrations.trl": 1,  # a trainer, which test_trl.py and test_first_scripts.py run
}


def prompts_of_modules():
    """{module: lines of examples in its docstrings}. From the sources: nothing is imported before a test runs."""
    found = {}
    for path in sorted((ROOT / "packing_ops").rglob("*.py")):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docs = (
            ast.get_docstring(node) or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)
        )
        prompts = sum(len(re.findall(r"^\s*>>> ", doc, re.M)) for doc in docs)
        if prompts:
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = prompts
    return found


PROMPTS = prompts_of_modules()


def test_every_public_function_has_an_example():
    public = {name: getattr(module, name) for module in (packing_ops, packing_ops.data) for name in module.__all__}
    functions = {name: value for name, value in public.items() if inspect.isfunction(value)}
    assert [name for name, function in functions.items() if ">>> " not in function.__doc__] == []


@pytest.mark.parametrize("name", PROMPTS)
def test_examples(name, tmp_path, monkeypatch):
    for host, needed in NEEDS.items():
        if f"{name}.".startswith(f"packing_ops.integrations.{host}."):
            pytest.importorskip(needed)
    if name.endswith("flash_attn.alias") and importlib.util.find_spec("flash_attn"):
        pytest.skip("flash-attn is installed, and stays in use")
    monkeypatch.chdir(tmp_path)  # some write a file
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for test in doctest.DocTestFinder().find(module, extraglobs={"torch": torch}):
        runner.run(test)
    failed, attempted = runner.summarize(verbose=False)
    assert failed == 0
    assert attempted == PROMPTS[name] - NOT_RUN.get(name, 0)
