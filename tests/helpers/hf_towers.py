"""Tiny models with a vision tower, whose attention is given cu_seqlens."""

import functools

import torch
import transformers

TOKENS = {"image_token_id": 151, "video_token_id": 152, "vision_start_token_id": 153, "vision_end_token_id": 154}
TEXT = {
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
TOWERS = {  # family: (prefix of its classes, config of the tower)
    "qwen2_vl": ("Qwen2VL", {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
        | {"window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
        | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_5": (
        "Qwen3_5",
        {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
        | {"num_position_embeddings": 64},
    ),
    "glm4v": (
        "Glm4v",
        {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
        | {"image_size": 32},
    ),
}
MORE_TEXT = {
    "qwen3_5": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
        "rope_parameters": {**TEXT["rope_parameters"], "partial_rotary_factor": 1.0},
    },
}


def tiny_tower_model(family):
    prefix, tower = TOWERS[family]
    config = getattr(transformers, prefix + "Config")(
        text_config={**TEXT, **MORE_TEXT.get(family, {})},
        vision_config={**tower, "patch_size": 4, "temporal_patch_size": 2},
        **TOKENS,
    )
    torch.manual_seed(0)
    model = getattr(transformers, prefix + "ForConditionalGeneration")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@functools.cache
def _takes_frames(family) -> bool:
    tower = tiny_tower_model(family).model.visual
    try:
        tower(torch.zeros(32, 96), grid_thw=torch.tensor([[2, 4, 4]]))
    except IndexError:
        return False
    return True


def frames_of(family, grid):
    """Returns the grid, with one frame in each entry where the stock tower takes no video: GLM-4V's in transformers
    5.17.
    """
    return grid if _takes_frames(family) else [[1, *sizes] for _, *sizes in grid]
