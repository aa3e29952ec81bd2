"""One line of the log each on what a training run need not compute: padding, logits."""

import copy
import pickle
import sys
import types

import pytest
import torch

pytest.importorskip("transformers")

from helpers.hf_models import tiny_model, transformers

import packing_ops as po
from packing_ops.integrations import _advice as advice
from packing_ops.integrations.transformers import PackingAdviceCallback, apply_packing_ops
from packing_ops.integrations.trl import enable_padding_free

IDS = torch.randint(3, 61, (2, 10))
PADDED = {"input_ids": IDS, "attention_mask": (torch.arange(10) < torch.tensor([[10], [4]])).long()}
LINE = "the first 20 training batches of LlamaForCausalLM are 30% padding, which packing leaves out"


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(advice, "log_once", lines.append)
    return lines


def trained(model, batch=PADDED, batches=advice.BATCHES):
    for _ in range(batches):
        model.train()(**batch)
    return model


def with_trl(trl, monkeypatch):
    monkeypatch.delitem(sys.modules, "trl", raising=False)
    if trl:
        monkeypatch.setitem(sys.modules, "trl", types.ModuleType("trl"))


@pytest.mark.parametrize("trl", [False, True])
def test_a_padded_run_is_named_once(trl, said, monkeypatch):
    with_trl(trl, monkeypatch)
    model = tiny_model("llama")
    apply_packing_ops(model)
    with torch.no_grad():
        trained(model)
    for _ in range(advice.BATCHES):
        model.eval()(**PADDED)
    trained(model, batches=advice.BATCHES - 1)
    assert said == []
    trained(model, batches=2 * advice.BATCHES)
    (line,) = said
    assert line.startswith(LINE)
    assert ("in TRL packing=True" in line) == trl


def test_copies_and_pickles_have_said_it(said):
    model = tiny_model("llama")
    apply_packing_ops(model)
    trained(pickle.loads(pickle.dumps(copy.deepcopy(trained(model)))))
    assert len(said) == 1


def test_a_run_without_padding_is_not_named(said):
    model = tiny_model("llama")
    apply_packing_ops(model)
    mask = torch.ones_like(IDS)
    mask[0, 9] = 0  # a twentieth
    for batch in ({"input_ids": IDS}, {"input_ids": IDS, "attention_mask": mask}):
        trained(copy.deepcopy(model), batch)
    packed = po.PackedMetadata.from_lengths([10, 4, 6])
    row = {"input_ids": IDS.view(1, 20), "position_ids": packed.position_ids[None], **packed.to_transformers()}
    trained(copy.deepcopy(model), row)
    enable_padding_free(type("DPOTrainer", (), {"model": model})())
    trained(model)
    assert said == []


def test_batches_of_no_slots_are_not_named(said):
    padding = advice.Padding()
    for _ in range(advice.BATCHES):
        padding.add(None, 0, 0)
    assert said == []


def test_full_batches_count_too(said):
    model = tiny_model("llama")
    apply_packing_ops(model)
    trained(model, {"input_ids": IDS}, advice.BATCHES // 2)
    trained(model, batches=advice.BATCHES // 2)
    (line,) = said
    assert "are 15% padding" in line


def test_compiled_models_are_left(said, fresh_compile):
    model = tiny_model("llama")
    apply_packing_ops(model)
    trained(torch.compile(model, backend="eager"))
    assert said == []


def trainer_of(model, mask, tmp_path, callback, steps=25):
    dataset = [{"input_ids": IDS[0], "attention_mask": mask, "labels": IDS[0]} for _ in range(2 * steps)]
    options = {"max_steps": steps, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True}
    options |= {"disable_tqdm": True, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), **options)
    return transformers.Trainer(model, arguments, train_dataset=dataset, callbacks=[callback])


@pytest.mark.parametrize(("tokens", "lines"), [(7, 1), (10, 0)])
def test_a_trainer_of_any_attention(tokens, lines, said, tmp_path):
    pytest.importorskip("accelerate")
    model, callback = tiny_model("llama"), PackingAdviceCallback()
    trainer_of(model, (torch.arange(10) < tokens).long(), tmp_path, callback).train()
    assert [line.startswith(LINE) for line in said] == [True] * lines
    assert not model._forward_pre_hooks
    trainer_of(model, (torch.arange(10) < tokens).long(), tmp_path, callback).train()
    assert len(said) == lines


def test_a_trainer_that_ends_early_keeps_no_hook(said, tmp_path):
    pytest.importorskip("accelerate")
    model = tiny_model("llama")
    trainer_of(model, torch.ones(10).long(), tmp_path, PackingAdviceCallback(), steps=3).train()
    assert not model._forward_pre_hooks


def test_a_trainer_of_a_model_that_says_it_itself(said, tmp_path):
    pytest.importorskip("accelerate")
    model = tiny_model("llama")
    apply_packing_ops(model)
    callback = PackingAdviceCallback()
    trainer_of(model, (torch.arange(10) < 7).long(), tmp_path, callback).train()
    assert len(said) == 1
    assert callback.padding.batches == 0


@pytest.mark.parametrize("trl", [False, True])
def test_a_step_that_keeps_many_logits_is_named_once(trl, said, monkeypatch):
    """Not where none are kept for a backward."""
    with_trl(trl, monkeypatch)
    model = tiny_model("llama").train()
    apply_packing_ops(model)
    few, many = ({"input_ids": ids, "labels": ids} for ids in torch.randint(3, 61, (2, 2, 10)).unbind())
    few = {name: value[:, :9] for name, value in few.items()}
    monkeypatch.setattr(advice, "LARGE", 2 * 9 * model.config.vocab_size * 4)
    model(**few)
    model(**{name: value for name, value in many.items() if name != "labels"})
    with torch.no_grad():
        model(**many)
    model.eval()(**many)
    assert said == []
    model.train()(**many)
    (line,) = said
    assert "a training step of LlamaForCausalLM keeps logits of more than" in line
    assert "apply_packing_ops(model, fused_loss=True) makes none" in line
    assert ("TRL's SFT" in line) == trl
    apply_packing_ops(model, fused_loss=True)
    model(**many)
    assert len(said) == 1
