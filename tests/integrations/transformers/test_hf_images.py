"""Rows of text and images by the collator and the stream: loss and gradients are those of separate documents."""

import functools
import gc
import weakref

import pytest
import torch

transformers = pytest.importorskip("transformers")

from helpers.hf_images import (  # noqa: E402
    EXAMPLES,
    GEMMA,
    IMAGE_FAMILIES,
    example_of,
    tiny_image_model,
    video_example_of,
)
from torch.utils.data import DataLoader  # noqa: E402

from packing_ops.data import (  # noqa: E402
    PackedBatchSampler,
    PackedCollator,
    PackedStream,
    PaddingFreeCollator,
    image_sizes,
)
from packing_ops.integrations.transformers import apply_packing_ops  # noqa: E402

AXES = [family for family in IMAGE_FAMILIES if family not in GEMMA]
pytestmark = pytest.mark.filterwarnings("ignore:.*falling back to its reference PyTorch implementation")


def on(batch, device):
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def training(model, batches, device):
    """Sum of losses and its gradients."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        if hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = None
        loss = model(**on(batch, device), use_cache=False, num_items_in_batch=1).loss
        loss.backward()
        total += loss.detach()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(example):
    """A batch of one, as the stock model takes it."""
    per_token = {name for name, value in example.items() if isinstance(value, list) and name != "second_per_grid_ts"}
    return {name: torch.tensor([v]) if name in per_token else v for name, v in example.items()}


@functools.cache
def wanted(family, device, videos=False):
    """The stock model's. The cache is of one process, whose tests do not change it."""
    return training(tiny_image_model(family).to(device), map(alone, examples_of(family, videos)), device)


def assert_trains(model, batches, family, device, videos=False):
    loss, gradients = training(model, batches, device)
    expected, expected_gradients = wanted(family, device, videos)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        scale = max(1e-2, expected_gradients[name].abs().max().item())
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-3, atol=2e-4 * scale, msg=name)


def examples_of(family, videos=False):
    examples = [example_of(family, number) for number in range(len(EXAMPLES))]
    return [*examples, video_example_of(family)] if videos else examples


def packed_model(family, device):
    model = tiny_image_model(family).to(device)
    assert apply_packing_ops(model)
    return model


@pytest.mark.parametrize("options", [{}, {"capacity": 64}, {"document_multiple": 4, "row_multiple": 16}])
@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_a_row_trains_as_its_documents_alone(family, options, device):
    batch = PaddingFreeCollator(**options)(examples_of(family))
    assert_trains(packed_model(family, device), [batch], family, device)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_gradient_checkpointing(family, reentrant, device):
    model = packed_model(family, device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_trains(model, [PaddingFreeCollator()(examples_of(family))], family, device)


@pytest.mark.parametrize("asked_by", ["model", "collator"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_videos_beside_images(family, asked_by, device):
    examples = examples_of(family, videos=True)
    index = tiny_image_model(family).model.get_rope_index if asked_by == "collator" else None
    row = PaddingFreeCollator(rope_index=index)([*examples[2:], *examples[:2]])
    assert_trains(packed_model(family, device), [row], family, device, videos=True)


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_the_stock_model_lets_documents_of_a_row_see_each_other(family):
    """What the other tests would not notice, if the models were of only text or their images did not matter."""
    batch = PaddingFreeCollator(return_flash_attn_kwargs=False, return_seq_idx=False)(examples_of(family))
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
    loss, _ = training(tiny_image_model(family), [batch], "cpu")
    assert abs(loss - wanted(family, "cpu")[0]) > 0.02


@pytest.mark.parametrize("family", AXES)
def test_axes_that_the_collator_asks_for(family, device):
    """Of each example separately, in front of them the text's, by which documents are found without cu_seq_lens_q
    too.
    """
    model = packed_model(family, device)
    index = tiny_image_model(family).model.get_rope_index
    for options in ({}, {"document_multiple": 4, "capacity": 64}, {"return_flash_attn_kwargs": False}):
        batch = PaddingFreeCollator(rope_index=index, **options)(examples_of(family))
        assert batch["position_ids"].shape == (4, 1, batch["input_ids"].shape[1])
        assert_trains(model, [batch], family, device)


def test_axes_in_a_graph(device, fresh_compile):
    """Where the model cannot ask for them. No thread keeps the model."""
    family = "qwen2_5_vl"
    model = packed_model(family, device)
    model.forward = torch.compile(model.forward, backend="eager")
    with pytest.raises(ValueError, match=r"position_ids: expected several axes .* in a graph of torch.compile"):
        training(model, [PaddingFreeCollator()(examples_of(family))], device)
    index = tiny_image_model(family).model.get_rope_index
    assert_trains(model, [PaddingFreeCollator(rope_index=index)(examples_of(family))], family, device)
    gone = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_rows_of_a_stream_and_of_a_sampler(family, device):
    """By budgets of tokens and patches, through a DataLoader with workers."""
    examples, model = examples_of(family), packed_model(family, device)
    budget = {"gemma3": {"images": 2}, "gemma4": {"patches": 32}}.get(family, {"patches": 32})
    budgets = {"tokens": 24, **budget}
    stream = PackedStream(examples, budgets, buffer=3)
    loader = DataLoader(stream, batch_size=None, collate_fn=PaddingFreeCollator(), num_workers=2)
    batches = list(loader)
    assert len(batches) > 1
    assert_trains(model, batches, family, device)
    lengths = {"tokens": [len(example["input_ids"]) for example in examples]}
    lengths |= {name: [image_sizes(example)[name] for example in examples] for name in budget}
    sampler = PackedBatchSampler(lengths, budgets)
    assert len(sampler) > 1
    assert all(sum(lengths[name][i] for i in row) <= most for row in sampler for name, most in budgets.items())
    loader = DataLoader(examples, batch_sampler=sampler, collate_fn=PaddingFreeCollator())
    assert_trains(model, list(loader), family, device)


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_rows_of_a_packed_collator(family, device):
    examples = examples_of(family)
    for example in examples:
        labels = example.pop("labels")
        example |= {"num_actions": len(labels), "loss_mask": [float(label != -100) for label in labels]}
    collator = PackedCollator(32, cp_size=2)
    batch = collator(examples)
    assert len(batch["sequences"]) > 1
    assert_trains(packed_model(family, device), [collator.model_inputs(batch)], family, device)
