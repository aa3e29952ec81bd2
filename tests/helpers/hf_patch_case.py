"""Tiny models of every family that apply_packing_ops knows, a packed row for them, and what results."""

import gc
import importlib
import sys
from importlib.util import find_spec

import pytest
import torch
import transformers

from packing_ops.integrations import _patching, _rope_trial
from packing_ops.integrations.transformers import rope

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
FAMILIES = {  # name: (classes' prefix, suffix of the model, more of the config)
    "gemma": ("Gemma", "ForCausalLM", {}),
    "gemma2": ("Gemma2", "ForCausalLM", {**LAYERS, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3", "ForCausalLM", {**LAYERS, "query_pre_attn_scalar": 16}),
    "glm": ("Glm", "ForCausalLM", {}),
    "glm4": ("Glm4", "ForCausalLM", {}),
    "gpt_oss": ("GptOss", "ForCausalLM", {**EXPERTS, **LAYERS}),
    "llama": ("Llama", "ForCausalLM", {}),
    "ministral": ("Ministral", "ForCausalLM", LAYERS),
    "mistral": ("Mistral", "ForCausalLM", {"sliding_window": 4}),
    "mixtral": ("Mixtral", "ForCausalLM", EXPERTS),
    "phi": ("Phi", "ForCausalLM", {}),
    "phi3": ("Phi3", "ForCausalLM", {"partial_rotary_factor": 0.5}),  # as many entries as half a head
    "qwen2": ("Qwen2", "ForCausalLM", {}),
    "qwen2_5_vl": ("Qwen2_5_VL", "TextModel", {"rope_parameters": MROPE}),
    "qwen2_moe": ("Qwen2Moe", "ForCausalLM", EXPERTS),
    "qwen2_vl": ("Qwen2VL", "TextModel", {"rope_parameters": MROPE}),
    "qwen3": ("Qwen3", "ForCausalLM", {}),
    "qwen3_moe": ("Qwen3Moe", "ForCausalLM", EXPERTS),
    "qwen3_vl": ("Qwen3VL", "TextModel", {"rope_parameters": {**MROPE, "mrope_section": [4, 2, 2]}}),
    "stablelm": ("StableLm", "ForCausalLM", {}),
}
KNOWN = {name for name in FAMILIES if find_spec(f"transformers.models.{name}")}
NAMED = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss"]
MULTIMODAL = [name for name in FAMILIES if name.endswith("_vl")]
LENGTHS = [5, 3, 8]


def module_of(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def tiny(family, device="cpu", **more):
    """Random weights everywhere: norms of ones and zeros would not tell the formulas apart."""
    prefix, suffix, own = FAMILIES[family]
    kind = "TextConfig" if suffix == "TextModel" or family == "gemma3" else "Config"
    config = getattr(transformers, prefix + kind)(**{**SHAPE, **own, **more})
    torch.manual_seed(0)
    model = getattr(module_of(family), prefix + suffix)(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.to(device)


def tiny_gpt2():
    config = transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=64)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def packed(device, lengths=LENGTHS, vocabulary=64):
    torch.manual_seed(1)
    input_ids = torch.randint(1, vocabulary, (1, sum(lengths)), device=device)
    position_ids = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    return {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}


def outputs(model, inputs):
    found = model(**inputs)
    return found.logits if "logits" in found else found.last_hidden_state


def gradients(model, inputs):
    model.zero_grad()
    found = outputs(model, inputs)
    torch.manual_seed(2)
    (found * torch.randn_like(found)).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_near(actual, expected):
    """fp32 1e-5 of the largest value."""
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * scale)


@pytest.fixture(autouse=True, scope="module")
def models_of_other_tests_are_gone():
    """And their swaps with them."""
    gc.collect()


@pytest.fixture(autouse=True)
def nothing_left_in_modules():
    """Whatever a test did: once it has reverted, the modelling modules are the stock ones."""

    def names_of(family):  # less what Python and torch.compile keep there
        return {name: value for name, value in vars(module_of(family)).items() if not name.startswith("__")}

    _patching.revert_left()  # of models of other tests that went while something compiled
    stock = {family: names_of(family) for family in KNOWN}
    yield
    for family, names in stock.items():
        now = names_of(family)
        changed = [name for name in names.keys() | now.keys() if names.get(name) is not now.get(name)]
        assert changed == [], family


@pytest.fixture(name="calls")
def calls_of_our_rope(monkeypatch):
    """Counts the calls of our rope: equal outputs would not show that it ran."""
    count = []

    def counted(*args, **kwargs):
        count.append(1)
        return rotate(*args, **kwargs)

    for family in KNOWN:
        module_of(family)  # imported
    for name in [name for name in sys.modules if name.startswith(rope.HOSTS) and ".modeling_" in name]:
        rope.patches_of(name)  # tried before anything is counted
    rotate = _rope_trial.apply_rotary_qk
    monkeypatch.setattr(_rope_trial, "apply_rotary_qk", counted)
    return count
