"""The support table of docs/transformers-models.md: every tick is one of these tests."""

import copy

import pytest
import torch
from helpers import ROOT
from helpers.hf_models import FAMILIES, tiny_model

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops, versions

FEATURES = ["packed", "padded", "compile", "checkpointing", "LoRA"]
ROWS = {  # as docs/transformers-models.md writes the families
    "llama": "Llama", "qwen2": "Qwen2, Qwen2.5", "qwen3": "Qwen3", "mistral": "Mistral", "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 (text)", "gpt_oss": "gpt-oss",
}  # fmt: skip
LENGTHS = [9, 4, 14]
# Plain, with a soft cap and a window, with sinks: the others call the same operators, once in a graph of Dynamo alone.
KINDS_OF_ATTENTION = ["llama", "gemma2", "gpt_oss"]


def rows_of(feature, documents):
    """Model inputs [1, T] packed, or [documents, longest] padded."""
    if feature == "padded":
        ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(d) for d in documents], batch_first=True)
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    ids = torch.cat(documents)
    metadata = po.PackedMetadata.from_lengths([len(d) for d in documents], device=ids.device)
    labels = po.mask_boundary_labels(ids, metadata.cu_seqlens)[None]
    return {"input_ids": ids[None], "labels": labels, **metadata.to_transformers()}


def prepared(model, feature):
    if feature == "LoRA":
        peft = pytest.importorskip("peft")
        torch.manual_seed(7)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    return model


def loss_and_gradients(call, model, batches, num_targets):
    total = 0.0
    for batch in batches:
        loss = call(**batch, num_items_in_batch=num_targets).loss
        loss.backward()
        total += loss.detach()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_trains_as_document_by_document(family, feature, device, monkeypatch, fresh_compile):
    """Attention and RoPE swapped: loss and every gradient equal those of the stock model, one document at a time."""
    told = []
    monkeypatch.setattr(versions, "warn_once", torch.compiler.assume_constant_result(lambda why: told.append(why)))
    documents = [torch.randint(3, 61, (length,), device=device) for length in LENGTHS]
    num_targets = sum(LENGTHS) - len(LENGTHS)
    several_kinds = "layer_types" in FAMILIES[family][1]
    sizes = {} if feature != "compile" or several_kinds else {"num_hidden_layers": 1}
    stock = prepared(tiny_model(family, device=device, **sizes), feature)
    alone = [{"input_ids": d[None], "labels": d[None]} for d in documents]
    wanted_loss, wanted = loss_and_gradients(stock, stock, alone, num_targets)

    model = prepared(tiny_model(family, device=device, **sizes), feature)
    assert apply_packing_ops(model)
    try:
        if feature == "checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        backend = "aot_eager" if family in KINDS_OF_ATTENTION else "eager"
        call = torch.compile(model, fullgraph=True, backend=backend) if feature == "compile" else model
        loss, found = loss_and_gradients(call, model, [rows_of(feature, documents)], num_targets)
    finally:
        revert_packing_ops(model)
    assert not told  # nothing ran by the fallback
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=1e-5)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        atol = 1e-5 * gradient.abs().max().item() + 1e-6
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_at_most_twice_as_far_off_as_the_stock_model(family, device):
    """From float32, in the loss and in every gradient; as one document the row is further off in all of them."""
    every_expert = {"num_experts_per_tok": 4} if family == "gpt_oss" else {}  # which ones are taken is no rounding
    num_targets = sum(LENGTHS) - len(LENGTHS)

    def results(made, seed, feature, dtype=torch.bfloat16, apart=True):
        model = copy.deepcopy(made).to(dtype)
        if feature == "packed":
            assert apply_packing_ops(model)
        torch.manual_seed(seed)
        batch = rows_of(feature, [torch.randint(3, 61, (length,), device=device) for length in LENGTHS])
        batch = batch if apart else {name: batch[name] for name in ("input_ids", "labels")}
        loss, found = loss_and_gradients(model, model, [batch], num_targets)
        revert_packing_ops(model)
        return {"loss": loss, **found}

    squares = {}  # {name: of the stock model, of ours, of the row as one document}
    for seed in range(8):  # one loss may be exact by luck
        made = tiny_model(family, device=device, seed=seed, initializer_range=0.1, **every_expert).bfloat16()
        exact = results(made, seed, "padded", torch.float32)
        ways = ("padded", True), ("packed", True), ("packed", False)
        for i, found in enumerate(results(made, seed, feature, apart=apart) for feature, apart in ways):
            for name, value in exact.items():
                squares.setdefault(name, [0, 0, 0])[i] += (found[name].float() - value).square().sum().item()
    for name, (stock, ours, one_document) in squares.items():
        assert ours <= 2**2 * stock, name
        assert one_document > 2**2 * stock, name


@pytest.mark.parametrize("setting", ["use_reentrant=True", "DoRA", "GradScaler"])
def test_settings_of_the_short_answers(setting, device):
    """Of docs/questions.md: loss and gradients of the stock model, one document at a time."""
    documents = [torch.randint(3, 61, (length,), device=device) for length in LENGTHS]

    def trained(batches, apply):
        model = tiny_model("qwen3", device=device)
        if setting == "DoRA":
            peft = pytest.importorskip("peft")
            torch.manual_seed(7)
            config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], use_dora=True, init_lora_weights=False)
            model = peft.get_peft_model(model, config)
        if apply:
            assert apply_packing_ops(model, fused_loss=True)
        if setting == "use_reentrant=True":
            model.gradient_checkpointing_enable({"use_reentrant": True})
        scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=2.0**20, enabled=setting == "GradScaler")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
        for batch in batches:
            scaler.scale(model(**batch, num_items_in_batch=sum(LENGTHS) - len(LENGTHS)).loss).backward()
        scaler.unscale_(optimizer)
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    wanted = trained([{"input_ids": d[None], "labels": d[None]} for d in documents], apply=False)
    found = trained([rows_of("packed", documents)], apply=True)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        atol = 1e-5 * gradient.abs().max().item() + 1e-6
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=atol)


def test_ticks_of_the_page_are_these_tests():
    lines = (ROOT / "docs" / "transformers-models.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| family |"))
    header = [cell.strip() for cell in lines[start].strip("|").split("|")]
    assert header == ["family", *FEATURES]
    table = {}
    for line in lines[start + 2 : start + 2 + len(FAMILIES)]:
        name, *ticks = (cell.strip() for cell in line.strip("|").split("|"))
        table[name] = ticks
    assert table == {ROWS[family]: ["yes"] * len(FEATURES) for family in FAMILIES}
