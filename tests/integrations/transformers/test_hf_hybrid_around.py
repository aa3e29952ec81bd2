"""What is put around hybrid models in training: LoRA, autocast, FSDP2, compiled layers, both kinds of checkpointing."""

import functools

import pytest
import torch
from helpers.processes import spawn

pytest.importorskip("transformers")

from stateful_case import alone, packed
from stateful_models import stateful_model

from packing_ops.integrations.transformers import apply_packing_ops

FAMILIES = ["qwen3_5_text", "olmo_hybrid", "bamba", "nemotron_h"]
CHECKPOINTING = [None, False, True]
NAMES = ["", "checkpointing", "reentrant"]


def pair(family, device="cpu"):
    """(a model with ours, the stock model with the same weights)."""
    models = [stateful_model(family, attn_implementation="eager", device=device) for _ in range(2)]
    apply_packing_ops(models[0], rope=family != "nemotron_h")
    return models


def with_lora(model):
    """Adapters of all projections that PEFT allows, none of them zero."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=["out_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def loss_of(model, device, *, row_each=False):
    """Of a packed row, or of each of its documents by itself."""
    ids, positions, cu_seqlens = packed(device)
    weights = torch.randn(1, ids.shape[1], 61, generator=torch.Generator().manual_seed(2)).to(device)
    logits = alone(model, ids) if row_each else model(ids, position_ids=positions, use_cache=False, **cu_seqlens).logits
    return (logits.float() * weights).sum()


def gradients(model):
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in found.items()}


def assert_close(found, wanted, tolerance=1e-3):
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        assert (found[name] - each).norm() <= tolerance * each.norm() + 1e-6, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=NAMES)
def test_lora(family, checkpointing, device):
    model, stock = (with_lora(each) for each in pair(family, device))
    if checkpointing is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    loss_of(model, device).backward()
    loss_of(stock, device, row_each=True).backward()
    assert all("lora" in name for name in gradients(model))
    assert_close(gradients(model), gradients(stock))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=NAMES)
def test_autocast(family, checkpointing, device):
    """In bfloat16, the error of packed rows is at most twice that of the stock model with single documents."""
    exact, _ = pair(family, device)
    loss_of(exact, device, row_each=True).backward()
    errors = []
    for model, row_each in zip(pair(family, device), (False, True), strict=True):
        if checkpointing is not None and not row_each:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            loss = loss_of(model, device, row_each=row_each)
        loss.backward()
        found = gradients(model)
        errors.append(sum((found[name] - each).norm() / each.norm() for name, each in gradients(exact).items()))
    assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("family", ["olmo_hybrid", "nemotron_h"])  # others: test_hf_hybrid_memory.py
def test_lora_in_compiled_layers_with_checkpointing(family, device, fresh_compile):
    model, stock = (with_lora(each) for each in pair(family, device))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    inner = model.base_model.model
    layers = getattr(inner, inner.base_model_prefix).layers
    for layer in layers if family == "nemotron_h" else layers[:1]:  # one compiled attention is enough
        layer.compile(backend="aot_eager")
    loss_of(model, device).backward()
    loss_of(stock, device, row_each=True).backward()
    assert_close(gradients(model), gradients(stock))


def sharded(family):
    """Gradients of a model under FSDP2 in every way, and of the stock model."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for lora in (False, True):
        for checkpointing in CHECKPOINTING if not lora else [False]:
            model, stock = pair(family)
            if lora:
                model, stock = with_lora(model), with_lora(stock)
                model.enable_input_require_grads()
            inner = model.base_model.model if lora else model
            if checkpointing is not None:
                model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            for layer in getattr(inner, inner.base_model_prefix).layers:
                fully_shard(layer)
            fully_shard(model)
            loss_of(model, "cpu").backward()
            loss_of(stock, "cpu", row_each=True).backward()
            found.append((gradients(model), gradients(stock)))
    return found


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
def test_fsdp2(family, tmp_path):
    for found in spawn(functools.partial(sharded, family), 2, tmp_path):
        for ours, wanted in found:
            assert_close(ours, wanted)
