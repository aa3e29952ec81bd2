"""Tiny models that read images, and examples for them as their processors make them."""

import torch
import transformers

from helpers.hf_towers import TOWERS, tiny_tower_model

# --- Gemma ---

_GEMMA = {
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "max_position_embeddings": 64,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}  # fmt: skip
_SIGLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def _gemma3():
    tokens = {"mm_tokens_per_image": 4, "boi_token_index": 153, "eoi_token_index": 154, "image_token_index": 151}
    return transformers.Gemma3Config(
        text_config=_GEMMA, vision_config={**_SIGLIP, "image_size": 8, "patch_size": 2}, **tokens
    )


def _gemma4():
    own = {"use_bidirectional_attention": "vision", "global_head_dim": 8, "hidden_size_per_layer_input": 4}
    vision = {**_SIGLIP, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 2, "pooling_kernel_size": 2}
    tokens = {"boi_token_id": 153, "eoi_token_id": 154, "image_token_id": 151, "video_token_id": 152}
    return transformers.Gemma4Config(
        text_config={**_GEMMA, **own, "vocab_size_per_layer_input": 200},
        vision_config={**vision, "position_embedding_size": 16},
        audio_config=None,
        **tokens,
        audio_token_id=155,
    )


GEMMA = {"gemma3": _gemma3, "gemma4": _gemma4}
IMAGE_FAMILIES = [*TOWERS, *GEMMA]


def tiny_image_model(family):
    if family in TOWERS:
        return tiny_tower_model(family)
    config = GEMMA[family]()
    torch.manual_seed(0)
    model = getattr(transformers, family.capitalize() + "ForConditionalGeneration")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


# --- examples ---

# Of each example: numbers of text tokens, and sizes (t, h, w) of images, in patches. The third begins with an image and
# the second ends with one: two blocks of neighbouring tokens that do not see each other.
EXAMPLES = [[3, (1, 4, 6), 4], [2, (1, 2, 2)], [(1, 4, 4), 5, (1, 2, 4), 2], [6]]


def example_of(family, number, labels=True):
    """A dict of lists and tensors."""
    draw = torch.Generator().manual_seed(number)
    grids = [part for part in EXAMPLES[number] if isinstance(part, tuple)]
    if family in GEMMA:
        grids = [(1, 4, 4)] * len(grids)  # images of one size, of 4 tokens
    ids, images = [], iter(grids)
    for part in EXAMPLES[number]:
        if isinstance(part, tuple):
            t, h, w = next(images)
            ids += [151] * (t * h * w // 4)
        else:
            ids += torch.randint(3, 100, (part,), generator=draw).tolist()
    example = {"input_ids": ids, "labels": [-100 if i == 0 or t == 151 else t for i, t in enumerate(ids)]}
    types = [int(token == 151) for token in ids]
    example["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = types
    if grids:
        example |= _pixels(family, grids, draw)
    return example if labels else {name: value for name, value in example.items() if name != "labels"}


def _pixels(family, grids, draw):
    if family == "gemma3":
        return {"pixel_values": torch.randn(len(grids), 3, 8, 8, generator=draw)}
    if family == "gemma4":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1)
        return {
            "pixel_values": torch.rand(len(grids), 16, 12, generator=draw),
            "image_position_ids": places.expand(len(grids), -1, -1),
        }
    patches = sum(t * h * w for t, h, w in grids)
    return {"pixel_values": torch.randn(patches, 96, generator=draw), "image_grid_thw": torch.tensor(grids)}


def video_example_of(family):
    """A video of two frames, then an image, as Qwen2-VL's and 2.5-VL's processors make them."""
    draw, video, image = torch.Generator().manual_seed(9), (2, 4, 4), (1, 2, 4)
    ids = [7, 8, *[152] * 8, 9, *[151] * 2, 11, 12]
    example = {
        "input_ids": ids,
        "labels": [-100 if i == 0 or token in (151, 152) else token for i, token in enumerate(ids)],
        "mm_token_type_ids": [{151: 1, 152: 2}.get(token, 0) for token in ids],
        "pixel_values_videos": torch.randn(32, 96, generator=draw),
        "video_grid_thw": torch.tensor([video]),
        "pixel_values": torch.randn(8, 96, generator=draw),
        "image_grid_thw": torch.tensor([image]),
    }
    return example | ({"second_per_grid_ts": [1.5]} if family == "qwen2_5_vl" else {})
