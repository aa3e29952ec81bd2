"""The Hugging Face examples run, and several processes train as one does."""

import argparse
import importlib
import json

import pytest
import torch
from helpers import ROOT, fresh_process
from helpers.hf_models import tiny_model

from packing_ops.integrations.transformers import continuous_batching


def test_hf_sft(tmp_path):
    command = "examples/hf_sft.py", "--documents", 40, "--capacity", 1024, "--out", tmp_path
    fresh_process.run(*command, folder=tmp_path)
    result = json.loads((tmp_path / "demo_hf_cpu.json").read_text())
    losses = result["first_step_loss"]
    assert losses["packed"] == pytest.approx(losses["padded"], abs=1e-5)
    assert losses["unpadded"] == pytest.approx(losses["padded"], abs=1e-5)
    padded, packed = result["runs"]
    assert padded["real_tokens"] == packed["real_tokens"] > 0
    for each in (padded, packed):  # untrained it is log(258)
        assert 2 < each["held_out_loss"] < 5.3
    assert packed["padding_waste"] < padded["padding_waste"]
    assert all(run["losses"][-1] < run["losses"][0] for run in (padded, packed))
    assert all(len(run["losses"]) == run["steps"] == len(run["tokens_seen"]) for run in (padded, packed))
    assert (tmp_path / "demo_hf_cpu.png").stat().st_size > 10_000


@pytest.mark.parametrize("stock", [False, True])
def test_packed_models_are_swapped_unless_stock(monkeypatch, stock):
    monkeypatch.syspath_prepend(ROOT / "examples")
    hf_sft = importlib.import_module("hf_sft")
    arguments = argparse.Namespace(model=None, capacity=256, batch_size=4, seed=0, stock=stock, device="cpu")
    models = [hf_sft.model_for(mode, arguments) for mode in ("padded", "packed")]
    swapped = [(model.config._attn_implementation, len(model.model.rotary_emb._forward_hooks)) for model in models]
    assert swapped == [("sdpa", 0), ("sdpa", 0) if stock else ("packing_ops", 1)]
    tokens = [torch.randint(0, 256, (length,)) for length in (31, 7, 50, 2)]
    documents = [hf_sft.Document(ids, ids.clone()) for ids in tokens]
    losses = hf_sft.first_step_losses(documents, arguments)
    collated = zip(models, (hf_sft.padded_inputs, hf_sft.packed_inputs), strict=True)
    held_out = [hf_sft.held_out_loss(model, documents, collate, arguments) for model, collate in collated]
    assert held_out == pytest.approx([losses["padded"]] * 2, abs=1e-5)  # it is one model, and one batch
    assert losses == pytest.approx(dict.fromkeys(losses, losses["padded"]), abs=1e-5)


@pytest.fixture
def chats(tmp_path):
    """A file of 40 conversations."""
    lines = []
    for i in range(40):
        messages = [{"role": "user", "content": f"hello {i}"}, {"role": "assistant", "content": "hi " * (i + 1)}]
        lines.append(json.dumps({"messages": messages}))
    file = tmp_path / "chat.jsonl"
    file.write_text("\n".join(lines))
    return file


def test_hf_sft_of_a_saved_model_on_chats(tmp_path, chats, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    model = tiny_model("qwen3", vocab_size=258, initializer_range=0.02, max_position_embeddings=512)
    model.save_pretrained(tmp_path / "model")
    importlib.import_module("common.hf_setup").byte_tokenizer().save_pretrained(tmp_path / "model")
    command = "examples/hf_sft.py", "--model", tmp_path / "model", "--data", chats, "--capacity", 512, "--out", tmp_path
    fresh_process.run(*command, folder=tmp_path)
    result = json.loads((tmp_path / "demo_hf_cpu.json").read_text())
    losses = result["first_step_loss"]
    assert losses == pytest.approx(dict.fromkeys(losses, losses["padded"]), abs=1e-4)
    padded, packed = result["runs"]
    assert padded["steps"] == 5
    assert packed["losses"][-1] < packed["losses"][0]
    assert padded["real_tokens"] == packed["real_tokens"] > 40 * len("hello 0hi ")


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gpt_oss", "eager")])
def test_saved_models_start_with_the_attention_they_have(tmp_path, monkeypatch, family, attention):
    monkeypatch.syspath_prepend(ROOT / "examples")
    tiny_model(family).save_pretrained(tmp_path)
    model = importlib.import_module("common.hf_setup").new_model(tmp_path, 256, 0)
    assert model.config._attn_implementation == attention


def test_trl_sft_on_chats(tmp_path, chats):
    pytest.importorskip("trl")
    command = "examples/trl_sft.py", "--data", chats, "--max-length", 256, "--out", tmp_path
    fresh_process.run(*command, folder=tmp_path)
    result = json.loads((tmp_path / "demo_trl_cpu.json").read_text())
    assert result["documents"] == 40
    assert result["fill"] > 0.9
    assert len(result["losses"]) == result["rows"]
    assert result["losses"][-1] < result["losses"][0]


def test_vlm_sft(tmp_path):
    fresh_process.run("examples/vlm_sft.py", "--documents", 120, "--out", tmp_path, folder=tmp_path)
    result = json.loads((tmp_path / "demo_vlm_cpu.json").read_text())
    first, losses = result["first_row"], result["losses"]
    assert first["packed"] == pytest.approx(first["alone"], rel=1e-5)
    assert first["gradient_apart"] < 1e-4
    assert len(losses) == result["rows"]
    assert sum(losses[-3:]) < 0.6 * sum(losses[:3])


def test_fsdp2_processes_train_to_the_losses_of_one(tmp_path):
    """Rows dealt to ranks, and rows spread over two ranks each."""
    command = "examples/fsdp2_sft.py", "--documents", 48, "--out", tmp_path
    results = {}
    for processes, shared in ((1, 1), (2, 1), (4, 2)):
        fresh_process.run_ranks(processes, *command, "--sequence-parallel", shared, folder=tmp_path)
        results[processes] = json.loads((tmp_path / f"demo_fsdp2_{processes}_{shared}.json").read_text())
    one = results[1]
    assert len(one["losses"]) == 3
    assert one["losses"][-1] < one["losses"][0]
    for many in results.values():
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert many["parameter_norm"] == pytest.approx(one["parameter_norm"], rel=1e-5)


def test_grpo_tree(tmp_path):
    """Loss and gradients of both steps are the same, and the tree computes fewer rows."""
    small = "--prompt", 260, "--answer", 20, "--samples", 3, "--repeat", 1
    fresh_process.run("examples/grpo_tree.py", *small, "--out", tmp_path, folder=tmp_path)
    result = json.loads((tmp_path / "grpo_tree_cpu.json").read_text())
    samples, tree = result["each sample with its prompt"], result["as a prefix tree"]
    assert tree["loss"] == pytest.approx(samples["loss"], abs=1e-5)
    assert 0 < result["gradients_differ_by"] < 1e-4
    assert tree["rows"] < samples["rows"] / 2
    assert tree["kept_mib"] < samples["kept_mib"] / 2
    assert (tmp_path / "grpo_tree_cpu.png").stat().st_size > 10_000


@pytest.mark.skipif(not continuous_batching.PATCHES, reason="its generate_batch is of transformers 5.23")
def test_grpo_same_bits(tmp_path):
    """Rollout and update agree in every bit with the mode; without it some tokens of these two steps are off."""
    options = ["--steps", "2", "--prompts", "3", "--samples", "4", "--out", tmp_path]
    fresh_process.run("examples/grpo_same_bits.py", *options, folder=tmp_path)
    result = json.loads((tmp_path / "grpo_same_bits_cpu.json").read_text())
    within, without = result["invariant=True"], result["without the mode"]
    assert len(within) == len(without) == 2
    assert all(step["not_0"] == 0 and step["largest"] == 0 and step["tokens"] > 100 for step in within)
    assert sum(step["not_0"] for step in without) > 0
    assert (tmp_path / "grpo_same_bits_cpu.png").stat().st_size > 10_000


def test_same_bits(tmp_path):
    """The ratio is 1 in every layout with the mode; without it some samples of 3 and 5 tokens are off."""
    fresh_process.run("examples/same_bits.py", "--out", tmp_path, folder=tmp_path)
    result = json.loads((tmp_path / "same_bits_cpu.json").read_text())
    within, without = result["invariant=True"], result["without the mode"]
    assert len(within) == len(without) == 4
    assert all(each["not_1"] == 0 and each["largest"] == 0 and each["tokens"] > 100 for each in within.values())
    assert without["all in one row, in random order"]["not_1"] > 0
    assert (tmp_path / "same_bits_cpu.png").stat().st_size > 10_000
