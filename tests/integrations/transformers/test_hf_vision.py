"""Vision towers under apply_packing_ops: one call of attention for all images of a layer, with the stock loop's
results.
"""

import copy
import importlib
import inspect
import pathlib
import pickle
import re

import pytest
import torch
from helpers import assert_same

transformers = pytest.importorskip("transformers")

from helpers.hf_towers import TOWERS, frames_of, tiny_tower_model  # noqa: E402

from packing_ops.integrations.transformers import (  # noqa: E402
    apply_packing_ops,
    attention,
    register,
    revert_packing_ops,
    vision,
)

GRID = [[1, 16, 16], [1, 8, 16], [2, 4, 8]]  # two images and a video of two frames: four rows of patches


def images(device, grid=GRID):
    grid = torch.tensor(grid, device=device)
    torch.manual_seed(1)
    return torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4, device=device), grid


@pytest.fixture
def lengths(monkeypatch):
    """Tokens of every call of our varlen attention."""
    seen, ours = [], attention.attend
    monkeypatch.setattr(
        attention, "attend", lambda q, *rest, **options: seen.append(q.shape[2]) or ours(q, *rest, **options)
    )
    return seen


def results(tower, pixels, grid):
    pixels = pixels.clone().requires_grad_()
    tower.zero_grad()
    found = tower(pixels, grid_thw=grid).pooler_output
    found = torch.cat(found) if isinstance(found, (list, tuple)) else found
    (found * torch.linspace(-1, 1, found.numel(), device=found.device).view_as(found)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in tower.named_parameters() if p.grad is not None}
    return found.detach(), {**gradients, "pixels": pixels.grad}


def assert_near(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * max(1.0, wanted.abs().max().item()))


@pytest.mark.parametrize("family", TOWERS)
def test_one_call_for_each_layer(family, device, lengths, monkeypatch):
    """Outputs, and gradients of pixels and every weight, equal those of the loop; reverted they are its bits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # torch's default, in the convolution over pixels
    model, (pixels, grid) = tiny_tower_model(family).to(device), images(device, frames_of(family, GRID))
    tower = model.model.visual
    wanted, wanted_gradients = results(tower, pixels, grid)
    classes = [type(module) for module in model.modules()]
    for _ in range(2):  # twice is once
        applied = apply_packing_ops(model)
        assert (applied.vision, applied.skipped) == (2, {})
    lengths.clear()  # of the trial
    found, gradients = results(tower, pixels, grid)
    assert lengths == [pixels.shape[0]] * 2
    assert_near(found, wanted)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        assert_near(gradient, wanted_gradients[name])
    revert_packing_ops(model)
    assert [type(module) for module in model.modules()] == classes
    assert_same(results(tower, pixels, grid)[0], wanted)
    assert len(lengths) == 2


@pytest.mark.parametrize("family", TOWERS)
def test_images_do_not_see_each_other(family, device):
    """To the bit: other pixels in one image change no patch of the others."""
    model, (pixels, grid) = tiny_tower_model(family).to(device), images(device, frames_of(family, GRID))
    apply_packing_ops(model)
    with torch.no_grad():
        before = model.model.visual(pixels, grid_thw=grid).last_hidden_state
        pixels[256 : 256 + 128] += 1.0  # the second image
        after = model.model.visual(pixels, grid_thw=grid).last_hidden_state
    revert_packing_ops(model)
    changed = (before != after).any(1)
    second = slice(256, 384) if changed.numel() == pixels.shape[0] else slice(64, 96)
    assert changed[second].all()
    changed[second] = False
    assert not changed.any()


def test_whole_model_with_documents_in_text(device, lengths):
    """Loss and gradients of the language model over the tower, with the text's documents next to the images."""
    model, (pixels, grid) = tiny_tower_model("qwen2_5_vl").to(device), images(device, GRID[:2])
    ids = torch.tensor([[i for g in grid for i in (5, 153, *[151] * int(g.prod() // 4), 154, 7)]], device=device)
    given = {"input_ids": ids, "labels": ids.masked_fill(ids == 151, -100), "pixel_values": pixels, "use_cache": False}
    given |= {"image_grid_thw": grid, "mm_token_type_ids": (ids == 151).long()}

    def loss():
        model.zero_grad()
        found = model(**given).loss
        found.backward()
        return found.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted, wanted_gradients = loss()
    assert apply_packing_ops(model).vision == 2
    lengths.clear()
    found, gradients = loss()
    assert lengths == [384, 384, ids.shape[1]]
    assert_near(found, wanted)
    assert len(gradients) == len(wanted_gradients)
    for gradient, expected in zip(gradients, wanted_gradients, strict=True):
        assert_near(gradient, expected)
    revert_packing_ops(model)


def test_bf16_is_at_most_twice_as_far_off_as_the_loop(device):
    model, (pixels, grid) = tiny_tower_model("qwen2_5_vl").to(device), images(device)
    exact = results(model.model.visual, pixels, grid)[0]
    model, pixels = model.bfloat16(), pixels.bfloat16()
    stock = results(model.model.visual, pixels, grid)[0]
    apply_packing_ops(model)
    ours = results(model.model.visual, pixels, grid)[0]
    revert_packing_ops(model)
    assert (ours.float() - exact).norm() <= 2 * (stock.float() - exact).norm()


def test_another_attention_afterwards_is_the_loop(device, lengths):
    model, (pixels, grid) = tiny_tower_model("qwen2_5_vl").to(device), images(device)
    wanted = results(model.model.visual, pixels, grid)[0]
    apply_packing_ops(model, rope=False, rms_norm=False)
    lengths.clear()
    model.set_attn_implementation("sdpa")
    assert_same(results(model.model.visual, pixels, grid)[0], wanted)
    assert not lengths


def test_copies_and_pickles_keep_it(device, lengths):
    model, (pixels, grid) = tiny_tower_model("qwen3_vl").to(device), images(device)
    apply_packing_ops(model)
    wanted = results(model.model.visual, pixels, grid)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        lengths.clear()
        assert_same(results(other.model.visual, pixels, grid)[0], wanted)
        assert lengths == [pixels.shape[0]] * 2
    revert_packing_ops(model)


def test_a_forward_that_hands_no_keywords_on_is_left(device):
    """It would let all images attend to each other."""
    family = transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
    stock = family.Qwen2_5_VLVisionAttention

    class Deaf(stock):
        def forward(self, hidden_states, cu_seqlens, position_embeddings=None, **kwargs):
            return super().forward(hidden_states, cu_seqlens, position_embeddings=position_embeddings)

    Deaf.__module__ = stock.__module__
    model, (pixels, grid) = tiny_tower_model("qwen2_5_vl").to(device), images(device)
    wanted = results(model.model.visual, pixels, grid)[0]
    for block in model.model.visual.blocks:
        block.attn.__class__ = Deaf
    with pytest.warns(UserWarning, match="vision of Qwen2_5_VL.* was not swapped: Deaf gives other values in one call"):
        applied = apply_packing_ops(model)
    assert applied.vision == 0
    assert_near(results(model.model.visual, pixels, grid)[0], wanted)
    revert_packing_ops(model)


def attention_classes():
    """(module, class) of every attention in transformers whose forward takes cu_seqlens, by its source: imports are
    slow.
    """
    takes = re.compile(
        r"^class (\w+Attention)\(.*\n(?:(?!class ).*\n)*?    def forward\(((?:(?!\n    def |\n\S)[\s\S])*?)\)(?: ->.*)?:\n",
        re.M,
    )
    files = sorted(pathlib.Path(transformers.__file__).parent.glob("models/*/modeling_*.py"))
    return [
        pytest.param(f"transformers.models.{file.parent.name}.{file.stem}", name, id=name)
        for file in files
        if "cu_seqlens" in (source := file.read_text())
        for name, arguments in takes.findall(source)
        if re.search(r"\bcu_seqlens\b", arguments)
    ]


# class: why apply_packing_ops leaves it with the loop
REFUSED: dict[str, str] = {}
SIZES = {"hidden_size": 16, "d_model": 16, "embed_dim": 16, "head_dim": 8, "num_key_value_heads": 2} | dict.fromkeys(
    ("num_heads", "num_attention_heads", "attention_heads", "encoder_attention_heads"), 2
)


def tiny_layer(module, name):
    module = importlib.import_module(module)
    stock = getattr(module, name)
    config, *others = list(inspect.signature(stock.__init__).parameters.values())[1:]
    tower = re.match("(.*?)(Vision|Audio|Attention)", name)
    config = config.annotation
    if config is inspect.Parameter.empty:
        configs = importlib.import_module(module.__name__.replace("modeling", "configuration"))
        named = [tower[0] + "Config", tower[0] + "EncoderConfig", tower[1] + "EncoderConfig"]
        config = next(getattr(configs, each) for each in named if hasattr(configs, each))
    config = config()
    for size, number in SIZES.items():
        if hasattr(config, size):
            setattr(config, size, number)
    torch.manual_seed(0)
    return stock(config, **{each.name: 0 for each in others if each.name == "layer_idx"})


@pytest.mark.parametrize(("module", "name"), attention_classes())
def test_every_attention_is_one_call_or_refused(module, name, device, lengths):
    """Outputs, and gradients of the input and every weight, equal those of the loop over images of mixed lengths."""
    register()
    layer, cu_seqlens = tiny_layer(module, name).to(device), [0, 5, 6, 12, 31, 33, 34]
    alone = torch.nn.ModuleList([layer])
    vision.apply_to_model(alone)
    why, served = vision.why_not(alone), vision.count(alone)
    assert (served, why) == ((0, REFUSED[name]) if name in REFUSED else (1, None))
    takes = inspect.signature(vision.stock_of(type(layer)).forward).parameters
    x = torch.randn(1, 34, 16, device=device, requires_grad=True)
    given = {"cu_seqlens": torch.tensor(cu_seqlens, dtype=torch.int32, device=device)}
    given |= {"max_seqlen": 19} if "max_seqlen" in takes else {}
    if "position_embeddings" in takes:
        given["position_embeddings"] = torch.randn(2, 34, 8, device=device).unbind()
    in_a_batch = name.startswith(("MiniCPM", "HunYuan", "HYV4VL", "Radio"))
    given |= {"attention_mask": None} if in_a_batch else {}
    results = []
    for implementation in ("sdpa", "packing_ops"):
        layer.config._attn_implementation = implementation
        lengths.clear()  # of the trial
        out = layer(x if in_a_batch else x[0], **given)
        out = out[0] if isinstance(out, tuple) else out
        assert out.shape[-2:] == (34, 16)
        weight = torch.linspace(-1, 1, 16 * 34, device=device).view(34, 16)
        results.append([out, *torch.autograd.grad((out * weight).sum(), [x, *layer.parameters()])])
    assert lengths == [34]
    for found, wanted in zip(results[1], results[0], strict=True):
        assert_near(found, wanted)


@pytest.mark.parametrize(
    ("rows", "mask"), [(2, None), (1, torch.zeros(1, 1, 3, 3, device="cpu"))], ids=["rows", "mask"]
)
def test_other_input_is_the_loop(rows, mask, device):
    """Rows whose cu_seqlens are those of each, which a call of packed documents cannot say, and a mask for each
    image.
    """
    register()
    layer = tiny_layer("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VLVisionAttention")
    layer.config._attn_implementation = "packing_ops"
    x = torch.zeros(1, 3, 8, device=device)
    assert vision._fits_one_call(layer, x)
    assert not vision._fits_one_call(layer, x.expand(rows, 3, 8), mask)


def test_the_trial_takes_no_random_numbers():
    register()
    model = tiny_tower_model("qwen2_vl")
    vision._tried.cache_clear()
    state = torch.get_rng_state()
    assert vision.why_not(model) is None
    vision.apply_to_model(model)
    assert vision.count(model) == 2
    assert torch.equal(torch.get_rng_state(), state)
    revert_packing_ops(model)
