"""TRL's trainers with enable_padding_free: losses, gradients and metrics are those of the padded trainer."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
from common.hf_setup import byte_tokenizer  # noqa: E402
from helpers.hf_models import tiny_model  # noqa: E402
from helpers.trl_case import CLOSE, PAIRS, ROWS, both, reward_model, settings, without_padding  # noqa: E402

from packing_ops._runtime import gate  # noqa: E402
from packing_ops.integrations import trl as integration  # noqa: E402
from packing_ops.integrations.transformers import apply_packing_ops, info, register  # noqa: E402


def dpo_trainer(tmp_path, device, **more):
    models = [tiny_model("llama", vocab_size=258, device=device, seed=seed) for seed in (0, 1)]
    rows = datasets.Dataset.from_list(PAIRS)
    return trl.DPOTrainer(
        model=models[0],
        ref_model=models[1],
        args=settings("DPOConfig", tmp_path, device, **more),
        train_dataset=rows,
        processing_class=byte_tokenizer(),
    )


def reward_trainer(tmp_path, device, pairs=PAIRS, **more):
    return trl.RewardTrainer(
        model=reward_model(device),
        args=settings("RewardConfig", tmp_path, device, **{"pad_token": "<0x00>", **more}),
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=byte_tokenizer(),
    )


def step(trainer):
    """Loss, gradients and metrics of the first batch; how many tokens the decoder was given."""
    batch, tokens = next(iter(trainer.get_train_dataloader())), []
    assert (batch["attention_mask"] == 0).any()
    hook = trainer.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: tokens.append((args[0] if args else kwargs["input_ids"]).numel()), with_kwargs=True
    )
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    hook.remove()
    grads = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    return loss.detach(), grads, {name: values[-1] for name, values in trainer._metrics["train"].items()}, tokens, batch


def assert_same(padded, packed):
    loss, grads, metrics, tokens, batch = padded
    torch.testing.assert_close(packed[0], loss, **CLOSE)
    for name, grad in grads.items():
        torch.testing.assert_close(packed[1][name], grad, rtol=1e-4, atol=1e-5, msg=name)
    assert packed[2] == pytest.approx(metrics, rel=1e-4, abs=1e-4)
    assert tokens == [batch["input_ids"].numel()]
    assert packed[3] == [int(batch["attention_mask"].sum())]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"loss_type": ["sigmoid", "sft", "ipo"], "loss_weights": [1.0, 0.5, 0.1], "ld_alpha": 0.5},
        {"gradient_checkpointing": True, "use_weighting": True},
    ],
    ids=["sigmoid", "several losses", "checkpointed, weighted"],
)
def test_dpo(more, device, tmp_path):
    assert_same(
        step(dpo_trainer(tmp_path, device, **more)), step(without_padding(dpo_trainer(tmp_path, device, **more)))
    )


def test_dpo_reference_of_a_batch_and_a_run(device, tmp_path):
    options = {"num_train_epochs": 2, "learning_rate": 1e-2, "optim": "sgd", "logging_steps": 1}
    padded, packed = dpo_trainer(tmp_path, device, **options), without_padding(dpo_trainer(tmp_path, device, **options))
    batch = next(iter(padded.get_train_dataloader()))
    wanted, found = (torch.cat(t.compute_ref_log_probs(t.ref_model, batch)) for t in (padded, packed))
    torch.testing.assert_close(found, wanted, **CLOSE)
    for trainer in (padded, packed):
        trainer.train()
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (padded, packed)]
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    integration.revert_padding_free(packed)
    again = [torch.cat(t.compute_ref_log_probs(t.ref_model, batch)) for t in (padded, packed)]
    torch.testing.assert_close(*again, **CLOSE)
    assert getattr(packed.model.forward, "func", None) is getattr(padded.model.forward, "func", None)


@pytest.mark.parametrize("margins", [False, True])
def test_reward(margins, device, tmp_path):
    pairs = [{**pair, "margin": 0.1 * i} for i, pair in enumerate(PAIRS)] if margins else PAIRS
    more = {"center_rewards_coefficient": 0.01}
    padded, packed = (reward_trainer(tmp_path, device, pairs, **more) for _ in range(2))
    assert_same(step(padded), step(without_padding(packed)))


def test_the_last_token_of_a_document_may_be_the_pad_token(device, tmp_path):
    """The padded trainer skips it, wherever documents end with it; alone, each is scored by its last token."""
    trainer = without_padding(reward_trainer(tmp_path, device, pad_token="</s>"))
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        found = trainer.model(**batch, use_cache=False).logits
        model = reward_model(device)
        for ids, mask, score in zip(batch["input_ids"], batch["attention_mask"], found, strict=True):
            document = ids[mask.bool()]
            hidden = model.model(document[None]).last_hidden_state
            assert document[-1] == 257
            torch.testing.assert_close(score, model.score(hidden[0, -1]), **CLOSE)


POSITIONS = {
    "ones in padding": lambda mask: (mask.cumsum(1) - 1).masked_fill(mask == 0, 1),
    "zeros in padding": lambda mask: (mask.cumsum(1) - 1).clamp(min=0),
    "on in padding": lambda mask: mask.cumsum(1).int(),
    "places": lambda mask: torch.arange(mask.shape[1], device=mask.device)[None],
    "places in each row": lambda mask: torch.arange(mask.shape[1], device=mask.device).expand(mask.shape),
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("kind", ["DPOTrainer", "RewardTrainer"])
@torch.no_grad()
def test_positions_of_padded_rows_change_nothing(kind, positions, device):
    """They restart at no document of the row that runs, nor inside of one."""
    model = tiny_model("llama", vocab_size=258, device=device) if kind == "DPOTrainer" else reward_model(device)
    _, packed = both(model, kind)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0], [0, 1, 0, 1, 0]], device=device)
    given = {"input_ids": torch.arange(9, 24, device=device).view(3, 5), "attention_mask": mask, "use_cache": False}
    assert torch.equal(packed(**given, position_ids=positions(mask)).logits, packed(**given).logits)


@pytest.mark.parametrize("kind", ["DPOTrainer", "RewardTrainer"])
@torch.no_grad()
def test_a_forward_makes_its_layout_once(kind, device, monkeypatch):
    """On a GPU the forward waits for the totals of each layout."""
    model = tiny_model("llama", vocab_size=258, device=device) if kind == "DPOTrainer" else reward_model(device)
    _, packed = both(model, kind)
    shapes, stock = [], gate.unpad_layout
    monkeypatch.setattr(gate, "unpad_layout", lambda mask, *more: shapes.append(mask.shape) or stock(mask, *more))
    mask = ROWS.clone().to(device)  # of which no other test's layout is kept
    packed(input_ids=mask * 9, attention_mask=mask)
    assert shapes == [ROWS.shape]


class OpsCalled(TorchDispatchMode):
    """The names of the ops that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(op._opname)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["DPOTrainer", "RewardTrainer"])
@torch.no_grad()
def test_nothing_is_read_behind_a_forward(kind):
    """There the host would wait for all of its kernels."""
    _, packed = both(tiny_model("llama", vocab_size=258) if kind == "DPOTrainer" else reward_model("cpu"), kind)
    with OpsCalled() as called:
        packed.register_forward_hook(lambda *_: called.names.clear())
        packed(input_ids=ROWS * 9, attention_mask=ROWS, position_ids=ROWS.cumsum(1))
    assert "_local_scalar_dense" not in called.names


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: the CPU waits for nothing")
@torch.no_grad()
def test_the_empty_rows_of_a_reward_model_are_not_waited_for(monkeypatch):
    monkeypatch.setenv("PACKING_OPS_CHECK", "0")  # as for a user
    _, packed = both(reward_model("cuda"), "RewardTrainer")
    packed(input_ids=ROWS.cuda() * 9, attention_mask=ROWS.cuda())
    mask = ROWS.cuda()  # of which no layout is kept
    positions = mask.cumsum(1)
    torch.cuda.synchronize()
    monkeypatch.setattr(type(packed), "forward", lambda *_, **__: {})  # what transformers waits for does not count
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed(input_ids=mask * 9, attention_mask=mask, position_ids=positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mask", [ROWS, ROWS.flip(1), ROWS[:1], ROWS[1:2], ROWS * 0 + ROWS[2:], ROWS[[0, 0]]])
@pytest.mark.parametrize("kind", ["DPOTrainer", "RewardTrainer"])
@torch.no_grad()
def test_rows_of_any_form(kind, mask, device):
    """Padding on either side, one row, single tokens, nothing to pad; hidden states return in their places too."""
    model = tiny_model("llama", vocab_size=258, device=device) if kind == "DPOTrainer" else reward_model(device)
    mask = mask.to(device)
    given = {"input_ids": torch.arange(9, 9 + mask.numel(), device=device).view(mask.shape) * mask}
    given |= {"attention_mask": mask, "output_hidden_states": True}
    wanted, found = (each(**given) for each in both(model, kind))
    for ours, theirs in zip((found.logits, *found.hidden_states), (wanted.logits, *wanted.hidden_states), strict=True):
        at = mask.bool() if theirs.dim() == 3 else slice(None)
        torch.testing.assert_close(ours[at], theirs[at], **CLOSE)


@pytest.mark.parametrize("keep", [1, 3, 7, torch.tensor([2, 4])], ids=str)
@torch.no_grad()
def test_the_last_tokens_of_each_row(keep, device):
    mask = ROWS.flip(1).to(device)
    given = {"input_ids": torch.arange(9, 30, device=device).view(3, 7) * mask, "attention_mask": mask}
    models = both(tiny_model("llama", vocab_size=258, device=device), "DPOTrainer")
    wanted, found = (each(**given, logits_to_keep=keep, return_dict=False)[0] for each in models)
    at = (mask[:, -keep:] if isinstance(keep, int) else mask[:, keep]).bool()
    torch.testing.assert_close(found[at], wanted[at], **CLOSE)


def test_an_evaluation_and_gradients_that_accumulate(device, tmp_path):
    """Rows of odd lengths, one of each batch left over."""
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 3}
    options |= {"num_train_epochs": 1, "learning_rate": 1e-2, "optim": "sgd", "logging_steps": 1}
    losses = []
    for padded in (True, False):
        trainer = dpo_trainer(tmp_path, device, **options)
        trainer = trainer if padded else without_padding(trainer)
        evaluated = trainer.evaluate(trainer.train_dataset)["eval_loss"]
        trainer.train()
        losses.append([evaluated, *(e["loss"] for e in trainer.state.log_history if "loss" in e)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_batches_of_padding_alone_and_without_targets(device, tmp_path):
    """Loss and gradients are those of the padded trainer; a row of only padding has no last token to score."""
    trainers = dpo_trainer(tmp_path, device), without_padding(dpo_trainer(tmp_path, device))
    batch = dict(next(iter(trainers[0].get_train_dataloader())))
    zeros = torch.zeros_like(batch["completion_mask"])
    for more in ({"completion_mask": zeros}, {"completion_mask": zeros, "attention_mask": zeros}):
        for trainer in trainers:
            trainer.compute_loss(trainer.model, {**batch, **more}).backward()
        padded, packed = ([p.grad for p in trainer.model.parameters()] for trainer in trainers)
        for ours, theirs in zip(packed, padded, strict=True):
            torch.testing.assert_close(ours, theirs)
    mask = ROWS.clone().to(device)
    ids, packed = torch.full_like(mask, 9), both(reward_model(device), "RewardTrainer")[1]
    mask[1] = 0
    with pytest.raises(ValueError, match=r"attention_mask: expected a token in each row, .* got rows \[1\] of padding"):
        packed(input_ids=ids, attention_mask=mask)
    with pytest.raises(ValueError, match=r"input_ids: expected at least one token, got \[0, 7\]"):
        packed(input_ids=ids[:0], attention_mask=mask[:0])


def test_what_is_refused(device, tmp_path):
    trainer = reward_trainer(tmp_path, device)
    with pytest.raises(
        ValueError, match="trainer: expected models with attn_implementation='packing_ops', got 'eager'"
    ):
        integration.enable_padding_free(trainer)
    with pytest.raises(TypeError, match=r"trainer: expected DPOTrainer, .* or GKDTrainer of TRL, got object"):
        integration.enable_padding_free(object())
    without_padding(trainer)
    batch = dict(next(iter(trainer.get_train_dataloader())))
    images = torch.zeros(4, 3, 8, 8, device=device)
    with pytest.raises(ValueError, match=r"pixel_values: expected text .* PaddingFreeCollator with position_ids"):
        trainer.compute_loss(trainer.model, {**batch, "pixel_values": images})
    with pytest.raises(ValueError, match="labels: expected None, got labels of whole documents"):
        trainer.model(**{name: batch[name] for name in ("input_ids", "attention_mask")}, labels=torch.zeros(8))
    numbers = batch["attention_mask"].cumsum(1).clamp(max=2) * batch["attention_mask"]
    with pytest.raises(ValueError, match=r"attention_mask: expected 0 and 1, got numbers of documents"):
        trainer.model(input_ids=batch["input_ids"], attention_mask=numbers)
    trainer._is_vision_dataset = True
    with pytest.raises(ValueError, match=r"trainer: expected text alone, got a dataset with images; .*or leave this"):
        integration.enable_padding_free(trainer)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "LoraConfig", "LilyConfig", "ShadowConfig"])
def test_adapters_that_look_at_a_whole_row_are_refused(kind, device, tmp_path):
    peft = pytest.importorskip("peft")
    more = {"LoraConfig": {"alora_invocation_tokens": [7]}, "PromptTuningConfig": {"num_virtual_tokens": 2}}
    model = apply_packing_ops(base := tiny_model("llama", vocab_size=258, device=device)) and base
    model = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **more.get(kind, {})))
    DPOTrainer = type("DPOTrainer", (), {"model": model})
    with pytest.raises(ValueError, match=f"trainer: expected adapters that take each token .* PEFT's {kind} "):
        integration.enable_padding_free(DPOTrainer())


def test_twice_is_once_and_lora(device, tmp_path):
    peft = pytest.importorskip("peft")
    losses = []
    for enabled in (False, True):
        torch.manual_seed(0)
        trainer = dpo_trainer(tmp_path, device)
        if enabled:
            once = without_padding(trainer).model.forward
            assert without_padding(trainer).model.forward is once
        torch.manual_seed(3)
        trainer.model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        losses.append(trainer.compute_loss(trainer.model, dict(next(iter(trainer.get_train_dataloader())))))
    torch.testing.assert_close(*losses, **CLOSE)


def test_what_was_enabled_is_returned_and_info_shows_it():
    class DPOTrainer:
        def __init__(self):
            self.model = tiny_model("llama", attn_implementation="packing_ops")
            self.ref_model = tiny_model("llama", attn_implementation="packing_ops")

    register()
    trainer = DPOTrainer()
    assert "padding:" not in info(trainer.model)
    assert integration.enable_padding_free(trainer) == ("model", "ref_model")
    ids = torch.arange(9, 15).view(2, 3)
    trainer.ref_model(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert "\nlast forward: 1 row, 2 documents, found by cu_seq_lens_q" in info(trainer.ref_model)
    assert "\npadding: none in a trainer's batches, by enable_padding_free(trainer)" in info(trainer.ref_model)
    integration.revert_padding_free(trainer)
    assert "padding:" not in info(trainer.ref_model)


def test_models_are_freed_when_their_trainer_is_gone():
    class DPOTrainer:
        def __init__(self):
            self.model, self.ref_model = tiny_model("llama", attn_implementation="packing_ops"), None

    register()
    trainer = DPOTrainer()
    integration.enable_padding_free(trainer)
    ids = torch.randint(3, 60, (2, 4))
    trainer.model(input_ids=ids, attention_mask=torch.ones_like(ids))
    part = weakref.ref(trainer.model.lm_head)
    gc.disable()
    try:
        del trainer
        assert part() is None
    finally:
        gc.enable()
