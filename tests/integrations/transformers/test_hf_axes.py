"""Rows of text and images, whose position_ids have three axes: which documents they tell, and the training they
give.
"""

import importlib
import pathlib
import re

import pytest
import torch

transformers = pytest.importorskip("transformers")

from helpers.hf_towers import TOWERS, frames_of  # noqa: E402
from stateful_models import COMMON, FAMILIES  # noqa: E402
from test_hf_vision import assert_near, tiny_tower_model  # noqa: E402

import packing_ops as po  # noqa: E402
from packing_ops.integrations.transformers import apply_packing_ops, documents, register  # noqa: E402

GRIDS = [[[1, 4, 6]], [], [[1, 2, 2], [2, 4, 4]]]  # of the images of each document


def document(number, device, grids=GRIDS):
    images = [each for t, h, w in grids[number] for each in (153, *[151] * (t * h * w // 4), 154, 7)]
    return torch.tensor([[5, *images, *range(20, 29)]], device=device)


def batch(ids, grids, **more):
    given = {"input_ids": ids, "labels": ids.masked_fill(ids > 150, -100), "use_cache": False, **more}
    if grids:
        grid = torch.tensor(grids, device=ids.device)
        pixels = torch.linspace(-3, 3, int(grid.prod(1).sum()) * 96, device=ids.device).sin()
        given |= {"pixel_values": pixels.view(-1, 96), "image_grid_thw": grid}
        given["mm_token_type_ids"] = (ids == 151).long()
    return given


def training(model, batches):
    model.zero_grad()
    total = 0.0
    for each in batches:
        model.model.rope_deltas = None
        loss = model(**each).loss * (each["labels"][:, 1:] != -100).sum()
        loss.backward()
        total += loss.detach()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def axes_of(model, ids, grids):
    if not grids:
        return torch.arange(ids.shape[1], device=ids.device).expand(3, 1, -1)
    grid = torch.tensor(grids, device=ids.device)
    return model.model.get_rope_index(ids, mm_token_type_ids=(ids == 151).long(), image_grid_thw=grid)[0]


@pytest.mark.parametrize("family", TOWERS)
def test_documents_of_text_and_images_train_as_each_alone(family, device, monkeypatch):
    """By axes that begin at 0 again, by text positions in front of them, by cu_seq_lens_q and by a mask's numbers."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # torch's default, in the convolution over pixels
    grids = [frames_of(family, each) for each in GRIDS]
    model, documents = tiny_tower_model(family).to(device), [document(i, device, grids) for i in range(3)]
    alone = [batch(ids, each) for ids, each in zip(documents, grids, strict=True)]
    row = batch(torch.cat(documents, 1), grids[0] + grids[2])
    pixels = [each["pixel_values"] for each in alone if "pixel_values" in each]
    row["pixel_values"] = torch.cat(pixels)
    wanted, wanted_gradients = training(model, alone)
    metadata = po.PackedMetadata.from_lengths([ids.shape[1] for ids in documents], device=device)
    row["labels"] = po.mask_boundary_labels(row["labels"][0], metadata.cu_seqlens)[None]
    axes = torch.cat([axes_of(model, *each) for each in zip(documents, grids, strict=True)], 2)
    numbers = torch.repeat_interleave(torch.arange(1, 4, device=device), metadata.cu_seqlens.diff())[None]
    apply_packing_ops(model)
    for more in (
        {"position_ids": axes},
        {"position_ids": torch.cat([metadata.position_ids[None, None], axes])},
        {"cu_seq_lens_q": metadata.cu_seqlens, "cu_seq_lens_k": metadata.cu_seqlens},
        {"position_ids": axes, "attention_mask": numbers},
        # Positions of text: the model is asked for the axes of each document.
        {"position_ids": metadata.position_ids[None]},
        {"position_ids": metadata.position_ids[None], **metadata.to_transformers()},
        {"position_ids": metadata.position_ids[None], "attention_mask": numbers},
    ):
        found, gradients = training(model, [{**row, **more}])
        assert_near(found, wanted)
        assert gradients.keys() == wanted_gradients.keys()
        for name, gradient in gradients.items():
            assert_near(gradient, wanted_gradients[name])


@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_padded_rows_with_images_in_one_of_them(side, device):
    """Padding has zeros on all axes too, and starts no document."""
    model, documents = tiny_tower_model("qwen3_vl").to(device), [document(i, device) for i in range(3)]
    apply_packing_ops(model)
    axes = [axes_of(model, *each) for each in zip(documents, GRIDS, strict=True)]
    first, other = torch.cat([documents[0], documents[2]], 1), documents[1]
    slots = torch.arange(other.shape[1], device=device)
    slots += {"right": 0, "left": 1, "inside": slots >= 4}[side] * (first.shape[1] - other.shape[1])
    ids, mask, positions = first.new_zeros(2, first.shape[1]), torch.zeros_like(first), axes[0].new_zeros(3, 2, 0)
    ids[0], ids[1, slots], mask[0, slots] = first, other, 1
    positions = torch.zeros(3, *ids.shape, dtype=torch.long, device=device)
    positions[:, :1], positions[:, 1:, slots] = torch.cat([axes[0], axes[2]], 2), axes[1]
    row = batch(
        ids, GRIDS[0] + GRIDS[2], attention_mask=torch.cat([torch.ones_like(mask), mask]), position_ids=positions
    )
    alone = [batch(each, grids) for each, grids in zip(documents, GRIDS, strict=True)]
    row["pixel_values"] = torch.cat([alone[0]["pixel_values"], alone[2]["pixel_values"]])
    with torch.no_grad():
        found = model(**row).logits
        model.model.rope_deltas = None
        wanted = [model(**each).logits[0] for each in alone]
    assert_near(torch.cat([found[0], found[1, slots]]), torch.cat([wanted[0], wanted[2], wanted[1]]))


def test_padded_rows_get_axes_of_their_documents(device):
    """By positions of text in several rows, with padding behind and between."""
    model, documents = tiny_tower_model("qwen3_vl").to(device), [document(i, device) for i in range(3)]
    alone = [batch(ids, grids) for ids, grids in zip(documents, GRIDS, strict=True)]
    apply_packing_ops(model)
    first = torch.cat([documents[0], documents[1]], 1)
    ids = first.new_zeros(2, first.shape[1])
    mask, positions = torch.zeros_like(ids), torch.zeros_like(ids)
    ids[0], mask[0] = first, 1
    positions[0] = torch.cat([torch.arange(each.shape[1]) for each in documents[:2]])
    slots = torch.arange(documents[2].shape[1], device=device) + 1
    slots[3:] += 1
    ids[1, slots], mask[1, slots], positions[1, slots] = documents[2], 1, torch.arange(len(slots), device=device)
    row = batch(ids, GRIDS[0] + GRIDS[2], attention_mask=mask, position_ids=positions)
    row["pixel_values"] = torch.cat([alone[0]["pixel_values"], alone[2]["pixel_values"]])
    with torch.no_grad():
        found = model(**row).logits
        model.model.rope_deltas = None
        wanted = [model(**each).logits[0] for each in alone]
    assert_near(torch.cat([found[0], found[1, slots]]), torch.cat(wanted))


def test_axes_that_cannot_be_asked_for_are_named(device):
    model, ids = tiny_tower_model("qwen2_vl").to(device), document(0, device)
    apply_packing_ops(model)
    row = batch(ids, GRIDS[0], position_ids=torch.arange(ids.shape[1], device=device)[None])
    del row["mm_token_type_ids"]
    with pytest.raises(
        ValueError, match=r"position_ids: expected several axes beside image_grid_thw.*mm_token_type_ids"
    ):
        model(**row)
    embeds = model.get_input_embeddings()(row.pop("input_ids"))
    types = torch.zeros_like(ids)
    with pytest.raises(ValueError, match=r"position_ids: expected several axes .* without input_ids"):
        model(**row, inputs_embeds=embeds, mm_token_type_ids=types)


@pytest.mark.skipif(not hasattr(transformers, "HunYuanVLConfig"), reason="a later transformers has it")
@pytest.mark.parametrize("told", ["position_ids", "cu_seq_lens_q", "attention_mask"])
@torch.no_grad()
def test_images_that_a_model_numbers_along_the_row(told, device):
    """HunYuan's: their axes do not grow with the row, so each document's are asked for however documents are given."""
    text = {**COMMON, "vocab_size": 200, "head_dim": 8, "rope_parameters": rope(1, 1, 1, 1)}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    vision |= dict.fromkeys(("out_hidden_size", "text_hidden_size"), text["hidden_size"]) | {"patch_size": 4}
    config = transformers.HunYuanVLConfig(text_config=text, vision_config=vision, image_token_id=151)
    model = transformers.HunYuanVLForConditionalGeneration(config).to(device).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    grids, parts = [[[1, 4, 6]], [], [[1, 2, 2], [1, 4, 4]]], []
    for of_document in grids:
        images = [i for _, h, w in of_document for i in (*[151] * (h // 2 * (w // 2 + 1) + 2), 7)]
        parts.append(torch.tensor([[5, *images, *range(20, 29)]], device=device))

    def inputs(ids, grids, pixels=None):
        given = {"input_ids": ids, "use_cache": False}
        if grids:
            grid = torch.tensor(grids, device=device)
            size = int(grid.prod(1).sum()), 48
            pixels = torch.linspace(-3, 3, size[0] * size[1], device=device).view(size) if pixels is None else pixels
            given |= {"image_grid_thw": grid, "pixel_values": pixels, "mm_token_type_ids": (ids == 151).long()}
        return given

    alone = [inputs(*each) for each in zip(parts, grids, strict=True)]
    wanted = torch.cat([model(**each).logits for each in alone], 1)
    apply_packing_ops(model)
    packed = po.PackedMetadata.from_lengths([each.shape[1] for each in parts], device=device)
    ways = {
        "position_ids": {"position_ids": packed.position_ids[None]},
        "cu_seq_lens_q": packed.to_transformers(),
        "attention_mask": {"attention_mask": packed.seq_idx[None].long() + 1},
    }
    pixels = torch.cat([each["pixel_values"] for each in alone if "pixel_values" in each])
    row = {**inputs(torch.cat(parts, 1), grids[0] + grids[2], pixels), **ways[told]}
    assert_near(model(**row).logits, wanted)
    del row["mm_token_type_ids"]
    with pytest.raises(
        ValueError, match=rf"^{told}: expected .*several axes .*image_grid_thw.* without mm_token_type_ids"
    ):
        model(**row)
    one = {**alone[0], "attention_mask": torch.ones_like(parts[0])}
    assert_near(model(**one).logits, wanted[:, : parts[0].shape[1]])


# --- the language models of all families ---


def text_models():
    """(module, class) of every model in transformers that takes position_ids of several axes, by its source."""
    takes = re.compile(
        r"^class (\w+Model)\((?:(?!class ).*\n)*?.*position_ids\.shape\[0\] == (?:4|num_mrope_axes \+ 1)", re.M
    )
    files = sorted(pathlib.Path(transformers.__file__).parent.glob("models/*/modeling_*.py"))
    return [
        pytest.param(f"transformers.models.{file.parent.name}.{file.stem}", name, id=name)
        for file in files
        if "position_ids.shape[0] ==" in (source := file.read_text())
        for name in takes.findall(source)
    ]


def rope(*sections):
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections], "partial_rotary_factor": 1.0}


SMALL = {
    **COMMON,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    "num_experts_per_tok": 2,
}
CONFIGS = {
    "CohereCompassTextModel": {
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), rope(2, 1, 1))
    },
    "Ernie4_5_VLMoeTextModel": {"rope_parameters": rope(1, 1, 2), "moe_intermediate_size": [16, 16]},
    "HYV4VLTextModel": {
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
    },
    "HunYuanVLTextModel": {"rope_parameters": rope(1, 1, 1, 1)},
    **dict.fromkeys(("Qwen3_5TextModel", "Qwen3_5MoeTextModel"), FAMILIES["qwen3_next"]),
}
DOCUMENTS = [[3, (1, 2, 3), 2], [4], [(1, 2, 2), 1, (2, 2, 1), 2]]  # tokens of text, and grids of images and videos
STARTS = [2, 5, 0]  # the first two go on with documents of other rows


def grown_axes(parts, start=0):
    """[3, tokens], as get_rope_index counts: text behind the largest of what is before it."""
    found = []
    for part in parts:
        grid = (
            torch.cartesian_prod(*map(torch.arange, part)).T
            if isinstance(part, tuple)
            else torch.arange(part).expand(3, -1)
        )
        found.append(grid + start)
        start = int(found[-1].max()) + 1
    return torch.cat(found, 1)


@pytest.mark.parametrize(("module", "name"), text_models())
def test_documents_in_every_model_are_as_each_alone(module, name, device):
    """Hidden states, and gradients of embeddings and every weight; only axes show where documents start."""
    register()
    cls = getattr(importlib.import_module(module), name)
    torch.manual_seed(0)
    config = cls.config_class(**{**SMALL, "rope_parameters": rope(2, 1, 1), **CONFIGS.get(name, {})})
    if not hasattr(config, "pad_token_id"):
        pytest.skip("its config is that of the whole model, as PaddleOCR's in transformers 5.17")
    config._attn_implementation = "sdpa" if cls._supports_sdpa else "packing_ops"
    model = cls._from_config(config).to(device).eval()
    if not cls._supports_sdpa:  # HY-V4: attention to the keys that an indexer chooses
        with pytest.raises(
            NotImplementedError, match="indices: expected no option that packing_ops attention does not"
        ):
            model(inputs_embeds=torch.randn(1, 4, config.hidden_size), position_ids=torch.arange(4).expand(3, 1, 4))
        return
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    documents = [grown_axes(*each) for each in zip(DOCUMENTS, STARTS, strict=True)]
    lengths = [each.shape[1] for each in documents]
    if name.startswith("HunYuan"):  # the tokens of a document in front
        sequences = [torch.arange(each.shape[1]) + start for each, start in zip(documents, STARTS, strict=True)]
        documents = [torch.cat([first[None], each]) for first, each in zip(sequences, documents, strict=True)]
    documents = [each[:, None].to(device) for each in documents]
    x = torch.randn(1, sum(lengths), config.hidden_size, device=device, requires_grad=True)

    def results(rows):
        hidden = torch.cat([model(inputs_embeds=e, position_ids=a, use_cache=False)[0] for e, a in rows], 1)
        weights = torch.linspace(-1, 1, hidden.numel(), device=device).view_as(hidden)
        used = [x, *(p for p in model.parameters() if p.requires_grad)]
        return hidden, *torch.autograd.grad((hidden * weights).sum(), used, allow_unused=True)

    wanted = results(zip(x.split(lengths, 1), documents, strict=True))
    model.set_attn_implementation("packing_ops")
    for found, expected in zip(results([(x, torch.cat(documents, 2))]), wanted, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            assert_near(found, expected)


def test_time_falls_within_a_document_with_audio():
    """Qwen2.5-Omni: the frames of two seconds of a video, then their audio, then the next frames."""
    video = [torch.cartesian_prod(torch.tensor([t, t + 25]), torch.arange(2), torch.arange(2)).T for t in (0, 50)]
    video = [each + 4 for each in video]
    audio = [torch.arange(t, t + 50).expand(3, -1) + 4 for t in (0, 50)]
    parts = [
        torch.arange(4).expand(3, -1),
        video[0],
        audio[0],
        video[1],
        audio[1],
        torch.arange(104, 107).expand(3, -1),
    ]
    whole = torch.cat(parts, 1)
    assert torch.equal(documents.positions_from_axes(whole[:, None], None)[0], torch.arange(whole.shape[1]))
    both = documents.positions_from_axes(torch.cat([whole + 3, whole], 1)[:, None], None)[0]
    assert torch.equal(both, torch.arange(whole.shape[1]).repeat(2))


@pytest.mark.parametrize("hole", [0, 1])
def test_padding_between_real_tokens_starts_no_document(hole):
    row = torch.cat([grown_axes([3], 5), torch.full((3, 2), hole), grown_axes([2], 8), grown_axes([(1, 2, 2)], 6)], 1)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1]])
    found = documents.positions_from_axes(row[:, None], mask)[0][mask[0] == 1]
    assert (found.diff() <= 0).tolist() == [False] * 4 + [True] + [False] * 3


# --- masks made around the language model ---


def test_cu_seqlens_reach_a_model_that_makes_its_masks_around_the_images(device):
    """Gemma 3 makes masks outside of its language model, which is then called with them."""
    config = transformers.Gemma3Config(
        text_config={"vocab_size": 60, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).to(device).eval()
    apply_packing_ops(model)
    ids, cu_seqlens = torch.randint(0, 60, (1, 9), device=device), torch.tensor([0, 4, 9], device=device)
    given = {"token_type_ids": torch.zeros_like(ids), "use_cache": False}
    with torch.no_grad():
        found = model(ids, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, **given).logits
        given.pop("token_type_ids")
        wanted = [model(part, token_type_ids=torch.zeros_like(part), **given).logits for part in ids.split([4, 5], 1)]
    assert_near(found, torch.cat(wanted, 1))
