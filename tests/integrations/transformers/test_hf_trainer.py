"""transformers' Trainer: packed and padded steps count the same targets and train to the same weights."""

import functools
import itertools
import os
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState  # noqa: E402
from common.hf_setup import byte_tokenizer  # noqa: E402
from helpers.hf_models import tiny_model  # noqa: E402
from helpers.pages import block_with  # noqa: E402
from helpers.processes import as_launched, spawn, spawn_on_gpus  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402

import packing_ops as po  # noqa: E402
from packing_ops.contrib.unsloth import enable_packing  # noqa: E402
from packing_ops.data import PaddingFreeCollator  # noqa: E402
from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_gpu")
LENGTHS = [30, 7, 21, 2, 45, 33, 12, 9]
ROWS, ACCUMULATED = 2, 2  # documents of a batch, batches of a step


def padded():
    return transformers.DataCollatorForSeq2Seq(byte_tokenizer())


COLLATORS = {
    "padded": padded,
    "transformers' flattening": transformers.DataCollatorWithFlattening,
    "the same with cu_seq_lens": lambda: transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True),
    "PaddingFreeCollator": PaddingFreeCollator,
    "enable_packing": lambda: enable_packing(padded()),
}


def trained(model, collator, folder, device):
    """num_items_in_batch and loss of every batch, the loss of an evaluation."""
    counted = []

    class Recorded(transformers.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            counted.append((int(num_items_in_batch), loss.item()))
            return loss

    torch.manual_seed(0)
    documents = [torch.randint(3, 61, (length,)).tolist() for length in LENGTHS]
    examples = [{"input_ids": ids, "labels": ids} for ids in documents]
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=ACCUMULATED,
        train_sampling_strategy="sequential",
        learning_rate=1e-2,
        optim="sgd",
        num_train_epochs=2,
        use_cpu=device == "cpu",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Recorded(
        model=model, args=settings, data_collator=collator, train_dataset=examples, eval_dataset=examples
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return counted, trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("collator", COLLATORS)
def test_steps_are_those_of_the_stock_model_on_padded_batches(collator, device, tmp_path):
    stock = tiny_model("qwen3", device=device, vocab_size=258)
    wanted, wanted_loss = trained(stock, padded(), tmp_path, device)
    model = tiny_model("qwen3", device=device, vocab_size=258)
    assert apply_packing_ops(model)
    found, loss = trained(model, COLLATORS[collator](), tmp_path, device)
    revert_packing_ops(model)
    documents = ROWS * ACCUMULATED
    steps = [sum(LENGTHS[i : i + documents]) - documents for i in range(0, len(LENGTHS), documents)]
    assert [count for count, _ in found] == [count for count in steps for _ in range(ACCUMULATED)] * 2
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=1e-5)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def losses_of(model, collator, folder, rows, kind="Trainer", compiled=None, prepare=None, **options):
    """The trainer, and the loss of each of four steps, after apply_packing_ops if the collator packs.

    compiled: the backend of layers that are compiled. prepare: called with the trainer before train().
    """
    torch.manual_seed(0)
    examples = [{"input_ids": ids, "labels": ids} for ids in (torch.randint(3, 61, (n,)).tolist() for n in LENGTHS)]
    of_settings, of_trainer, more = transformers.TrainingArguments, transformers.Trainer, {}
    if kind == "SFTTrainer":
        import datasets
        import trl

        of_settings, of_trainer, more = trl.SFTConfig, trl.SFTTrainer, {"processing_class": byte_tokenizer()}
        options = {"bf16": False, "gradient_checkpointing": False} | options | {"max_length": None}
        options |= {"dataset_kwargs": {"skip_prepare_dataset": True}}
        examples = datasets.Dataset.from_list(examples)
    settings = of_settings(
        str(folder), per_device_train_batch_size=rows, train_sampling_strategy="sequential", learning_rate=1e-2,
        optim="sgd", max_steps=4, report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1,
        max_grad_norm=0.0, use_cpu=model.device.type == "cpu", **options,
    )  # fmt: skip
    trainer = of_trainer(model, settings, collator, examples, **more)
    trainer.remove_callback(transformers.PrinterCallback)
    if isinstance(collator, PaddingFreeCollator):
        apply_packing_ops(trainer.model, fused_loss=kind == "Trainer")  # SFTTrainer has one
    for layer in trainer.model.get_decoder().layers if compiled else ():
        layer.compile(backend=compiled)
    if prepare:
        prepare(trainer)
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


BACKENDS = {"cpu": "aot_eager", "cuda": "inductor"}


def test_label_smoothing_counts_the_targets_of_padded_rows(device, tmp_path):
    """The Trainer computes this loss itself, from labels that the collator has cut at documents."""
    models = [tiny_model("qwen3", device=device, vocab_size=258) for _ in range(2)]
    collators = padded(), PaddingFreeCollator()
    (_, wanted), (_, found) = (
        losses_of(model, collator, tmp_path, ROWS, label_smoothing_factor=0.1)
        for model, collator in zip(models, collators, strict=True)
    )
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_that_are_compiled_before_training(checkpointing, kind, device, tmp_path, fresh_compile):
    models = [tiny_model("qwen3", device=device, vocab_size=258, num_hidden_layers=2) for _ in range(2)]
    _, wanted = losses_of(models[0], padded(), tmp_path, ROWS, kind)
    options = {"kind": kind, "compiled": BACKENDS[device], "gradient_checkpointing": checkpointing}
    trainer, found = losses_of(models[1], PaddingFreeCollator(), tmp_path, ROWS, **options)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert all(layer._compiled_call_impl is not None for layer in trainer.model.get_decoder().layers)


@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
def test_a_model_that_the_trainer_compiles_beside_checkpointing(kind, device, tmp_path, fresh_compile, monkeypatch):
    if device == "cuda":  # accelerate sets it for a compiled model
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    models = [tiny_model("qwen3", device=device, vocab_size=258, num_hidden_layers=1) for _ in range(2)]
    options = {
        "torch_compile": True,
        "torch_compile_backend": BACKENDS[device],
        "gradient_checkpointing": True,
        "tf32": False,
    }
    _, wanted = losses_of(models[0], padded(), tmp_path, ROWS, kind)
    _, found = losses_of(models[1], PaddingFreeCollator(), tmp_path, ROWS, kind, **options)
    assert found == pytest.approx(wanted, rel=1e-5 if device == "cpu" else 1e-3)


def test_a_policy_in_sft_trainer(device, tmp_path):
    """What it keeps changes no loss."""
    models = [tiny_model("qwen3", device=device, vocab_size=258, num_hidden_layers=2) for _ in range(2)]
    _, wanted = losses_of(models[0], padded(), tmp_path, ROWS, "SFTTrainer")

    def prepare(trainer):
        policy = po.checkpoint_policy(trainer.model, budget=2**24)
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": policy})
        policies.append(policy)

    policies = []
    _, found = losses_of(models[1], PaddingFreeCollator(), tmp_path, ROWS, "SFTTrainer", prepare=prepare)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert policies[0].explain().startswith("each of")


# --- FSDP2, by the Trainer's arguments ---


def groups_of(model):
    """What FSDP2 gathers together."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [group for module in modules if (group := module._get_fsdp_state()._fsdp_param_group)]


def sharded(folder, kind, bf16, prepare=None):
    as_launched(bf16)
    found = []
    for checkpointing in (False, True):
        options = {"fsdp": True, "fsdp_config": {"activation_checkpointing": checkpointing}, "bf16": bf16}
        model = tiny_model("qwen3", vocab_size=258)
        options["prepare"] = prepare
        trainer, losses = losses_of(model, PaddingFreeCollator(), folder, ROWS, kind, **options)
        dtypes = {parameter.dtype for parameter in trainer.model_wrapped.parameters()}
        averaged = {group.mp_policy.reduce_dtype for group in groups_of(trainer.model_wrapped)}
        found.append((type(trainer.model_wrapped).__name__, dtypes, losses, averaged))
    return found


def averaged_in_float32(trainer):
    script = block_with("docs/parallel.md", "SFTConfig(")
    lines = re.findall(r"^# (.*(?:dataclasses|plugin).*)$", script, re.M)  # commented out there
    assert len(lines) == 3
    exec("\n".join(lines), {"trainer": trainer})


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
def test_fsdp2_of_the_arguments(kind, dtype, tmp_path):
    """With bf16=True float32 weights compute in bfloat16. Gradients are averaged in dtype, by the page in float32."""
    if kind == "SFTTrainer":
        pytest.importorskip("trl")
    stock = tiny_model("qwen3", vocab_size=258)
    _, wanted = losses_of(stock, padded(), tmp_path, 2 * ROWS)
    assert len(set(wanted)) == 4
    bf16, prepare = dtype is not None, averaged_in_float32 if dtype == torch.float32 else None
    ranks = spawn(functools.partial(sharded, tmp_path, kind, bf16, prepare), 2, tmp_path)
    for wrapped, dtypes, losses, averaged in itertools.chain(*ranks):
        assert wrapped == "FSDPQwen3ForCausalLM"
        assert averaged == {dtype}
        assert dtypes == {torch.float32}
        assert losses == pytest.approx(wanted, rel=1e-2 if bf16 else 1e-5)
        assert (max(abs(a / b - 1) for a, b in zip(losses, wanted, strict=True)) > 1e-5) == bf16


CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_offload_params: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
  fsdp_sync_module_states: false  # FSDP1 would want a GPU
"""


def test_the_script_wins_over_an_accelerate_config(tmp_path):
    """The config says FSDP1. CPU offload, which the script leaves out, is as the config says."""
    trl, launch = pytest.importorskip("trl"), pytest.importorskip("accelerate.commands.launch")
    from accelerate.utils import FullyShardedDataParallelPlugin

    (tmp_path / "config.yaml").write_text(CONFIG)
    given = launch.launch_command_parser().parse_args(["--config_file", str(tmp_path / "config.yaml"), "sft.py"])
    given, *_ = launch._validate_launch_command(given)
    (block,) = re.findall(r"^wrapped = {.*?^}", block_with("docs/parallel.md", "SFTConfig("), flags=re.S | re.M)
    exec(block, names := {})
    with mock.patch.dict(os.environ, launch.prepare_multi_gpu_env(given)):
        of_config = FullyShardedDataParallelPlugin()
        args = trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, **names["wrapped"])
        plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
        assert trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False).fsdp_plugin_args is None
    assert (of_config.fsdp_version, of_config.activation_checkpointing) == (1, False)
    assert (plugin.fsdp_version, plugin.activation_checkpointing, plugin.reshard_after_forward) == (2, True, True)
    assert "SHARDED" in str(of_config.state_dict_type)
    assert "FULL" in str(plugin.state_dict_type)
    assert isinstance(plugin.cpu_offload, torch.distributed.fsdp.CPUOffloadPolicy)


# --- two GPUs, by the Trainer's arguments ---

SETTINGS_OF_GPUS = [
    (wrapper, bf16, how)
    for wrapper in ("DDP", "FSDP2")
    for bf16 in (False, True)
    for how in ("plain", "checkpointing", "compiled")
]


def on_gpus(folder, kind):
    """What wraps the model, and the losses, of each setting."""
    rank, device = str(dist.get_rank()), f"cuda:{dist.get_rank()}"
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"})
    found = {}
    for setting in SETTINGS_OF_GPUS:
        wrapper, bf16, how = setting
        torch._dynamo.reset()
        AcceleratorState._reset_state()
        options = {"bf16": bf16, "compiled": "inductor" if how == "compiled" else None}
        if wrapper == "FSDP2":
            options |= {"fsdp": True, "fsdp_config": {"activation_checkpointing": how == "checkpointing"}}
        elif how == "checkpointing":
            options["gradient_checkpointing"] = True
        model = tiny_model("qwen3", device=device, vocab_size=258)
        with mock.patch.dict(os.environ):  # transformers says there how accelerate wraps a model
            trainer, losses = losses_of(model, PaddingFreeCollator(), folder, ROWS, kind, **options)
        found[setting] = type(trainer.model_wrapped).__name__, losses
    return found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
def test_losses_on_gpus_are_those_of_padded_rows(kind, tmp_path):
    """One test: two processes, which take most of its time to start, train with all settings."""
    if kind == "SFTTrainer":
        pytest.importorskip("trl")
    _, wanted = losses_of(tiny_model("qwen3", vocab_size=258), padded(), tmp_path, 2 * ROWS)
    for of_rank in spawn_on_gpus(functools.partial(on_gpus, tmp_path, kind), 2, tmp_path):
        for setting, (wrapped, losses) in of_rank.items():
            wrapper, bf16, _ = setting
            assert wrapped.startswith("DistributedDataParallel" if wrapper == "DDP" else "FSDP"), setting
            assert losses == pytest.approx(wanted, rel=1e-2 if bf16 else 1e-5), setting
            assert (losses != pytest.approx(wanted, rel=1e-5)) == bf16, setting
