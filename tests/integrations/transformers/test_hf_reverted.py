"""revert_packing_ops leaves every module as it was: its class, its attributes, its hooks."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

import causal_families  # noqa: E402
import stateful_models  # noqa: E402
from helpers.hf_models import tiny_model  # noqa: E402
from helpers.hf_towers import tiny_tower_model  # noqa: E402

from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops  # noqa: E402


def attributes_of(model):
    """Of every module its class and vars(), tables such as those of hooks item by item."""
    return [
        (
            type(module),
            {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()},
        )
        for module in model.modules()
    ]


def llama():
    return tiny_model("llama")


def llama_with_accelerate():
    """Its hooks keep a bound forward of each module."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny_model("llama")
    for module in model.modules():
        if "Norm" in type(module).__name__:
            hooks.add_hook_to_module(module, hooks.ModelHook())
    return model


def qwen2_vl():
    return tiny_tower_model("qwen2_vl")


def guarded():
    return causal_families.model_of("gptj", None)


def with_a_state():
    return stateful_models.stateful_model("lfm2", attn_implementation="sdpa")


@pytest.mark.filterwarnings("ignore:apply_packing_ops")
@pytest.mark.parametrize("make", [llama, llama_with_accelerate, qwen2_vl, guarded, with_a_state])
def test_a_model_is_as_before(make):
    model = make()
    before = attributes_of(model)
    for _ in range(2):
        apply_packing_ops(model, rms_norm=True, fused_loss=True, fp32_cos_sin=True)
    if make is with_a_state:  # whose layers are swapped by the first packed row
        swapped = attributes_of(model)
        model(torch.arange(1, 7)[None], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)
        assert attributes_of(model) != swapped
    assert attributes_of(model) != before
    revert_packing_ops(model)
    assert attributes_of(model) == before
