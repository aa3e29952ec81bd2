"""Images and prefixes whose tokens see each other: served by visible_end, next to the stock model one document at a
time.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from helpers.hf_models import CACHE  # noqa: E402
from transformers import masking_utils  # noqa: E402

from packing_ops._runtime import arguments  # noqa: E402
from packing_ops.integrations.transformers import attention, masks, register  # noqa: E402
from packing_ops.reference import attention as oracle  # noqa: E402

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
IMAGE = [97] * 4
TEXT = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 2,
}  # fmt: skip


LAYERS = "sliding_attention", "full_attention"


def gemma3(layers=LAYERS, window=6):
    text = {**TEXT, "layer_types": list(layers), "num_hidden_layers": len(layers), "sliding_window": window}
    tokens = {"mm_tokens_per_image": 4, "boi_token_index": 95, "eoi_token_index": 96, "image_token_index": 97}
    return transformers.Gemma3ForConditionalGeneration, transformers.Gemma3Config(
        text_config=text, vision_config=VISION, **tokens
    )


def paligemma():
    vision = {**VISION, "patch_size": 4, "model_type": "siglip_vision_model", "projection_dim": 32}  # 4 patches
    config = transformers.PaliGemmaConfig(
        text_config={**TEXT, "model_type": "gemma"}, vision_config=vision, image_token_id=97, projection_dim=32,
        hidden_size=32,
    )  # fmt: skip
    return transformers.PaliGemmaForConditionalGeneration, config


def built(family, implementation, device):
    cls, config = family()
    torch.manual_seed(0)
    model = cls(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.set_attn_implementation(implementation)
    return model.to(device)


DOCUMENTS = [[5, 6, *IMAGE, 7, 8], list(range(10, 21)), [9, 4, 6, 5, *IMAGE, 3, *IMAGE, 2, 8], [*IMAGE, 11]]
IMAGES = [1, 0, 2, 1]


def row_of(family, documents, device):
    """input_ids, token_type_ids, labels and position_ids of a packed row."""
    ids = torch.tensor([[t for each in documents for t in each]], device=device)
    positions = torch.cat([torch.arange(len(each), device=device) for each in documents])[None]
    types = (ids == 97).long()
    if family is paligemma:  # 0: the prefix; the suffix sees back
        positions = positions + 1
        prefix = [len(each) - 2 if 97 in each else 5 for each in documents]
        spans = zip(documents, prefix, strict=True)
        types = torch.tensor([[int(i >= n) for each, n in spans for i in range(len(each))]], device=device)
    labels = ids.masked_fill(ids == 97, -100)
    return {"input_ids": ids, "token_type_ids": types, "position_ids": positions, "labels": labels}


@pytest.fixture
def calls(monkeypatch):
    """The visible_end of each call that varlen_attention served."""
    register()
    arguments.warned.clear()
    seen, serve = [], attention.attend

    def counted(*given, **named):
        seen.append(given[-1].visible_end)
        return serve(*given, **named)

    monkeypatch.setattr(attention, "attend", counted)
    return seen


def loss_of(logits, labels):
    """Of each document separately: the first token of none is a target."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


@pytest.mark.parametrize(
    ("family", "compiled"),
    [(gemma3, False), (lambda: gemma3(window=3), False), (lambda: gemma3(LAYERS[:1], 3), True), (paligemma, False)],
    ids=["gemma3", "gemma3, a window in the images", "its first layer, compiled", "paligemma"],
)
def test_loss_and_gradients_are_those_of_documents_alone(family, compiled, device, calls, fresh_compile):
    """By visible_end; by a mask of the documents' images and SDPA in a graph."""
    documents, images = (DOCUMENTS, IMAGES) if family is not paligemma else (DOCUMENTS[::2], IMAGES[::2])
    inputs = row_of(family, documents, device)
    pixels = torch.randn(sum(images), 3, 8, 8, device=device)
    lengths = [len(each) for each in documents]
    stock, ours = built(family, "eager", device), built(family, "packing_ops", device)
    mode = torch.nn.Module.train if family is paligemma else torch.nn.Module.eval
    mode(stock), mode(ours)
    call = torch.compile(ours, backend="aot_eager") if compiled else ours
    wanted, logits = 0.0, []
    for i, row in enumerate(zip(*(t.split(lengths, 1) for t in inputs.values()), strict=True)):
        row = dict(zip(inputs, row, strict=True))
        own = pixels.split(images)[i] if images[i] else None
        found = stock(**{**row, "labels": None}, pixel_values=own, use_cache=False).logits
        logits.append(found)
        wanted = wanted + loss_of(found, row["labels"])
    wanted.backward()
    served_by_towers = len(calls)
    found = call(**{**inputs, "labels": None}, pixel_values=pixels, use_cache=False).logits
    torch.testing.assert_close(found, torch.cat(logits, 1), **CLOSE)
    ends = [each for each in calls[served_by_towers:] if each is not None]
    assert len(ends) == (0 if compiled else TEXT["num_hidden_layers"]), "the text's layers"
    assert any("SDPA" in reason for reason in arguments.warned) == compiled
    by_document = zip(found.split(lengths, 1), inputs["labels"].split(lengths, 1), strict=True)
    loss = sum(loss_of(*each) for each in by_document)
    torch.testing.assert_close(loss, wanted, **CLOSE)
    loss.backward()
    expected = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    largest = max(float(grad.abs().max()) for grad in expected.values())  # next to it some are 0 but for rounding
    for name, parameter in ours.named_parameters():
        if name in expected:
            torch.testing.assert_close(
                parameter.grad,
                expected[name],
                rtol=1e-4,
                atol=1e-5 * largest,
                msg=lambda m: f"{name}: {m}",  # noqa: B023
            )


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(side, device, calls):
    """Two rows with padding, as a processor makes them."""
    stock, ours = built(gemma3, "eager", device), built(gemma3, "packing_ops", device)
    documents, pixels = [DOCUMENTS[0], DOCUMENTS[2]], torch.randn(3, 3, 8, 8, device=device)
    width = max(map(len, documents))
    rows, mask = torch.zeros(2, width, dtype=torch.int64, device=device), torch.zeros(2, width, device=device).long()
    for i, each in enumerate(documents):
        span = slice(width - len(each), width) if side == "left" else slice(0, len(each))
        rows[i, span], mask[i, span] = torch.tensor(each, device=device), 1
    given = {"input_ids": rows, "attention_mask": mask, "token_type_ids": (rows == 97).long(), "pixel_values": pixels}
    found, wanted = (model(**given, use_cache=False).logits[mask == 1] for model in (ours, stock))
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert sum(each is not None for each in calls) == TEXT["num_hidden_layers"]


def blocks_layer(device, blocks, window=None):
    """Our attention and the stock one, of random heads under a mask with these blocks."""
    heads = torch.randn(3, 1, 4, blocks.shape[1], 8, device=device)
    given = {"attention_mask": None, CACHE: None}
    if window is not None:
        given["or_mask_function"] = masking_utils.blockwise_overlay(blocks)
        given["and_mask_function"] = masking_utils.sliding_window_overlay(window)
    else:
        given["block_sequence_ids"] = blocks
    results = []
    for name, attend in (("packing_ops", attention.packing_ops_attention), ("sdpa", None)):
        config = transformers.LlamaConfig(**LLAMA, attn_implementation=name)
        embeds = torch.zeros(1, blocks.shape[1], 32, device=device)
        mask = masking_utils.create_causal_mask(config, embeds, position_ids=None, **given)
        attend = attend or transformers.AttentionInterface._global_mapping["sdpa"]
        layer = torch.nn.Module()
        layer.num_key_value_groups = 1
        results.append((mask, attend(layer, *heads, mask)[0]))
    return results


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("blocks", "runs"),
    [([-1, 0, 0, 0, 0, -1, 1, 1, -1], True), ([-1, 0, 0, -1, 0, 0, -1, -1, -1], False), ([1, 1, -1, 0, 0, 0, -1, 2], False)],
    ids=["runs", "a number that comes back", "numbers that fall"],
)  # fmt: skip
def test_blocks_that_are_no_runs_fall_back(window, blocks, runs, device, calls):
    (mask, found), (_, wanted) = blocks_layer(device, torch.tensor([blocks], device=device), window)
    assert isinstance(mask, masks.MaskPattern)
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert len(calls) == runs
    assert any("no runs of neighbours" in reason for reason in arguments.warned) == (not runs)


def test_a_compiled_model_gets_the_mask(device, fresh_compile, calls):
    inputs = row_of(gemma3, DOCUMENTS, device)
    inputs.pop("labels")
    model = built(gemma3, "packing_ops", device).model.language_model
    embeds = torch.randn(*inputs["input_ids"].shape, 32, device=device)
    blocks = torch.where(inputs["token_type_ids"] == 1, inputs["token_type_ids"].cumsum(1) // 4, -1)

    def step(embeds, positions, blocks):
        mask = masking_utils.create_causal_mask(model.config, embeds, None, None, positions, block_sequence_ids=blocks)
        both = {"full_attention": mask, "sliding_attention": mask}
        return model(inputs_embeds=embeds, attention_mask=both, position_ids=positions, use_cache=False)[0]

    wanted = step(embeds, inputs["position_ids"], blocks)
    found = torch.compile(step, backend="aot_eager")(embeds, inputs["position_ids"], blocks)
    torch.testing.assert_close(found, wanted, **CLOSE)


# --- makers of masks ---

LENGTHS, LLAMA = [5, 7, 4], {"vocab_size": 9, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
BLOCKS = torch.tensor([[-1, 0, 0, -1, -1, -1, 1, 1, 1, -1, 2, 2, 2, 2, -1, -1]])  # the middle one goes over a boundary
OVERLAYS = {
    "block_sequence_ids": lambda blocks: {"block_sequence_ids": blocks},
    "or": lambda blocks: {"or_mask_function": masking_utils.blockwise_overlay(blocks)},
    "or and": lambda blocks: {
        "or_mask_function": masking_utils.blockwise_overlay(blocks),
        "and_mask_function": masking_utils.sliding_window_overlay(3),
    },
}


def dense(pattern, positions):
    """What a MaskPattern with blocks represents, as varlen_attention is given."""
    _, ends, _ = pattern.documents(torch.zeros(1, 1, pattern.length, 8), (None, None), positions)
    ends = ends.split(LENGTHS)
    parts = [oracle.visible(n, n, True, pattern.window, visible_end=end) for n, end in zip(LENGTHS, ends, strict=True)]
    return torch.block_diag(*parts).bool()[None, None]


# A window that blocks reach out of is served by no visible_end.
SERVED = {("create_causal_mask", overlay) for overlay in OVERLAYS}


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("maker", ["create_causal_mask", "create_sliding_window_causal_mask"])
def test_overlays_are_those_of_each_document(overlay, maker):
    """The makers through which all families with images go."""
    register()
    ours, stock = (
        transformers.LlamaConfig(**LLAMA, sliding_window=4, attn_implementation=name)
        for name in ("packing_ops", "sdpa")
    )
    make, embeds = getattr(masking_utils, maker), torch.zeros(1, 16, 32)
    given = {"attention_mask": None, CACHE: None}
    alone = {"position_ids": None, "allow_is_causal_skip": False}
    of_documents = [
        make(stock, embeds[:, :n], **given, **alone, **OVERLAYS[overlay](blocks))[0, 0]
        for n, blocks in zip(LENGTHS, BLOCKS.split(LENGTHS, 1), strict=True)
    ]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    mask = make(ours, embeds, **given, position_ids=positions, **OVERLAYS[overlay](BLOCKS))
    assert isinstance(mask, masks.MaskPattern) == ((maker, overlay) in SERVED)
    mask = dense(mask, positions) if isinstance(mask, masks.MaskPattern) else mask
    assert torch.equal(mask[0, 0], torch.block_diag(*of_documents).bool())


@pytest.mark.parametrize("filler", [0, 1])
def test_padding_inside_a_document_starts_none(filler):
    """Whatever positions it has, in masks that transformers makes."""
    register()
    ours, stock = (
        transformers.LlamaConfig(**LLAMA, sliding_window=4, attn_implementation=name)
        for name in ("packing_ops", "sdpa")
    )
    real = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 0, 0, 1]])
    positions = (real.cumsum(1) - 1).masked_fill(real == 0, filler)
    given = {"attention_mask": real, CACHE: None, **OVERLAYS["block_sequence_ids"](real.clone() - 1)}
    masks_of = [
        masking_utils.create_sliding_window_causal_mask(config, torch.zeros(2, 8, 32), position_ids=positions, **given)
        for config in (ours, stock)
    ]
    seen, expected = (mask.expand(2, 1, 8, 8)[:, 0][real == 1] for mask in masks_of)
    assert torch.equal(seen, expected)
