"""Rows of text and images, whose position_ids have three axes: which documents they tell, and the training they give."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import OLD  # noqa: E402
from test_hf_vision import assert_near, tiny_tower_model  # noqa: E402

import packing_ops as po  # noqa: E402
from packing_ops.integrations.transformers import apply_packing_ops  # noqa: E402

GRIDS = [[[1, 4, 6]], [], [[1, 2, 2], [2, 4, 4]]]  # of the images of each document
pytestmark = pytest.mark.skipif(OLD, reason="up to 4.57 these configs are of another form")


def document(number, device):
    images = [each for t, h, w in GRIDS[number] for each in (153, *[151] * (t * h * w // 4), 154, 7)]
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


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_documents_of_text_and_images_train_as_each_alone(family, device):
    """By axes that begin at 0 again, by text positions in front of them, by cu_seq_lens_q and by a mask's numbers."""
    model, documents = tiny_tower_model(family).to(device), [document(i, device) for i in range(3)]
    alone = [batch(ids, grids) for ids, grids in zip(documents, GRIDS, strict=True)]
    row = batch(torch.cat(documents, 1), GRIDS[0] + GRIDS[2])
    pixels = [each["pixel_values"] for each in alone if "pixel_values" in each]
    row["pixel_values"] = torch.cat(pixels)
    wanted, wanted_gradients = training(model, alone)
    metadata = po.PackedMetadata.from_lengths([ids.shape[1] for ids in documents], device=device)
    row["labels"] = po.mask_boundary_labels(row["labels"][0], metadata.cu_seqlens)[None]
    axes = torch.cat([axes_of(model, *each) for each in zip(documents, GRIDS, strict=True)], 2)
    numbers = torch.repeat_interleave(torch.arange(1, 4, device=device), metadata.cu_seqlens.diff())[None]
    apply_packing_ops(model)
    for more in (
        {"position_ids": axes},
        {"position_ids": torch.cat([metadata.position_ids[None, None], axes])},
        {"cu_seq_lens_q": metadata.cu_seqlens, "cu_seq_lens_k": metadata.cu_seqlens},
        {"position_ids": axes, "attention_mask": numbers},
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
