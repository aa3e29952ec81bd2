"""keep_float32 with transformers: its Trainer, resumed, and by accelerate's FSDP2; adapters of PEFT."""

import functools

import pytest
import torch
from helpers.processes import as_launched, spawn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from helpers.hf_models import tiny_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from packing_ops.optim import keep_float32

ROWS = [{"input_ids": [i, i + 1, i + 2, 3], "labels": [i, i + 1, i + 2, 3]} for i in range(16)]


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        control.should_training_stop = state.global_step == 2


def trainer_of(folder, seed=0, callbacks=(), **options):
    options = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-4, "per_device_train_batch_size": 2} | options
    options |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "gradient_checkpointing": True}
    model = tiny_model("qwen3", dtype=torch.bfloat16, seed=seed, vocab_size=64)
    args = TrainingArguments(str(folder), **options)
    trainer = Trainer(model, args, train_dataset=ROWS, callbacks=[*callbacks])
    keep_float32(trainer.create_optimizer())
    return trainer


def copies_of(trainer):
    state = trainer.optimizer.state
    copies = [state[weight]["float32_copy"] for group in trainer.optimizer.param_groups for weight in group["params"]]
    weights = [weight for group in trainer.optimizer.param_groups for weight in group["params"]]
    assert {*map(id, weights)} == {*map(id, trainer.model_wrapped.parameters())}
    assert all(torch.equal(copy.bfloat16(), weight) for copy, weight in zip(copies, weights, strict=True))
    return copies


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_trainer_has_the_bits_of_one_that_went_on(accumulation, tmp_path):
    went_on = trainer_of(tmp_path / "a", gradient_accumulation_steps=accumulation)
    went_on.train()
    wanted = copies_of(went_on)
    stopped = trainer_of(tmp_path / "b", callbacks=[Stop()], gradient_accumulation_steps=accumulation)
    stopped.train()
    saved = torch.load(tmp_path / "b" / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert all("float32_copy" in state for state in saved["state"].values())
    resumed = trainer_of(tmp_path / "b", seed=1, gradient_accumulation_steps=accumulation)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert all(map(torch.equal, copies_of(resumed), wanted))
    assert any(not torch.equal(copy, copy.bfloat16().float()) for copy in wanted)


def sharded(folder):
    as_launched()
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}
    config |= {"state_dict_type": "SHARDED_STATE_DICT"}
    options = {"fsdp": "full_shard auto_wrap", "fsdp_config": config}
    found = []
    for seed, callbacks, resume in ((0, [], None), (0, [Stop()], None), (1, [], True)):
        where = folder / ("a" if not callbacks and not resume else "b")
        trainer = trainer_of(where, seed, callbacks, **options)
        trainer.train(resume_from_checkpoint=resume)
        found.append([copy.full_tensor() for copy in copies_of(trainer)])
    return type(trainer.model_wrapped).__name__, found


def test_fsdp2_of_the_arguments(tmp_path):
    first, second = spawn(functools.partial(sharded, tmp_path), 2, tmp_path)
    assert first[0] == "FSDPQwen3ForCausalLM"
    (wanted, stopped, resumed), (others, *_) = first[1], second[1]
    assert all(map(torch.equal, wanted, others))
    assert any(not torch.equal(copy, copy.bfloat16().float()) for copy in wanted)
    assert not all(map(torch.equal, wanted, stopped))
    assert all(map(torch.equal, wanted, resumed))


@pytest.mark.parametrize("given", ["all", "those that train"])
def test_lora(given, device):
    """Adapters step as float32 ones with the same gradients; the base stays as it is and has no copies."""
    peft = pytest.importorskip("peft")
    model = tiny_model("qwen3", dtype=torch.bfloat16, device=device, vocab_size=64)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    adapters = [weight for weight in model.parameters() if weight.requires_grad]
    base = [weight for weight in model.parameters() if not weight.requires_grad]
    before = [weight.clone() for weight in base]
    full = [weight.detach().float().requires_grad_() for weight in adapters]
    options = {"lr": 1e-4, "weight_decay": 0.1}
    optimizer = keep_float32(torch.optim.AdamW(model.parameters() if given == "all" else adapters, **options))
    reference = torch.optim.AdamW(full, **options)
    rows = torch.tensor([row["input_ids"] for row in ROWS], device=device)
    for _ in range(6):
        model(input_ids=rows, labels=rows).loss.backward()
        for weight, wanted in zip(adapters, full, strict=True):
            wanted.grad = weight.grad.float()
        optimizer.step(), reference.step()
        optimizer.zero_grad()
    assert {*optimizer.state} == {*adapters}
    assert all(map(torch.equal, base, before))
    copies = [optimizer.state[weight]["float32_copy"] for weight in adapters]
    assert all(map(torch.equal, copies, full))
    assert all(torch.equal(weight, copy.bfloat16()) for weight, copy in zip(adapters, copies, strict=True))
    assert any(not torch.equal(copy, copy.bfloat16().float()) for copy in copies)
