"""examples/first/loop_fsdp2.py and grpo_fsdp2.py: the blocks of docs/parallel*.md, each script in one file."""

import ast
import json
import re

import pytest
import torch
from helpers import ROOT, fresh_process
from helpers.pages import block_with, tiny_llama

FIRST, GUIDE, CASES = ROOT / "examples" / "first", "docs/parallel.md", "docs/parallel-cases.md"
MODEL = [(GUIDE, "starts NCCL"), (GUIDE, "cast_forward_inputs")]
SAVED = [(GUIDE, "full_state_dict=True, cpu_offload")]
FILES = {
    "loop_fsdp2.py": [*MODEL, (GUIDE, "PackedBatchSampler"), (GUIDE, "done += len(step)"), *SAVED],
    "grpo_fsdp2.py": [*MODEL, (CASES, "register_fsdp_forward_method"), *SAVED],
}
CHATS = [{"messages": [{"role": "user", "content": "hello " * (1 + i % 4)}]} for i in range(20)]
SAMPLES = [
    {"input_ids": [9] * 5 + [3 + i] * answer, "labels": [-100] * 5 + [3 + i] * answer, "advantage": 0.5 - i % 2}
    for i, answer in enumerate((4, 9, 30, 20, 25))
]


def statements(text):
    """(imported names, the other statements), without comments."""
    imported, others = set(), []
    for each in ast.parse(text).body:
        if isinstance(each, (ast.Import, ast.ImportFrom)):
            imported |= {(getattr(each, "module", None), name.name) for name in each.names}
        else:
            others.append(ast.unparse(each))
    return imported, others


@pytest.mark.parametrize("file", FILES)
def test_a_file_has_the_statements_of_its_blocks(file):
    """In their order, with nothing in between; in front of them what the page asks to define."""
    imported, found = statements((FIRST / file).read_text())
    wanted, blocks = statements("\n".join(block_with(*block) for block in FILES[file]))
    assert len(blocks) > 12
    assert wanted <= imported
    assert found[-1 - len(blocks) :] == [*blocks, "dist.destroy_process_group()"]


def run_on_two_ranks(file, lines, folder):
    """Start the file without a GPU, with a tiny model; return the model and what each rank prints."""
    from common.hf_setup import byte_tokenizer

    model, data = tiny_llama(), folder / "data.jsonl"
    for saved in (model, byte_tokenizer()):
        saved.save_pretrained(folder / "model")
    data.write_text("\n".join(map(json.dumps, lines)) + "\n")
    text = (FIRST / file).read_text()
    for there, here in (('"cuda"', '"cpu"'), ("16384", "64")):
        assert there in text
        text = text.replace(there, here)
    (script := folder / file).write_text(text)
    return model, *fresh_process.run_ranks(2, script, folder / "model", data, folder=folder, cwd=folder)


@pytest.mark.parametrize("file", FILES)
def test_a_file_trains_on_two_ranks(file, tmp_path, monkeypatch):
    """What it saves is the model, after steps."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    lines = [SAMPLES[:3], SAMPLES[3:]] if file == "grpo_fsdp2.py" else CHATS
    model, first, second = run_on_two_ranks(file, lines, tmp_path)
    assert (len(re.findall(r"^loss 6\.", first, re.M)) > 1) == (file == "loop_fsdp2.py")
    assert "loss" not in second
    trained = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32)
    moved = [(a - b).abs().max().item() for a, b in zip(model.parameters(), trained.parameters(), strict=True)]
    assert 0 < max(moved) < 1e-3


def test_fewer_rows_than_ranks_are_an_error(tmp_path, monkeypatch):
    """Otherwise no step is made, and the model is saved as it was."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    with pytest.raises(AssertionError, match="ValueError: the documents fill fewer rows than there are ranks"):
        run_on_two_ranks("loop_fsdp2.py", CHATS[:1], tmp_path)
    assert not (tmp_path / "out").exists()
