"""TRL's trainers that generate, and KTO, with enable_padding_free: losses, gradients and metrics are those of the
padded trainer.
"""

import pytest
import torch

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
import transformers  # noqa: E402
from common.hf_setup import byte_tokenizer  # noqa: E402
from helpers.hf_models import tiny_model  # noqa: E402
from helpers.trl_case import CLOSE, PAIRS, settings, without_padding  # noqa: E402

from packing_ops.integrations import trl as integration  # noqa: E402
from packing_ops.integrations.transformers import continuous_batching  # noqa: E402


def reward_of_text(completions, **kwargs):
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def kto_trainer(tmp_path, device, **more):
    rows = [
        {"prompt": p["prompt"], "completion": p[name], "label": name == "chosen"}
        for p in PAIRS
        for name in p
        if name != "prompt"
    ]
    models = [tiny_model("llama", vocab_size=258, device=device, seed=seed) for seed in (0, 1)]
    return trl.KTOTrainer(
        model=models[0],
        ref_model=models[1],
        args=settings("KTOConfig", tmp_path, device, **more),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=byte_tokenizer(),
    )


def online_trainer(kind, tmp_path, device, **more):
    """GRPO or RLOO with a reference model of other weights; distillation from a teacher of other weights."""
    models = [tiny_model("llama", vocab_size=258, device=device, seed=seed) for seed in (0, 1)]
    more = {"max_completion_length": 6, "temperature": 0.7, **more}
    prompts = datasets.Dataset.from_list([{"prompt": pair["prompt"] * 2} for pair in PAIRS])
    given = {"model": models[0], "train_dataset": prompts, "processing_class": byte_tokenizer()}
    if kind == "Distillation":
        given["teacher_model"] = models[1]
    else:
        given["reward_funcs"] = reward_of_text
        more = {"num_generations": 2, "beta": 0.0, **more}
        if more["beta"]:  # TRL loads the reference by the name of the model
            models[1].save_pretrained(tmp_path / "reference")
            models[0].config._name_or_path = str(tmp_path / "reference")
    return getattr(trl, f"{kind}Trainer")(args=settings(f"{kind}Config", tmp_path, device, **more), **given)


def loss_and_grads(trainer, inputs):
    """And how many tokens each pass through a decoder had."""
    tokens, hooks = [], []
    for name in ("model", "ref_model", "teacher_model"):
        if getattr(trainer, name, None) is not None:
            decoder = getattr(trainer, name).model.layers[0]
            hooks.append(decoder.register_forward_pre_hook(lambda _, args: tokens.append(args[0].shape[:2].numel())))
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=None)
    loss.backward()
    for hook in hooks:
        hook.remove()
    grads = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}
    return loss.detach(), grads, {name: values[-1] for name, values in trainer._metrics["train"].items()}, tokens


def assert_unpadded(padded, packed, inputs):
    names = ("prompt_mask", "completion_mask") if "prompt_mask" in inputs else ("attention_mask",)
    mask = torch.cat([inputs[name] for name in names], 1)
    first = inputs["KL_attention_mask"] if inputs.get("KL_attention_mask") is not None else mask  # KTO's first pass
    assert 0 < first.sum() < first.numel()
    (loss, grads, metrics, before), (found, packed_grads, packed_metrics, after) = (
        loss_and_grads(trainer, inputs) for trainer in (padded, packed)
    )
    torch.testing.assert_close(found, loss, **CLOSE)
    for name, grad in grads.items():
        torch.testing.assert_close(packed_grads[name], grad, **CLOSE, msg=name)
    assert packed_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-4)
    assert before[0] == first.numel()
    assert after[0] == int(first.sum())
    assert len(after) == len(before)
    assert sum(after) < sum(before)


def share_at_a_gap(trainer, inputs):
    """A top_entropy_quantile whose threshold is in the widest gap of the inner entropies. First tokens have equal ones:
    between those, rounding would choose.
    """
    seen, stock = [], trainer.get_high_entropy_mask
    trainer.get_high_entropy_mask = lambda *given: seen.append(given) or stock(*given)
    with torch.no_grad():
        trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=None)
    del trainer.get_high_entropy_mask
    ((entropies, mask, _),) = seen
    gaps = entropies[mask.bool()].sort().values.diff()
    inner = len(gaps) // 4
    widest = inner + int(gaps[inner : len(gaps) - inner].argmax())
    assert gaps[widest] > 1e-3
    return 1 - (widest + 0.5) / len(gaps)


ONLINE = {
    "GRPO": ("GRPO", {}),
    "GRPO, reference, entropies": ("GRPO", {"beta": 0.1, "top_entropy_quantile": 0.5, "entropy_coef": 0.1}),
    "GRPO, iterations, sequences": ("GRPO", {"num_iterations": 2, "importance_sampling_level": "sequence"}),
    "GRPO, checkpointed": ("GRPO", {"gradient_checkpointing": True, "loss_type": "dr_grpo"}),
    "RLOO": ("RLOO", {}),
    "RLOO, reference": ("RLOO", {"beta": 0.1}),
    "distillation": ("Distillation", {}),
    "distillation, both ways": ("Distillation", {"beta": 0.5, "gradient_checkpointing": True}),
}


@pytest.mark.parametrize("case", ONLINE)
def test_trainers_that_generate(case, device, tmp_path):
    """Log-probs of old weights and of the reference too, which are made next to the samples."""
    kind, more = ONLINE[case]
    padded, packed = (online_trainer(kind, tmp_path, device, **more) for _ in range(2))
    without_padding(packed)
    batches = []
    for trainer in (padded, packed):
        torch.manual_seed(3)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        batches.append(trainer._prepare_inputs(next(iter(trainer.get_train_dataloader()))))
    assert batches[0].keys() == batches[1].keys()
    for name, value in batches[0].items():
        if isinstance(value, torch.Tensor):
            if "per_token_logps" in name:  # those of padding count nowhere
                keep = batches[0]["completion_mask"].bool()
                value, batches[1][name] = value[keep], batches[1][name][keep]
            torch.testing.assert_close(batches[1][name], value, **CLOSE, msg=name)
    if "top_entropy_quantile" in more:
        padded.top_entropy_quantile = packed.top_entropy_quantile = share_at_a_gap(padded, batches[0])
    assert_unpadded(padded, packed, batches[0])


@pytest.mark.parametrize("more", [{}, {"loss_type": "apo_zero_unpaired"}], ids=["kto", "apo"])
def test_kto(more, device, tmp_path):
    padded, packed = (kto_trainer(tmp_path, device, **more) for _ in range(2))
    without_padding(packed)
    assert_unpadded(padded, packed, next(iter(padded.get_train_dataloader())))


def test_gkd(device, tmp_path):
    from trl.experimental import gkd

    def trainer():
        models = [tiny_model("llama", vocab_size=258, device=device, seed=seed) for seed in (0, 1)]
        rows = [
            {"messages": [{"role": "user", "content": p["prompt"]}, {"role": "assistant", "content": p["chosen"]}]}
            for p in PAIRS
        ]
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = (
            "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
            "{% else %}{{ m.content }}{% endif %}{% endfor %}"
        )
        args = settings(gkd.GKDConfig, tmp_path, device, max_length=None, lmbda=0.0, eos_token="</s>")
        return gkd.GKDTrainer(
            model=models[0],
            teacher_model=models[1],
            args=args,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        )

    padded, packed = trainer(), without_padding(trainer())
    assert_unpadded(padded, packed, next(iter(padded.get_train_dataloader())))


BATCHED = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {
        **{"num_blocks": 64, "page_size": 128, "max_batch_tokens": 64, "use_cuda_graph": False},
        **{"auto_switch_to_flash": False},
    },
}
GENERATES = [("GRPO", {}), ("RLOO", {}), ("Distillation", {}), ("GRPO", BATCHED), ("RLOO", BATCHED)]
GENERATES = [pytest.param(kind, more, id=kind + ", batched" * bool(more)) for kind, more in GENERATES]


@pytest.mark.parametrize(("kind", "more"), GENERATES)
def test_training_that_generates(kind, more, device, tmp_path):
    """Samples too: generate runs through the model that packs, with its KV cache, and continuous batching with its
    paged one; then the trainer as it was.
    """
    if more and not continuous_batching.PATCHES:
        pytest.skip(f"transformers {transformers.__version__} batches in another way")
    options = {"num_train_epochs": 2, "learning_rate": 1e-2, "optim": "sgd", "logging_steps": 1}
    losses, weights = [], []
    for enabled in (False, True):
        trainer = online_trainer(kind, tmp_path, device, **options, **more)
        untrained = trainer.model.lm_head.weight.detach().clone()
        stock = trainer.model.forward, trainer.model.base_model.forward
        if enabled:
            without_padding(trainer)
        trainer.train()
        losses.append([e["loss"] for e in trainer.state.log_history if "loss" in e])
        weights.append(trainer.model.lm_head.weight.detach())
        assert not torch.equal(weights[-1], untrained)  # losses of equal lengths are 0, their gradients are not
        if enabled and more:
            assert trainer.model.config._attn_implementation == "packing_ops"
        integration.revert_padding_free(trainer)
        assert (trainer.model.forward, trainer.model.base_model.forward) == stock
    assert len(losses[0]) >= 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-5)
    torch.testing.assert_close(*weights, **CLOSE)
