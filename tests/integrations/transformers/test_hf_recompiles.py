"""A compiled model, and compiled layers, serve packed rows of other lengths without another compilation."""

import pytest
import torch
from helpers.hf_models import tiny_model
from torch._dynamo.testing import CompileCounterWithBackend

import packing_ops as po
from packing_ops.data import PaddingFreeCollator
from packing_ops.integrations.transformers import apply_packing_ops

BATCHES = [[40, 20, 5], [10, 30, 33, 7, 9], [5, 70], [50, 1]]  # other totals and other numbers of documents


def batch_of(lengths, marked):
    metadata = po.PackedMetadata.from_lengths(lengths)
    ids = torch.randint(3, 60, (1, metadata.total))
    batch = {"input_ids": ids, "position_ids": metadata.position_ids[None], "labels": ids.clone()}
    if marked:
        for tensor in batch.values():
            torch._dynamo.mark_dynamic(tensor, 1)
        torch._dynamo.mark_dynamic(metadata.cu_seqlens, 0)
    return {**batch, **metadata.to_transformers()}


def compilations(call, counter, marked, batches=BATCHES):
    counts = []
    for lengths in batches:
        before = counter.frame_count
        call(**batch_of(lengths, marked), use_cache=False).loss.backward()
        counts.append(counter.frame_count - before)
    return counts


@pytest.fixture
def model():
    model = tiny_model("llama").train()
    apply_packing_ops(model)
    return model


def test_model_with_marked_sizes(model, fresh_compile):
    counter = CompileCounterWithBackend("eager")
    call = torch.compile(model, fullgraph=True, backend=counter)
    assert compilations(call, counter, marked=True) == [1, 0, 0, 0]


@pytest.mark.parametrize(("fused_loss", "expected"), [(False, [1, 0, 0, 0]), (True, [1, 1, 0, 0])])
def test_model_with_marked_sizes_of_a_collator(fused_loss, expected, model, fresh_compile):
    """As docs/ops.md says: seq_idx is marked too, and the fused loss reads num_targets, a number."""
    apply_packing_ops(model, fused_loss=fused_loss)
    counter = CompileCounterWithBackend("eager")
    call, counts = torch.compile(model, fullgraph=True, backend=counter), []
    for lengths in BATCHES:
        row = PaddingFreeCollator()([{"input_ids": torch.randint(3, 60, (length,))} for length in lengths])
        for name in ("input_ids", "position_ids", "labels", "seq_idx"):
            torch._dynamo.mark_dynamic(row[name], 1)
        torch._dynamo.mark_dynamic(row["cu_seq_lens_q"], 0)
        before = counter.frame_count
        call(**row, use_cache=False).loss.backward()
        counts.append(counter.frame_count - before)
    assert counts == expected


def test_dynamic_layers(model, fresh_compile):
    """Their hidden states are made by the model, whose marks do not reach them."""
    counter = CompileCounterWithBackend("eager")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=counter, dynamic=True)
    first, *others = compilations(model, counter, marked=False)
    assert first >= 1
    assert others == [0, 0, 0]


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        (BATCHES, [1, 1, 0, 0]),
        ([[40, 24], [30, 14, 20], [64], [60, 4]], [1, 1, 0, 0]),
        ([[40, 24], [30, 34], [1, 63], [60, 4]], [1, 0, 0, 0]),
    ],
    ids=["any rows", "rows of one length", "rows of one length and as many documents"],
)
def test_when_layers_compile_again(batches, expected, model, fresh_compile):
    """As docs/transformers.md says: the second time when the length or the number of documents changes."""
    counter = CompileCounterWithBackend("eager")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=counter)
    assert compilations(model, counter, marked=False, batches=batches) == expected
