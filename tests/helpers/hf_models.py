"""Tiny models of the families in Hugging Face transformers that the integration is tested with."""

import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")
masking_utils = pytest.importorskip("transformers.masking_utils")
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
    """transformers' maker of masks, called as versions 4 and 5 want it."""
    make = getattr(transformers.masking_utils, maker)
    names = inspect.signature(make).parameters
    given = {"attention_mask": None, CACHE: None, **given}
    if "cache_position" in names:
        given["cache_position"] = torch.arange(embeds.shape[1], device=embeds.device)
    return make(config, embeds, **given)
