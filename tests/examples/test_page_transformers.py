"""The Python of README.md, docs/transformers.md, transformers-models.md and memory.md runs as it is written, and
what their tables say of models that are copied and loaded holds.
"""

import copy
import functools
import inspect
import pickle
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, processes
from helpers.pages import ROWS, block_for, block_with, blocks_of, in_place_of, tiny_llama

import packing_ops as po


def test_the_program_of_the_readme(tmp_path, capsys):
    pytest.importorskip("transformers")
    tiny_llama().save_pretrained(tmp_path)
    block, names = block_with("README.md", "info(model)"), {}
    exec(block.replace("Qwen/Qwen3-0.6B", str(tmp_path)).replace('"cuda"', '"cpu"'), names)
    said = capsys.readouterr().out
    modules = names["model"].config.num_hidden_layers
    for line in (
        f"attention: packing_ops in {modules} modules",
        "loss: packing_ops, from hidden",
        "1 row, 2 documents",
    ):
        assert line in said
    assert names["model"].get_decoder().layers[0].self_attn.q_proj.weight.grad is not None


def test_trainers_of_the_readme(tmp_path, monkeypatch, capsys):
    """SFT and GRPO of TRL: each block is a program by itself, but for the data."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from common.hf_setup import byte_tokenizer

    options = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "max_steps": 1}

    def on_the_cpu(config):
        return lambda folder, **more: config(str(tmp_path / folder), **{**more, **options, "bf16": False})

    def of_trl(kind, **more):
        made = lambda self, *args, **given: kind.__init__(  # noqa: E731
            self, *args, processing_class=byte_tokenizer(), **more, **given
        )
        return type(kind.__name__, (kind,), {"__init__": made})

    datasets.disable_progress_bars()
    tiny_llama().save_pretrained(tmp_path / "model")
    sft, grpo = (
        block_with("README.md", text).replace("Qwen/Qwen3-0.6B", str(tmp_path / "model"))
        for text in ("SFTTrainer", "GRPOTrainer")
    )
    assert "layer.compile()" in sft
    # Without the seconds that code for the CPU takes.
    sft = sft.replace("layer.compile()", 'layer.compile(backend="aot_eager_decomp_partition")')
    args = on_the_cpu(trl.GRPOConfig)("grpo", per_device_train_batch_size=4, num_generations=2, max_completion_length=4)
    for name, fixed in (("SFTTrainer", {}), ("GRPOTrainer", {"args": args})):
        monkeypatch.setattr(trl, name, of_trl(getattr(trl, name), **fixed))
    monkeypatch.setattr(trl, "SFTConfig", on_the_cpu(trl.SFTConfig))
    names = {"dataset": datasets.Dataset.from_list(ROWS)}
    exec(sft, names)
    said = capsys.readouterr().out
    assert re.search(r"attention: packing_ops in \d+ modules", said)
    assert f"last forward: 1 row, {len(ROWS)} documents" in said
    assert names["trainer"].state.global_step == 1
    assert "seq_lengths" in names["trainer"].train_dataset.column_names
    prompts = datasets.Dataset.from_list([{"prompt": "p" * i} for i in (1, 2, 3)])
    names = {"prompts": prompts, "reward": lambda completions, **_: [float(len(set(text))) for text in completions]}
    grpo, train = grpo.split("trainer.train()")
    exec(grpo, names)
    assert train.strip() == ""
    rows = []
    names["trainer"].model.model.register_forward_pre_hook(
        lambda _, __, kwargs: rows.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    names["trainer"].train()
    assert rows == [1] * 5, (
        "four samples in one packed row; this model has no KV cache: also while four tokens are sampled"
    )


def test_a_model_that_is_there():
    pytest.importorskip("transformers")
    names = {"model": tiny_llama()}
    exec(blocks_of("docs/transformers.md")[0], names)
    assert names["model"].config._attn_implementation == "packing_ops"


@pytest.mark.parametrize("inside", [False, True])
def test_checkpointing_of_the_page(inside, capsys, fresh_compile):
    """Compiled layers keep products, with put_checkpoint and with the line for newer versions."""
    transformers = pytest.importorskip("transformers")
    if not inside and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.skip("transformers before 5.23 puts the checkpoint around a compiled layer")
    from packing_ops.integrations.transformers import apply_packing_ops

    model = tiny_llama().train()
    steps = "model(torch.arange(9)[None], labels=torch.arange(9)[None], use_cache=False).loss.backward()"
    block = block_with("docs/memory.md", "def put_checkpoint").replace("...  ", steps)
    block = block.replace("layer.compile()", 'layer.compile(backend="aot_eager_decomp_partition")')
    assert steps in block
    if not inside:
        block = in_place_of("    put_checkpoint(layer, context_fn=policy)\n", "", block)
        own = next(line for line in block.splitlines() if line.startswith("policy ="))
        block = in_place_of(f"{own}\n", block_with("docs/memory.md", "gradient_checkpointing_enable"), block)
    names = {"model": model, "torch": torch, "apply_packing_ops": apply_packing_ops}
    exec(block, names)
    names.clear()  # guards of torch.compile keep the globals of put_checkpoint
    said = capsys.readouterr().out
    assert f"each of {model.config.num_hidden_layers} layers keeps" in said
    assert int(re.search(r"of (\d+) of \d+ products", said)[1]) > 0
    assert model.get_decoder().layers[0].self_attn.q_proj.weight.grad is not None


def test_put_checkpoint_of_the_page_is_the_examples(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from common.training import put_checkpoint

    assert inspect.getsource(put_checkpoint) in block_with("docs/memory.md", "def put_checkpoint")


def test_the_alias_of_the_page_and_its_undo():
    names = {}
    exec(block_with("docs/adopt/README.md", "install_flash_attn_alias"), names)
    q, k, v, ends = (names[name] for name in ("q", "k", "v", "ends"))
    assert torch.equal(names["out"], po.varlen_attention(q, k, v, ends))
    assert "flash_attn" not in sys.modules


def trainer_of(folder, device, **options):
    """Of a model that does not know this package yet."""
    transformers = pytest.importorskip("transformers")
    from packing_ops.data import PaddingFreeCollator

    torch.manual_seed(0)
    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, save_steps=2, logging_steps=1, report_to="none", use_cpu=device == "cpu",
        disable_tqdm=True, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    return {
        "Trainer": transformers.Trainer,
        "model": tiny_llama(),
        "args": args,
        "dataset": ROWS,
        "PaddingFreeCollator": PaddingFreeCollator,
    }


@pytest.mark.parametrize("applied", [True, False])
def test_a_trainer_resumes_with_what_was_applied(device, one_gpu, tmp_path, applied):
    from packing_ops.integrations.transformers import apply_packing_ops

    names = trainer_of(tmp_path, device, max_steps=4) | {
        "apply_packing_ops": apply_packing_ops if applied else lambda model, **options: None
    }
    block = block_with("docs/transformers.md", "resume_from_checkpoint")
    first = block.replace("resume_from_checkpoint=True", "")
    exec(first, names)
    whole = [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry]
    shutil.rmtree(tmp_path / "checkpoint-4")
    names |= trainer_of(tmp_path, device, max_steps=4)
    exec(block, names)
    resumed = [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry]
    assert resumed == pytest.approx(whole, abs=1e-5)
    assert (names["model"].config._attn_implementation == "packing_ops") == applied


def test_examples_of_a_trainer_are_one_packed_row(device, one_gpu, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from packing_ops.integrations.transformers import info

    of_page = transformers.TrainingArguments
    fixed = {"use_cpu": device == "cpu", "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    fixed |= {"max_steps": 2, "dataloader_pin_memory": False}
    monkeypatch.setattr(transformers, "TrainingArguments", lambda _, **given: of_page(str(tmp_path), **given, **fixed))
    tiny_llama().save_pretrained(tmp_path / "model")
    exec(block_for("docs/transformers.md", "TrainingArguments(", tmp_path / "model"), names := {})
    said = info(names["trainer"].model)
    assert "1 row, 16 documents" in said
    assert "loss: packing_ops" in said


def test_stock_documents_are_apart_only_without_a_cache(tmp_path):
    names = trainer_of(tmp_path, "cpu")
    model, ids = names["model"].eval(), torch.arange(3, 12)[None]
    model.config.use_cache = True
    call = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])}
    wanted = model(ids[:, 4:], use_cache=False).logits
    torch.testing.assert_close(model(ids, **call, use_cache=False).logits[:, 4:], wanted)
    assert (model(ids, **call).logits[:, 4:] - wanted).abs().max() > 1e-2
    names["Trainer"](model, names["args"])
    assert not model.config.use_cache, "the Trainer makes none"


@pytest.mark.parametrize("full", [False, True])
def test_a_trainer_keeps_the_policy_unless_it_checkpoints(device, one_gpu, tmp_path, full):
    names = trainer_of(tmp_path, device, max_steps=1, gradient_checkpointing=full)
    trainer = names["Trainer"](names["model"], names["args"], names["PaddingFreeCollator"](), names["dataset"])
    policy = po.checkpoint_policy(trainer.model, budget=2**24)
    trainer.model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": policy})
    trainer.train()
    assert policy.explain().startswith("nothing ran yet" if full else "each of")


def test_adapters_of_the_page_and_compiled_layers(fresh_compile):
    pytest.importorskip("peft")
    from packing_ops.integrations.transformers import apply_packing_ops

    names = {"model": tiny_llama().train(), "apply_packing_ops": apply_packing_ops}
    exec(block_with("docs/transformers.md", "get_peft_model"), names)
    block = block_with("docs/transformers.md", "# of a PEFT model too")
    exec(block.replace("compile()", 'compile(backend="eager")'), names)
    model, ids = names["model"], torch.arange(9)[None]
    out = model(input_ids=ids, labels=ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), use_cache=False)
    assert out.logits is None
    out.loss.backward()
    learnt = {name.split(".")[-3] for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learnt == {"lora_A", "lora_B"}
    compiled = [layer for layer in model.get_decoder().layers if layer._compiled_call_impl is not None]
    assert len(compiled) == model.config.num_hidden_layers


@pytest.mark.parametrize("autocast", [False, True])
def test_weights_of_four_bits_block_for(tmp_path, autocast):
    """Attention computes in float32 unless there is autocast, as the page says."""
    transformers = pytest.importorskip("transformers")
    for library in ("peft", "bitsandbytes"):
        pytest.importorskip(library)
    from packing_ops.integrations.transformers import apply_packing_ops

    tiny_llama().save_pretrained(tmp_path)
    four_bits = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    names = {"four_bits": four_bits, "apply_packing_ops": apply_packing_ops}
    exec(block_for("docs/transformers.md", "prepare_model_for_kbit_training", tmp_path), names)
    exec(block_with("docs/transformers.md", "get_peft_model"), names)
    model = names["model"].train()  # on a GPU, if there is one
    ids, positions = (
        torch.arange(9)[None].to(model.device),
        torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).to(model.device),
    )
    assert model.get_decoder().layers[0].self_attn.q_proj.base_layer.weight.dtype == torch.uint8
    dtypes = []
    model.get_decoder().layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda _, args: dtypes.append(args[0].dtype)
    )
    with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
        out = model(input_ids=ids, labels=ids, position_ids=positions)
    out.loss.backward()
    assert {*dtypes} == {torch.bfloat16 if autocast else torch.float32}
    learnt = {name.split(".")[-3] for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learnt == {"lora_A", "lora_B"}


def test_undo_block_for():
    pytest.importorskip("transformers")
    from packing_ops.integrations.transformers import apply_packing_ops

    model, ids = tiny_llama(), torch.arange(9)[None]
    before, attention = model(ids).logits, model.config._attn_implementation
    apply_packing_ops(model)
    exec(block_with("docs/transformers.md", "revert_registration"), {"model": model})
    assert model.config._attn_implementation == attention
    assert torch.equal(model(ids).logits, before)


def undone(how):
    """Whether a revert of a compiled or wrapped model gives the bits of before."""
    from torch.distributed.fsdp import fully_shard

    from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops

    model, ids = tiny_llama().train(), torch.arange(9)[None]
    row = {"input_ids": ids, "labels": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])}
    stock = model(**row, use_cache=False)
    apply_packing_ops(model, fused_loss=True)
    for layer in model.get_decoder().layers:
        if how == "compiled":
            layer.compile(backend="aot_eager")
        if how == "FSDP2":
            fully_shard(layer)
    outer = torch.nn.parallel.DistributedDataParallel(model) if how == "DDP" else model
    outer = fully_shard(model) if how == "FSDP2" else outer
    first = outer(**row, use_cache=False)
    first.loss.backward()
    revert_packing_ops(outer)
    again = outer(**row, use_cache=False)
    again.loss.backward()
    return first.logits is None and torch.equal(again.logits, stock.logits) and torch.equal(again.loss, stock.loss)


def test_undo_of_compiled_layers(fresh_compile):
    pytest.importorskip("transformers")
    assert undone("compiled")


@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
def test_undo_of_a_wrapped_model(how, tmp_path):
    pytest.importorskip("transformers")
    assert processes.spawn(functools.partial(undone, how), 1, tmp_path) == [True]


def test_an_encoder_block_for():
    """The loss of the packed row is the mean over the tokens of separate documents, those of first tokens too."""
    transformers = pytest.importorskip("transformers")
    from packing_ops.integrations.transformers import apply_packing_ops

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, **dropout, num_attention_heads=4)
    examples = [{"input_ids": torch.randint(3, 60, (length,))} for length in (5, 9, 3)]
    names = {"model": transformers.BertForMaskedLM(config), "apply_packing_ops": apply_packing_ops}
    losses = [names["model"](ids, labels=ids).loss * ids.numel() for ids in (e["input_ids"][None] for e in examples)]
    found = []
    names["model"].register_forward_hook(lambda _, __, out: found.append(out.loss.detach()))
    exec(block_with("docs/transformers-models.md", "separator_id=None"), names | {"examples": examples})
    torch.testing.assert_close(found, [sum(losses).detach() / 17])


def test_what_copies_and_weights_keep():
    pytest.importorskip("transformers")
    from packing_ops.integrations.transformers import apply_packing_ops

    model = tiny_llama()
    apply_packing_ops(model, fused_loss=True)
    ids = torch.arange(9)[None]
    call = {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]),
        "use_cache": False,
    }
    wanted = model.train()(**call).loss
    for kept in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert kept.config._attn_implementation == "packing_ops"
        out = kept(**call)
        assert out.logits is None
        torch.testing.assert_close(out.loss, wanted)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert model(**call).logits is None


def test_a_model_that_is_loaded_has_nothing_applied(tmp_path):
    transformers = pytest.importorskip("transformers")
    from packing_ops.integrations.transformers import apply_packing_ops

    model = tiny_llama()
    apply_packing_ops(model)
    model.save_pretrained(tmp_path)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation != "packing_ops"


def test_the_lines_of_a_llama_are_those_of_transformers():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    source = Path(modeling.__file__).read_text()
    table = (ROOT / "docs" / "llama.md").read_text()
    lines = re.findall(r"^\| `(.+?)` \|", table, re.M)
    assert len(lines) == 6
    assert [line for line in lines if line.partition("...")[0] not in source] == []


def test_experts_of_the_sampler_are_replayed():
    model = pytest.importorskip("helpers.hf_models").tiny_model("gpt_oss", vocab_size=64)
    from packing_ops.data import PaddingFreeCollator
    from packing_ops.integrations.transformers import apply_packing_ops, replay_routing

    apply_packing_ops(model)
    layers = model.config.num_hidden_layers
    experts = {3: torch.tensor([0, 1]), 5: torch.tensor([1, 2])}  # of documents with that many tokens
    examples = [{"input_ids": [7] * n, "routed_experts": pair.expand(n, layers, 2)} for n, pair in experts.items()]
    names = {"PaddingFreeCollator": PaddingFreeCollator, "replay_routing": replay_routing}
    names |= {"model": model, "examples": examples}
    exec(block_with("docs/transformers-models.md", "replay_routing"), names)
    gradients = [parameter.grad for name, parameter in model.named_parameters() if name.endswith("experts.down_proj")]
    assert len(gradients) == layers
    for gradient in gradients:  # of expert 3, which no token was sent to, there is none
        assert gradient.flatten(1).any(1).tolist() == [True, True, True, False]
