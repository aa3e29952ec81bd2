"""examples/full_sft.py: an interrupted training goes on to the bit, on two ranks, sharded, with adapters, next to a
policy.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, fresh_process
from helpers.hf_models import tiny_model

SETTINGS = [
    "--row",
    256,
    "--rows-per-step",
    2,
    "--save-every",
    2,
    "--held-out",
    5,
    "--learning-rate",
    1e-3,
    "--warm-up",
    2,
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model with its tokenizer, and 48 chats of several turns."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    from common.hf_setup import byte_tokenizer

    sizes = {"vocab_size": 258, "initializer_range": 0.02, "max_position_embeddings": 512}
    tiny_model("qwen3", **sizes).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    turns = [("user", "hello"), ("assistant", "hi"), ("user", "again"), ("assistant", "hi " * 9)]
    chats = [[{"role": role, "content": f"{text} {i}"} for role, text in turns] for i in range(48)]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    return tmp_path


def trained(folder, name, *more, ranks=2):
    """What the log says of each step, and the weights that were saved."""
    command = (
        "examples/full_sft.py",
        "--model",
        folder / "model",
        "--data",
        folder / "chats.jsonl",
        "--out",
        folder / name,
    )
    if "cuda" in more:  # a fork may not use GPUs that its server has looked at
        torchrun = sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path}
        words = [str(each) for each in (*torchrun, *command, *SETTINGS, *more)]
        subprocess.run(words, check=True, cwd=ROOT, env=environment, timeout=1200)
    else:
        fresh_process.run_ranks(ranks, *command, *SETTINGS, *more, folder=folder)
    steps = [json.loads(line) for line in (folder / name / "log.jsonl").read_text().splitlines()]
    saved = [*(folder / name / "model").glob("*.safetensors")]
    if not saved:
        return steps, {}
    from safetensors.torch import load_file

    return steps, load_file(saved[0])


GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPUS])]


def without_times(steps):
    return [{name: value for name, value in step.items() if "second" not in name and name != "mfu"} for step in steps]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "setting", [["--checkpointing", "0.001"], ["--lora", 4, "--wrapper", "ddp", "--checkpointing", "full"]], ids=str
)
def test_an_interrupted_run_goes_on_to_the_bit(folder, setting, device):
    if "--lora" in setting:
        pytest.importorskip("peft")
    setting = [*setting, "--device", device]
    steps, weights = trained(folder, "whole", *setting)
    first, _ = trained(folder, "parts", *setting, "--stop-after", 3)
    assert [step["step"] for step in first] == [1, 2, 3]
    both, resumed = trained(folder, "parts", *setting, "--resume")  # from step 2, the last that was saved
    assert without_times(both[:2] + both[3:]) == without_times(steps)
    assert len(steps) > 4
    assert steps[-1]["held_out_loss"] < steps[1]["held_out_loss"]
    assert weights.keys() == resumed.keys()
    assert weights
    assert all(torch.equal(resumed[name], each) for name, each in weights.items())
    assert all("lora" in name for name in weights) == ("--lora" in setting)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
def test_mixed_precision(folder, wrapper, device):
    """Weights that are trained in float32, by products in bfloat16."""
    (exact, *_), _ = trained(folder, "exact", "--wrapper", wrapper, "--stop-after", 1)
    steps, weights = trained(folder, "mixed", "--wrapper", wrapper, "--mixed", "--device", device)
    assert 0 < abs(steps[0]["loss"] - exact["loss"]) < 1e-2
    assert steps[-1]["held_out_loss"] < steps[1]["held_out_loss"]
    assert {each.dtype for each in weights.values()} == {torch.float32}


def test_mixed_precision_of_fsdp2_keeps_the_count_of_targets(monkeypatch):
    """A cast of its inputs to bfloat16 would make 997 targets 996."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    from common.training import over_ranks

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = tiny_model("llama", vocab_size=258)
        model = over_ranks(model, model.model.layers, "fsdp2", mixed=True)
        ids = torch.arange(3, 103)[None]
        exact, found = (model(ids, labels=ids, num_items_in_batch=n).loss for n in (997, torch.tensor(997.0)))
        assert torch.equal(found, exact)
    finally:
        torch.distributed.destroy_process_group()


def test_another_plan_is_named(folder):
    trained(folder, "run", "--stop-after", 2)
    with pytest.raises(AssertionError, match="state_dict: expected that of a sampler with capacity=512, got 256"):
        trained(folder, "run", "--resume", "--row", 512)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--row", "0"], "--row: expected a whole number from 2, got '0'"),
        (["--rows-per-step", "0"], "--rows-per-step: expected a whole number from 1, got '0'"),
        (["--save-every", "0"], "--save-every: expected a whole number from 1, got '0'"),
        (["--held-out", "0"], "--held-out: expected a whole number from 1, got '0'"),
        (["--epochs", "1.5"], "--epochs: expected a whole number from 1, got '1.5'"),
        (["--lora", "-1"], "--lora: expected a whole number from 0, got '-1'"),
        (["--checkpointing", "some"], "--checkpointing: expected full, auto or GiB above 0, got 'some'"),
        (["--checkpointing", "0"], "--checkpointing: expected full, auto or GiB above 0, got '0'"),
        (["--checkpointing", "nan"], "--checkpointing: expected full, auto or GiB above 0, got 'nan'"),
    ],
)
def test_bad_options_are_named(given, words, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import full_sft

    monkeypatch.setattr(sys, "argv", ["full_sft.py", *given])
    with pytest.raises(SystemExit):
        full_sft.parse_arguments()
    assert f"argument {words}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"messages": []}', "{"], "--data: expected JSON in line 2 of"),
        (['{"prompt": "a"}'], r"""--data: expected {"messages": \[{"role", "content"}, ...\]} in line 1 of"""),
        (['{"messages": [{"role": "user"}]}'], r"""--data: expected {"messages": .* in line 1 of"""),
    ],
)
def test_bad_data_is_named(lines, words, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from common.chats import chat_examples

    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    with pytest.raises(SystemExit, match=words):
        chat_examples(None, tmp_path / "chats.jsonl", 99)


def test_a_chat_may_hold_other_ends_of_lines(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from common.chats import chats_of

    chat = [{"role": "user", "content": "a\u2028b\x85c"}]
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"messages": chat}, ensure_ascii=False) + "\r\n\n", encoding="utf-8"
    )
    assert chats_of(tmp_path / "chats.jsonl") == [chat, [], []]


def test_chats_that_leave_none_to_train_on_are_named(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import full_sft

    monkeypatch.setattr(full_sft.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(full_sft.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(full_sft, "chat_examples", lambda *given: [{"input_ids": [1, 2], "labels": [1, 2]}] * 16)
    monkeypatch.setattr(sys, "argv", ["full_sft.py"])
    with pytest.raises(SystemExit, match="--held-out: expected fewer than the 16 chats, got 16"):
        full_sft.Run(full_sft.parse_arguments())


def test_what_assistants_say_is_learnt(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from common.chats import tokenized
    from common.hf_setup import byte_tokenizer

    tokenizer = byte_tokenizer()
    chat = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "bc"), ("user", "d"))]
    example = tokenized([*chat, {"role": "assistant", "content": "e"}], tokenizer, 99)
    learnt = [label for label in example["labels"] if label != -100]
    assert tokenizer.decode(learnt) == "<assistant>\nbc\n<assistant>\ne\n"
    assert len(example["input_ids"]) == len(example["labels"])
    assert (
        tokenized(chat, tokenizer, 99)["input_ids"]
        == example["input_ids"][: len(tokenized(chat, tokenizer, 99)["input_ids"])]
    )
    assert tokenized(chat[:1], tokenizer, 99) == {"input_ids": [], "labels": []}
