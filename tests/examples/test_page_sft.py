"""Tests of what docs/transformers.md says of SFT with TRL: its blocks, the lines of info, which tokens are learnt."""

import functools
import json
import re
import shutil

import pytest
import torch
from helpers import ROOT
from helpers.hf_models import tiny_model
from helpers.pages import ROWS, block_for, in_place_of, tiny_llama

PAGE = "docs/transformers.md"


pytestmark = pytest.mark.usefixtures("one_gpu")


def sft_of(folder, device):
    """Names of SFTTrainer's blocks, for a step."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from common.hf_setup import byte_tokenizer

    tiny_llama().save_pretrained(folder / "model")
    fixed = {"use_cpu": device == "cpu", "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    fixed |= {"bf16": False, "max_length": 64, "max_steps": 1, "eval_steps": 1}
    return {
        "dataset": datasets.Dataset.from_list(ROWS),
        "SFTConfig": lambda out, **given: trl.SFTConfig(str(folder / out), **given | fixed),
        "SFTTrainer": functools.partial(trl.SFTTrainer, processing_class=byte_tokenizer()),
    }


def test_sft_of_the_page(device, tmp_path, monkeypatch, capsys):
    names = sft_of(tmp_path, device)
    monkeypatch.chdir(tmp_path)
    lines = (json.dumps({"text": "word " * (1 + i % 5)}) for i in range(30))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    block = in_place_of("compile()", 'compile(backend="eager")', block_for(PAGE, "load_dataset", tmp_path / "model"))
    exec(in_place_of("from trl import SFTConfig, SFTTrainer\n", "", block), names)
    assert int(re.search(r"1 row, (\d+) documents", capsys.readouterr().out)[1]) > 1


@pytest.mark.parametrize("packed", [None, False])
def test_an_evaluation_of_the_page(device, packed, tmp_path):
    """The loss of documents alone, without logits: the mean over rows, each the mean over its targets."""
    from packing_ops.integrations.transformers import apply_packing_ops

    names = sft_of(tmp_path, device) | {"apply_packing_ops": apply_packing_ops}
    names["held_out"] = names["dataset"].select(range(6))
    config, found = names["SFTConfig"], []
    names["SFTConfig"] = lambda *args, **given: config(*args, **given, learning_rate=0.0, eval_packing=packed)
    block = in_place_of("trainer.train()", "trainer.model.register_forward_hook(note)\ntrainer.train()",
                        block_for(PAGE, "eval_dataset=held_out", tmp_path / "model"))  # fmt: skip
    names["note"] = lambda model, _, out: found.append((model.training, out.get("logits")))
    exec(block, names)
    (loss,) = (entry["eval_loss"] for entry in names["trainer"].state.log_history if "eval_loss" in entry)
    stock, means = tiny_llama().eval(), []
    for row in names["trainer"].eval_dataset:
        ends = row.get("seq_lengths") or [len(row["input_ids"])]
        documents = torch.tensor(row["input_ids"]).split(ends)
        sums = [stock(ids[None], labels=ids[None]).loss.item() * (ids.numel() - 1) for ids in documents]
        means.append(sum(sums) / sum(ids.numel() - 1 for ids in documents))
    assert len(means) == (6 if packed is False else 2)
    assert {training for training, _ in found} == {True, False}
    assert [logits for _, logits in found if logits is not None] == []
    assert loss == pytest.approx(sum(means) / len(means), rel=1e-4)


@pytest.mark.parametrize("bits", [4, 16])
def test_adapters_that_trl_adds(device, tmp_path, bits):
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    pytest.importorskip("peft")
    from common.hf_setup import byte_tokenizer

    from packing_ops.integrations.transformers import apply_packing_ops, info

    tiny_llama().save_pretrained(tmp_path / "model")
    options = {"use_cpu": device == "cpu", "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    options |= {"max_steps": 2, "logging_steps": 1, "bf16": False}
    names = {"dataset": datasets.Dataset.from_list(ROWS)}
    names |= {"settings": trl.SFTConfig(str(tmp_path), packing=True, max_length=64, **options)}
    names |= {"SFTTrainer": functools.partial(trl.SFTTrainer, processing_class=byte_tokenizer())}
    block = block_for(PAGE, "quantization_config=four_bits,   ", tmp_path / "model")
    if bits == 4:
        pytest.importorskip("bitsandbytes")
    else:
        block = re.sub(".*four_bits.*\n", "", block)
    losses = []
    for apply in (lambda model: None, apply_packing_ops):  # first the stock model, on the same rows
        torch.manual_seed(0)
        exec(block, names | {"apply_packing_ops": apply}, made := {})
        losses.append([entry["loss"] for entry in made["trainer"].state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if bits == 16 else 1e-2)
    model = made["trainer"].model
    assert (model.get_decoder().layers[0].self_attn.q_proj.base_layer.weight.dtype == torch.uint8) == (bits == 4)
    learnt = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name.split(".")[-3] for name in learnt} == {"lora_A", "lora_B"}
    assert all(weight.any() for name, weight in learnt.items() if "v_proj.lora_B" in name)
    assert int(re.search(r"1 row, (\d+) documents", info(model))[1]) > 1


def test_summary_of_the_page(device, tmp_path, monkeypatch, capsys):
    """The lines that the page shows are those of its SFTTrainer, of a Qwen3 with two layers."""
    names = sft_of(tmp_path, device)
    from packing_ops.integrations.transformers import versions

    tiny_model("qwen3", vocab_size=258).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(versions, "warned", set())  # other tests' reasons for SDPA
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"text": "word " * i}) for i in (1, 2, 3)))
    block = in_place_of("compile()", 'compile(backend="eager")', block_for(PAGE, "load_dataset", tmp_path / "model"))
    exec(in_place_of("from trl import SFTConfig, SFTTrainer\n", "", block), names)
    _, lines = capsys.readouterr().out.split("Qwen3ForCausalLM, ")
    page = (ROOT / PAGE).read_text()
    shown = re.search(r"```text\nQwen3ForCausalLM, (.*?)```", page, re.S)[1]
    same = [re.sub(r"^transformers \S+", "transformers", text) for text in (lines, shown)]
    assert same[0] == same[1]


CHAT = [("user", "hello"), ("assistant", "yes"), ("user", "and"), ("assistant", "no")]
TURNS = [{"role": role, "content": text} for role, text in CHAT]
WHOLE = "".join(f"<{role[0]}>{text}" for role, text in CHAT)
MASKED = [  # an example, settings, and the text of its tokens: (learnt or not, text)
    ({"messages": TURNS}, {}, [(True, WHOLE)]),
    (
        {"messages": TURNS},
        {"assistant_only_loss": True},
        [(role == "assistant" and found == text, found) for role, text in CHAT for found in (f"<{role[0]}>", text)],
    ),
    ({"prompt": "hello", "completion": " yes"}, {}, [(False, "hello"), (True, " yes</s>")]),
    ({"prompt": "hello", "completion": " yes"}, {"completion_only_loss": False}, [(True, "hello yes</s>")]),
    (
        {"prompt": TURNS[:1], "completion": TURNS[1:2]},
        {},
        [(False, "<u>hello"), (True, "<a>yes")],
    ),
    ({"text": "hello"}, {}, [(True, "hello</s>")]),
    ({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {}, None),
]
TEMPLATE = """{% for m in messages %}<{{ m.role[0] }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content -}}
{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(("example", "options", "parts"), MASKED)
def test_tokens_that_the_page_calls_learnt(device, example, options, parts, tmp_path):
    """Two documents of a row: the loss is the mean over their learnt tokens, each document by itself."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from common.hf_setup import byte_tokenizer

    from packing_ops.integrations.transformers import apply_packing_ops

    names, tokenizer = sft_of(tmp_path, device), byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    settings = names["SFTConfig"]("out", packing=True, learning_rate=0.0, **options)
    trainer = trl.SFTTrainer(
        str(tmp_path / "model"),
        settings,
        train_dataset=datasets.Dataset.from_list([example] * 2),
        processing_class=tokenizer,
    )
    apply_packing_ops(trainer.model)
    (row,) = trainer.train_dataset
    ids, labels = example.get("input_ids"), example.get("labels")
    if parts is not None:
        pieces = [(is_learnt, tokenizer.encode(text)) for is_learnt, text in parts]
        ids = [token for _, tokens in pieces for token in tokens]
        labels = [token if is_learnt else -100 for is_learnt, tokens in pieces for token in tokens]
    assert row["seq_lengths"] == [len(ids)] * 2
    assert (row["input_ids"], row["labels"]) == (ids * 2, labels * 2)
    trainer.train()
    (loss,) = (entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry)
    wanted = tiny_llama()(torch.tensor([ids]), labels=torch.tensor([labels])).loss
    assert loss == pytest.approx(wanted.item(), rel=1e-5)


def test_a_chat_template_without_marks_is_an_error(device, tmp_path):
    datasets, _ = pytest.importorskip("datasets"), pytest.importorskip("trl")
    names = sft_of(tmp_path, device)
    settings = names["SFTConfig"]("out", packing=True, assistant_only_loss=True)
    chats = datasets.Dataset.from_list([{"messages": TURNS}])
    with pytest.raises(ValueError, match="generation"):
        names["SFTTrainer"](str(tmp_path / "model"), settings, train_dataset=chats)


@pytest.mark.parametrize("way", ["padded", "streamed"])
def test_loss_of_other_batches(device, way, tmp_path):
    """packing=False, and a dataset that is streamed: the mean over the tokens of two documents by themselves."""
    datasets, _ = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from common.hf_setup import byte_tokenizer

    from packing_ops.integrations.transformers import apply_packing_ops, info

    names, texts = sft_of(tmp_path, device), ["hello", "no"]
    data = datasets.Dataset.from_list([{"text": text} for text in texts])
    options = {"packing": False, "per_device_train_batch_size": 2}
    if way == "streamed":
        data, options = data.to_iterable_dataset(), {"packing": True, "per_device_train_batch_size": 1}
    settings = names["SFTConfig"]("out", learning_rate=0.0, **options)
    trainer = names["SFTTrainer"](str(tmp_path / "model"), settings, train_dataset=data)
    apply_packing_ops(trainer.model)
    trainer.train()
    (loss,) = (entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry)
    model, documents = tiny_llama(), [torch.tensor([byte_tokenizer().encode(text + "</s>")]) for text in texts]
    sums = [model(ids, labels=ids).loss.item() * (ids.numel() - 1) for ids in documents]
    assert loss == pytest.approx(sum(sums) / sum(ids.numel() - 1 for ids in documents), rel=1e-5)
    rows = {"padded": "last forward: 2 rows", "streamed": "last forward: 1 row, 2 documents"}
    assert rows[way] in info(trainer.model)


def test_packed_rows_go_on_where_a_run_stopped(device, tmp_path):
    """The losses of a run that resumes are those of one that did not stop."""
    from packing_ops.integrations.transformers import apply_packing_ops

    names, losses = sft_of(tmp_path, device), []
    for resume in (False, True):
        settings = names["SFTConfig"]("out", packing=True, learning_rate=1e-2, logging_steps=1)
        settings.max_steps, settings.save_strategy, settings.save_steps = 4, "steps", 2
        trainer = names["SFTTrainer"](str(tmp_path / "model"), settings, train_dataset=names["dataset"])
        apply_packing_ops(trainer.model)
        trainer.train(resume_from_checkpoint=resume)
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    whole, resumed = losses
    assert len({*whole}) == 4
    assert resumed == pytest.approx(whole, rel=1e-5)
    assert trainer.state.global_step == 4


def test_documents_of_a_wrapped_row_see_each_other(device, tmp_path):
    """The loss is that of one document, and info counts one."""
    datasets, _ = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from packing_ops.integrations.transformers import apply_packing_ops, info

    names = sft_of(tmp_path, device)
    data = datasets.Dataset.from_list([{"text": text} for text in ("hello", "no")])
    settings = names["SFTConfig"]("out", packing=True, packing_strategy="wrapped", learning_rate=0.0)
    trainer = names["SFTTrainer"](str(tmp_path / "model"), settings, train_dataset=data)
    apply_packing_ops(trainer.model)
    (ids,) = trainer.train_dataset["input_ids"]
    trainer.train()
    (loss,) = (entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry)
    whole = torch.tensor([ids])
    assert loss == pytest.approx(tiny_llama()(whole, labels=whole).loss.item(), rel=1e-5)
    assert "last forward: 1 row, 1 document, found by attention_mask" in info(trainer.model)


@pytest.mark.parametrize("way", ["target_modules", "modules_to_save"])
def test_a_head_with_adapters_in_trl(device, way, tmp_path):
    """TRL refuses LoRA on it, and trains a head of modules_to_save."""
    peft, names = pytest.importorskip("peft"), sft_of(tmp_path, device)
    from packing_ops.integrations.transformers import apply_packing_ops

    lora = peft.LoraConfig(**{"target_modules": ["q_proj"]} | {way: ["lm_head"]})
    given = {"train_dataset": names["dataset"], "peft_config": lora}
    make = functools.partial(names["SFTTrainer"], str(tmp_path / "model"), names["SFTConfig"]("out", packing=True))
    if way == "target_modules":
        with pytest.raises(ValueError, match="lm_head"):
            make(**given)
        return
    trainer = make(**given)
    apply_packing_ops(trainer.model)
    head = trainer.model.get_output_embeddings().weight
    before = head.detach().clone()
    trainer.train()
    assert not head.equal(before)
