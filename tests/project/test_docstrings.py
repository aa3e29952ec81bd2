"""The examples of all docstrings run and give what they say, or say why they do not run."""

import ast
import doctest
import importlib.util
import inspect
import re

import pytest
import torch
from helpers import ROOT
from helpers.public_names import NEEDS, PUBLIC, public_names

# Shown in the examples of what they undo.
UNDO = {"revert_packing_ops", "revert_pack_dataset", "revert_rope", "revert_router", "revert_registration"}


def prompts_of_modules():
    """{module: lines of examples in its docstrings, those that say +SKIP}. From the sources: nothing is imported."""
    found = {}
    for path in sorted((ROOT / "packing_ops").rglob("*.py")):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))
        prompts = re.findall(r"^\s*>>> (.*)", "\n".join(ast.get_docstring(node) or "" for node in nodes), re.M)
        if prompts:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found[name] = prompts, [line for line in prompts if "+SKIP" in line]
    return found


PROMPTS = prompts_of_modules()


def functions_of(name):
    """{name: public function} of a module. A test whose module needs what is not installed is skipped."""
    for host, needed in NEEDS.items():
        if name.endswith(host):
            pytest.importorskip(needed)
    return {n: value for n, value in public_names(name).items() if inspect.isfunction(value)}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_function_has_an_example(name):
    functions = functions_of(name)
    without = [n for n, function in functions.items() if ">>> " not in (function.__doc__ or "")]
    assert [n for n in without if n not in UNDO] == []
    calls = [line for prompts, _ in PROMPTS.values() for line in prompts]
    assert [n for n in without if not any(f"{n}(" in line for line in calls)] == []


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
    found = doctest.DocTestFinder().find(module, extraglobs={"torch": torch})
    for test in {test.docstring: test for test in found}.values():  # dynamo leaves copies of functions in their modules
        runner.run(test)
    failed, attempted = runner.summarize(verbose=False)
    assert failed == 0
    prompts, skipped = PROMPTS[name]
    assert attempted == len(prompts) - len(skipped)


def test_what_is_not_run_says_why():
    skipped = [line for _, lines in PROMPTS.values() for line in lines]
    assert len(skipped) == 26
    assert [line for line in skipped if not re.search(r"# needs \w.* # doctest: \+SKIP$", line)] == []


# They take no tensors or only ask something; or put something into a host, and take it out again.
WITHOUT_BLOCK = {
    "build_info", "is_invariant", "image_sizes", "packed_alignment", "validate_batch_sizes",
    "select_attention_backend", "info", "declare", "replay_routing",
}  # fmt: skip
SETS_UP = re.compile(
    "(un)?(register|patch)|apply_|revert_|enable_|disable_|install_|remove_|substitute_|restore_|update_|use_"
)
BLOCK = re.compile(r"\n\nDeterminism: .+\nSynchronises: .+\nMemory: .+\nGradients: .+\Z", re.S)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_end_with_their_promises(name):
    """Determinism, Synchronises, Memory, Gradients: the last four lines, so that a reader finds them."""
    functions = functions_of(name)
    without = {n for n, function in functions.items() if not BLOCK.search(inspect.getdoc(function))}
    assert {n for n in without if not SETS_UP.match(n)} == WITHOUT_BLOCK & {*functions}
