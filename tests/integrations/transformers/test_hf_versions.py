"""Versions of transformers: names that changed, and versions that are refused."""

import ast
import types
from pathlib import Path

import pytest
import torch
from helpers import ROOT

transformers = pytest.importorskip("transformers")

from packing_ops.integrations._patching import Patch  # noqa: E402
from packing_ops.integrations.transformers import masks, register, versions  # noqa: E402

OF_MASKS = masks.PATCH.name, masks.PATCH.make


@pytest.mark.parametrize("cache", ["cache", "past_key_values"])
def test_the_name_of_the_cache(cache):
    """cache from 5.24 on, past_key_values before; Gemma 3 and 4 prepare masks by keywords."""
    seen = []
    code = f"""def _preprocess_mask_arguments(
    config, inputs_embeds, attention_mask, {cache}, position_ids, layer_idx, encoder_hidden_states=None
):
    seen.append({cache})
    return False, attention_mask, None, 5, 5, 0, 0
"""
    fake = types.SimpleNamespace()
    exec(code, {"seen": seen}, vars(fake))
    Patch(fake, *OF_MASKS).apply()
    config = types.SimpleNamespace(_attn_implementation="packing_ops", model_type="llama")
    kept = transformers.DynamicCache()
    given = {"attention_mask": None, cache: kept, "position_ids": torch.arange(5)[None], "layer_idx": 0}
    register()
    for prepare in (
        lambda: fake._preprocess_mask_arguments(config, torch.zeros(1, 5, 8), *given.values()),
        lambda: fake._preprocess_mask_arguments(config=config, inputs_embeds=torch.zeros(1, 5, 8), **given),
    ):
        prepare()
        assert seen.pop() is kept
        assert masks.now.mask_arguments.position_ids is given["position_ids"]
    masks.now.mask_arguments = None


def test_another_way_to_prepare_masks_is_refused(monkeypatch):
    monkeypatch.setattr(masks, "PATCH", Patch(types.SimpleNamespace(), *OF_MASKS))
    with pytest.raises(
        ImportError, match=r"^transformers: packing_ops.* serves 5\.17 and later .*, transformers \d.* is"
    ):
        register("another_name")
    assert "another_name" not in masks.NAMES


@pytest.mark.parametrize("version", ["5.16.2", "5.9", "4.57.6", "3.0.0.dev0"])
def test_an_old_version_is_refused(version):
    with pytest.raises(
        ImportError, match=rf"serves 5\.17 and later .*transformers {version} is here.*'transformers>=5\.17'"
    ):
        versions.check(version)
    for served in ("5.17.0", "5.20.0rc1", "6.0", transformers.__version__):
        versions.check(served)


def test_the_extra_asks_for_what_is_served():
    project = (ROOT / "pyproject.toml").read_text()
    assert f'hf = ["transformers>={versions.OLDEST}"' in project


def test_the_pages_name_what_was_run():
    page, install = ((ROOT / "docs" / name).read_text() for name in ("transformers-models.md", "install.md"))
    assert f"transformers {versions.OLDEST}, the oldest that is served" in page
    assert f"Compared: {versions.OLDEST}, 5.23 and {versions.NEWEST} on the CPU" in install
    assert f"and {versions.NEWEST}," in page


@pytest.mark.parametrize("folder", ["transformers", "flash_attn"])
def test_no_import_inside_a_function(folder):
    """torch.compile stops at one (torch 2.11: `from transformers import x`, transformers is no plain module)."""
    for path in Path(versions.__file__).parent.with_name(folder).rglob("*.py"):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        functions = [node for node in functions if node.name != "__init__"]  # runs before a forward
        inside = {type(node) for function in functions for node in ast.walk(function)}
        assert not inside & {ast.Import, ast.ImportFrom}, path
