"""What a training step of a swapped model waits for: nothing where cu_seqlens are passed, else the GPU once."""

import traceback
import warnings
from pathlib import Path

import pytest
import torch
from helpers.hf_models import FAMILIES, tiny_model, transformers

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops

LENGTHS = [9, 4, 14]


TORCH, HOST = (Path(module.__file__).parent for module in (torch, transformers))
MESSAGE = "called a synchronizing CUDA operation"


def synchronisations(call):
    """Where call() waits for the GPU, as torch warns of it; what transformers does itself is left out."""
    found = []

    def note(message, *_, **__):
        frames = [frame for frame in traceback.extract_stack()[:-1] if frame.filename != warnings.__file__]
        frames = [frame for frame in frames if not Path(frame.filename).is_relative_to(TORCH)]
        if MESSAGE in str(message) and not Path(frames[-1].filename).is_relative_to(HOST):
            found.append(f"{frames[-1].filename}:{frames[-1].lineno} {frames[-1].name}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        call()
    return found


def batch_of(kind):
    documents = [torch.randint(3, 61, (length,)) for length in LENGTHS]
    if kind == "mask":
        ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(d) for d in documents], batch_first=True)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    else:
        metadata, ids = po.PackedMetadata.from_lengths(LENGTHS), torch.cat(documents)
        labels = po.mask_boundary_labels(ids, metadata.cu_seqlens)[None]
        batch = {"input_ids": ids[None], "labels": labels, "position_ids": metadata.position_ids[None]}
        batch |= metadata.to_transformers() if kind == "kwargs" else {}
    return {name: value.cuda() if torch.is_tensor(value) else value for name, value in batch.items()}


def of_second_call(model, first, second):
    """Where second() waits, after first(). Puts the stock model back."""
    try:
        first()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        return synchronisations(second)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        revert_packing_ops(model)


def needs_gpu(test):
    reason = "needs a CUDA GPU: the CPU waits for nothing"
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason=reason)(test))


@needs_gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kind", "most"), [("kwargs", 0), ("position_ids", 1), ("mask", 1)])
def test_of_a_training_step(family, kind, most, monkeypatch):
    monkeypatch.setenv("PACKING_OPS_CHECK", "0")  # as for a user
    model = tiny_model(family, device="cuda")
    assert apply_packing_ops(model, rms_norm=True)
    warm_up, batch = batch_of(kind), batch_of(kind)

    def step(batch=batch):
        model(**batch, num_items_in_batch=sum(LENGTHS) - len(LENGTHS)).loss.backward()

    found = of_second_call(model, lambda: step(warm_up), step)
    assert len(found) <= most, found


@needs_gpu
@pytest.mark.parametrize(("tokens", "most"), [(1, 0), (4, 2)], ids=["a token", "a chunk"])
def test_of_a_call_behind_a_filled_cache(tokens, most, monkeypatch):
    """A chunk of a prompt waits for its documents and for the check that none of several is behind cached tokens."""
    monkeypatch.setenv("PACKING_OPS_CHECK", "0")
    model = tiny_model("llama", device="cuda").eval()
    assert apply_packing_ops(model)
    cache, ids = transformers.DynamicCache(config=model.config), torch.randint(3, 61, (1, 8 + 2 * tokens)).cuda()

    def call(begin, end):
        positions = torch.arange(begin, end, device="cuda")[None]
        with torch.no_grad():
            model(ids[:, begin:end], position_ids=positions, past_key_values=cache)

    def first():
        call(0, 8)
        call(8, 8 + tokens)

    found = of_second_call(model, first, lambda: call(8 + tokens, 8 + 2 * tokens))
    assert len(found) <= most, found


def test_those_of_transformers_are_told_apart():
    def ours():
        warnings.warn(MESSAGE, stacklevel=1)

    (found,) = synchronisations(ours)
    assert found.endswith(" ours")
    theirs = {"warnings": warnings, "MESSAGE": MESSAGE}
    exec(compile("def call(): warnings.warn(MESSAGE)", HOST / "modeling.py", "exec"), theirs)
    assert synchronisations(theirs["call"]) == []
    assert synchronisations(lambda: warnings.warn("something else", stacklevel=1)) == []
