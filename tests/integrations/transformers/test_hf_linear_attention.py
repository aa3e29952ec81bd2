"""Hybrid models whose convolutions and gated delta rules are ours: each document as alone, nothing found in the layers."""

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers")

from stateful_case import CLOSE, LENGTHS, alone, assert_apart, logits, packed  # noqa: E402
from stateful_models import stateful_model  # noqa: E402

from packing_ops.integrations.transformers import (  # noqa: E402
    apply_packing_ops,
    info,
    linear_attention,
    revert_packing_ops,
    stateful,
)

FAMILIES = ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "lfm2"]


def hybrid(family, device="cpu", **more):
    """(a model with ours, the stock model with the same weights)."""
    if family == "lfm2" and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 22):
        pytest.skip("its layers pass no keywords on")
    model, stock = (stateful_model(family, attn_implementation="eager", device=device, **more) for _ in range(2))
    applied = apply_packing_ops(model)
    assert applied.linear_attention == linear_attention.counts(model)[1] > 0
    return model, stock


def forms(device):
    """Every way to say where the documents of packed() are."""
    _, positions, cu_seqlens = packed(device)
    numbers = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(LENGTHS))[None].to(device)
    return [
        {"position_ids": positions},
        {"position_ids": positions, **cu_seqlens},
        {"attention_mask": numbers, "position_ids": positions},
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_are_apart_to_the_bit_and_as_alone(family, device):
    model, stock = hybrid(family, device)
    ids, _, _ = packed(device)
    wanted = alone(stock, ids)
    for given in forms(device):
        torch.testing.assert_close(assert_apart(model, ids, **given), wanted, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_layer_runs_documents_as_rows(family, device, monkeypatch):
    model, _ = hybrid(family, device)
    ids, _, _ = packed(device)
    monkeypatch.setattr(stateful, "_apart", None)  # it would split the row
    for given in forms(device):
        logits(model, ids, **given)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_both_sides_changes_nothing(family, device):
    model, stock = hybrid(family, device)
    ids, positions, _ = packed(device)
    numbers = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(LENGTHS))[None].to(device)
    given = {"attention_mask": numbers, "position_ids": positions}
    given = {name: torch.nn.functional.pad(value, (2, 3)) for name, value in given.items()}
    found = logits(model, torch.nn.functional.pad(ids, (2, 3)), **given)
    torch.testing.assert_close(found[:, 2:-3], alone(stock, ids), **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["", "checkpointing", "reentrant"])
def test_gradients_are_those_of_each_document_alone(family, checkpointing, device):
    model, stock = hybrid(family, device)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    ids, _, _ = packed(device)
    weights = torch.randn(1, sum(LENGTHS), 61, device=device)
    for outputs in (model(ids, use_cache=False, **forms(device)[1]).logits, alone(stock, ids)):
        (outputs * weights).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            scale = theirs.grad.abs().max().item()
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4 * scale + 1e-7, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("whole", [False, True], ids=["layers", "whole model"])
def test_compiled_without_a_break(family, whole, device):
    model, stock = hybrid(family, device)
    ids, _, _ = packed(device)
    for part in [model] if whole else model.model.layers:
        part.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(logits(model, ids, **forms(device)[1]), alone(stock, ids), **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_padded_rows_and_generate_as_before(family, device):
    model, stock = hybrid(family, device)
    model, stock = model.eval(), stock.eval()
    ids = torch.randint(3, 60, (2, 9), device=device)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    found, wanted = (logits(each, ids, attention_mask=mask) for each in (model, stock))
    torch.testing.assert_close(found[mask == 1], wanted[mask == 1], **CLOSE)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))


def test_a_cache_is_left_with_the_last_document_of_its_row(device):
    model, _ = hybrid("qwen3_next", device)
    ids, positions, cu_seqlens = packed(device)
    cache = model.eval()(ids, position_ids=positions, use_cache=True, **cu_seqlens).past_key_values
    last = model(ids[:, -LENGTHS[-1] :], use_cache=True).past_key_values
    for found, wanted in zip(cache.layers, last.layers, strict=True):
        if hasattr(found, "recurrent_states"):
            torch.testing.assert_close(found.recurrent_states[0], wanted.recurrent_states[0])


def test_left_as_it_is_on_request(device):
    model = stateful_model("qwen3_next", attn_implementation="eager", device=device)
    assert apply_packing_ops(model, linear_attention=False).linear_attention == 0
    assert "stock in 1 module" in info(model)
    assert apply_packing_ops(model).linear_attention == 1
    assert "linear_attention: packing_ops in 1 module" in info(model)


def test_reverted_to_the_bit(device):
    model, stock = hybrid("qwen3_next", device)
    home = linear_attention.importlib.import_module(type(model).__module__)
    assert hasattr(home.causal_conv1d_fn, "__wrapped__")
    ids, _, _ = packed(device)
    revert_packing_ops(model)
    assert torch.equal(logits(model, ids), logits(stock, ids))
    assert not any(patch.is_applied for patch in linear_attention.patches_of(home.__name__).values())
    assert not any("_packing_ops" in name for module in model.modules() for name in vars(module))


def test_a_stock_model_of_the_family_keeps_its_functions(device):
    model, stock = hybrid("qwen3_next", device)
    ids, _, _ = packed(device)
    while_swapped = logits(stock, ids)
    revert_packing_ops(model)
    assert torch.equal(while_swapped, logits(stock, ids))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_run_ours(copied, device):
    model, _ = hybrid("qwen3_next", device)
    ids, _, _ = packed(device)
    wanted = logits(model, ids, **forms(device)[1])
    made = copied(model)
    revert_packing_ops(model)
    assert torch.equal(logits(made, ids, **forms(device)[1]), wanted)


def test_layers_of_another_recurrence_say_why(device):
    model = stateful_model("bamba", attn_implementation="eager", device=device)
    applied = apply_packing_ops(model)
    assert applied.linear_attention == 0
    assert "which no op of packing_ops computes" in info(model)
