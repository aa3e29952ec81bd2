"""Versions of transformers: the interfaces of 4.57 beside those of 5, and versions that are refused."""

import ast
import types
from pathlib import Path

import pytest
import torch
from helpers import ROOT

transformers = pytest.importorskip("transformers")

from packing_ops.integrations.transformers import masks, register, rope, versions  # noqa: E402


def as_in_4(seen):
    """masking_utils of transformers 4.57, as far as it is called; what comes is written down."""

    def _preprocess_mask_arguments(
        config, input_embeds, attention_mask, cache_position, past_key_values, position_ids, layer_idx
    ):
        seen.append((attention_mask, cache_position, past_key_values, position_ids, layer_idx))
        return False, attention_mask, None, input_embeds.shape[1], 0

    def sdpa_mask(
        batch_size, cache_position, kv_length, kv_offset=0, mask_function=None, attention_mask=None, **kwargs
    ):
        seen.append((cache_position, kwargs["allow_is_causal_skip"]))
        q, k = cache_position[:, None], torch.arange(kv_length)[None] + kv_offset
        rows = [mask_function(torch.tensor(row), torch.tensor(0), q, k) for row in range(batch_size)]
        return torch.stack(rows)[:, None]

    return types.SimpleNamespace(_preprocess_mask_arguments=_preprocess_mask_arguments, sdpa_mask=sdpa_mask)


@pytest.fixture
def four(monkeypatch):
    seen = []
    fake = as_in_4(seen)
    monkeypatch.setattr(masks, "masking_utils", fake)
    return fake, seen


def causal_mask_function(row, head, q, k):
    return k <= q


def test_masks_of_4_57(four):
    register()
    fake, seen = four
    patch = masks.patch_of(fake)
    patch.apply()
    prepared = fake._preprocess_mask_arguments
    patch.apply()
    assert fake._preprocess_mask_arguments is prepared
    config = types.SimpleNamespace(_attn_implementation="packing_ops", model_type="llama")
    embeds, positions = torch.zeros(1, 5, 8), torch.tensor([[0, 1, 0, 1, 2]])
    slots = torch.arange(5)
    given = config, embeds, None, slots, None, positions, 0

    def make(**named):
        early, mask, _, kv_length, kv_offset = prepared(*given)
        assert (early, mask, kv_length, kv_offset) == (False, None, 5, 0)
        assert seen.pop() == (None, slots, None, None, 0)
        same = {"batch_size": 1, "mask_function": causal_mask_function, "attention_mask": mask, "config": config}
        return masks.mask_function()(**same, **named)

    pattern = make(cache_position=slots, kv_length=5, allow_is_causal_skip=True)
    assert isinstance(pattern, masks.MaskPattern)
    assert (pattern.causal, pattern.length, pattern.position_ids is positions) == (True, 5, True)
    for length, first, skip in ((5, 0, False), (7, 2, True)):  # something is mixed in; keys of a cache
        mask = make(cache_position=slots + first, kv_length=length, allow_is_causal_skip=skip)
        apart = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).tril().bool()
        assert torch.equal(mask[0, 0, :, first:], apart)
        assert mask[0, 0, :2, :first].all()
        assert not mask[0, 0, 2:, :first].any()
        assert seen.pop()[1] is False


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
    masks.patch_of(fake).apply()
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
        assert masks.here().mask_arguments.position_ids is given["position_ids"]
    masks.here().mask_arguments = None


def test_rope_functions_of_4_57(monkeypatch):
    """Positions are the fifth argument there, which nobody reads; some models pass them."""
    module = rope.importlib.import_module("transformers.models.llama.modeling_llama")
    stock = module.apply_rotary_pos_emb

    def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        return stock(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    patch = rope.new_patch(module, "apply_rotary_pos_emb")
    patch.apply()
    q, k, positions = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8), torch.arange(5)[None]
    angles = (positions[..., None] * torch.tensor([1.0, 0.1, 0.01, 0.001])).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    tables = rope.Tables(cos)
    turned = [x.transpose(1, 2).contiguous() for x in (q, k)]  # heads after tokens: unsqueeze_dim 2
    for first in (cos, tables):
        expected = stock(q, k, cos, sin)
        torch.testing.assert_close(module.apply_rotary_pos_emb(q, k, first, sin, positions), expected)
        expected = stock(*turned, cos, sin, unsqueeze_dim=2)
        torch.testing.assert_close(module.apply_rotary_pos_emb(*turned, first, sin, positions, 2), expected)
        torch.testing.assert_close(module.apply_rotary_pos_emb(*turned, first, sin, unsqueeze_dim=2), expected)


def test_another_way_to_prepare_masks_is_refused(monkeypatch):
    monkeypatch.setattr(masks, "PATCH", masks.patch_of(types.SimpleNamespace()))
    with pytest.raises(
        ImportError, match=r"^transformers: packing_ops.* serves 4\.57 and later .*, transformers \d.* is"
    ):
        register("another_name")
    assert "another_name" not in masks.NAMES


@pytest.mark.parametrize("version", ["4.56.2", "4.9", "3.0.0.dev0"])
def test_an_old_version_is_refused(version):
    with pytest.raises(
        ImportError, match=rf"serves 4\.57 and later .*transformers {version} is here.*'transformers>=4\.57'"
    ):
        versions.check(version)
    for served in ("4.57.0", "4.60", "5.0.0rc1", transformers.__version__):
        versions.check(served)


def test_the_extra_asks_for_what_is_served():
    project = (ROOT / "pyproject.toml").read_text()
    assert f'hf = ["transformers>={versions.OLDEST}"' in project


@pytest.mark.parametrize("folder", ["transformers", "flash_attn"])
def test_no_import_inside_a_function(folder):
    """torch.compile stops at one (torch 2.11: `from transformers import x`, transformers is no plain module)."""
    for path in Path(versions.__file__).parent.with_name(folder).rglob("*.py"):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        functions = [node for node in functions if node.name != "__init__"]  # runs before a forward
        inside = {type(node) for function in functions for node in ast.walk(function)}
        assert not inside & {ast.Import, ast.ImportFrom}, path
