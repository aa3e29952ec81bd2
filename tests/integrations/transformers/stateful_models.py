"""Tiny causal language models with layers that carry a state along the sequence, one of each kind of layer."""

import torch
import transformers

COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "mlp_only_layers": [0, 1],
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
# gated delta net, convolution, Mamba 1 next to and without attention, Mamba 2, RG-LRU, linear attention, ...
FAMILIES = {
    "qwen3_next": _DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_dim": 32, "conv_dim": 32},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 9,
        "expert_layer_offset": 8,
        "use_mamba_kernels": False,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "bamba": {"attn_layer_indices": [1], "attn_rotary_emb": 4, "mamba_chunk_size": 8, **_MAMBA},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 16},
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"],
        "block_size": 4,
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
    },
    "mamba": {"state_size": 8, "use_mambapy": False},
    "rwkv": {"attention_hidden_size": 32},
    "xlstm": {"num_heads": 4, "num_blocks": 2, "chunk_size": 8},
    "zaya": {
        "layer_types": ["hybrid", "hybrid_sliding"],
        "sliding_window": 6,
        "num_experts": 1,
        "router_hidden_size": 8,
    },
}
MORE_HYBRIDS = {  # with the layers of qwen3_next and of bamba
    "qwen3_5_text": _DELTA,
    "olmo_hybrid": _DELTA,
    "falcon_h1": {"mamba_chunk_size": 8, "mamba_d_ssm": 64, **_MAMBA},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_chunk_size": 8, "num_local_experts": 0,
                         "shared_intermediate_size": 48, **_MAMBA},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16,
                   "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "mamba_headdim": 16, "mamba_ngroups": 1,
               "n_mamba_heads": 4, "chunk_size": 8, "num_mem_blocks": 1, "attention_head_dim": 16},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "dense"],
                    "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
                    "linear_head_dim": 8, "linear_num_heads": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
}  # fmt: skip
SERVED = [name for name in FAMILIES if name in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES]


def passes_keywords(family):
    """Whether its layers pass keywords on to their functions: those of LFM2 do from transformers 5.22 on."""
    return family != "lfm2" or tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 22)


def stateful_model(family, *, attn_implementation="packing_ops", device="cpu", seed=0, **more):
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **(FAMILIES | MORE_HYBRIDS)[family], **more})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(device).train()
