"""Tiny models of the families in Hugging Face transformers that the integration is tested with."""

import inspect
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")
masking_utils = pytest.importorskip("transformers.masking_utils")
OLD = transformers.__version__.startswith("4.")  # 4.57, the oldest that is served
# The keyword of a KV cache, and the attribute of outputs: renamed in 5.24.
CACHE = "cache" if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters else "past_key_values"

_COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # scores far enough apart for masks to matter
}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
# Not transformers' default: torch 2.11 cannot compile the stand-in for its grouped_mm.
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}

FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "gemma2": ("Gemma2Config", {**_LAYERS, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {**_LAYERS, "query_pre_attn_scalar": 8}),
    "gpt_oss": ("GptOssConfig", {**_LAYERS, **_EXPERTS}),
}


def in_its_words(options):
    """Of a config: up to 4.57 it takes the scaling of RoPE apart from theta, and longrope's length beside it."""
    if not OLD or "rope_parameters" not in options:
        return options
    scaling = dict(options["rope_parameters"])
    words = {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    if scaling["rope_type"] == "longrope":
        words["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return {**words, **{name: option for name, option in options.items() if name != "rope_parameters"}}


def skip_if_attention_is_its_own(auto, config, inputs):
    """Or its masks; of models that 4.57 cannot even make under our name."""
    try:
        model = auto.from_config(config, attn_implementation="packing_ops")
    except (KeyError, ValueError):
        name = type(config).__name__
        pytest.skip(f"no attn_implementation of transformers {transformers.__version__} names attention of {name}")
    skip_if_masks_are_its_own(model, inputs)


_REFUSALS = r"one document in each row, got several|unexpected keyword argument 'position_ids'|^'packing_ops'$|attention of its own"


def skip_if_masks_are_its_own(model, inputs):
    """Many models of 4.57 ask nobody for their masks: they refuse several documents, or keep their own attention."""
    source = inspect.getsource(sys.modules[type(model).__module__])
    if "masking_utils" in source or not OLD:
        return
    if model.config._attn_implementation == "packing_ops":
        with pytest.raises((ValueError, TypeError, KeyError), match=_REFUSALS):
            model(**inputs)
    pytest.skip(f"{type(model).__name__} of transformers {transformers.__version__} makes its masks itself")


def skip_if_it_cannot_compile(family):
    if family == "gpt_oss" and OLD:
        pytest.skip("up to transformers 4.57 its experts are a loop over values, which no graph holds")


def tiny_model(family, *, attn_implementation="eager", device="cpu", dtype=torch.float32, seed=0, **overrides):
    """A causal language model with random weights, the same ones for the same seed, in train mode without cache."""
    config_name, own = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**_COMMON, "use_cache": False, **own, **overrides})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model.to(device, dtype).train()


def made_mask(maker, config, embeds, **given):
    """transformers' own maker of masks, called as versions 4 and 5 want it."""
    make = getattr(transformers.masking_utils, maker)
    names = inspect.signature(make).parameters
    given = {"attention_mask": None, CACHE: None, **given}
    if "cache_position" in names:
        given["cache_position"] = torch.arange(embeds.shape[1], device=embeds.device)
    return make(config, embeds, **given)
