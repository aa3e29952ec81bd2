"""examples/first: whole scripts of a page, as somebody runs them who has a model in a folder and nothing else of
ours.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from helpers import fresh_process

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]  # not helpers' ROOT: it is run next to a copy of the examples too
FIRST = ROOT / "examples" / "first"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    sys.path.insert(0, str(ROOT / "examples"))
    from common.hf_setup import byte_tokenizer, new_model

    folder = tmp_path_factory.mktemp("model")
    new_model(None, 2048, seed=0).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    asked = [f"What is {i} and {i}?" for i in range(1, 40)]
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": f"{2 * i}"}]}
        for i, q in enumerate(asked, 1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Every torch traces what we do in a model's call differently, and the suite runs in one of them.
COMPILED = """
import sys
import torch
from transformers import AutoModelForCausalLM
from packing_ops.integrations.transformers import register

register()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="packing_ops").eval()
ids, positions = torch.arange(40)[None], torch.cat([torch.arange(25), torch.arange(15)])[None]
call = {"position_ids": positions, "use_cache": False}
with torch.no_grad():
    wanted = model(ids, **call).logits
    found = torch.compile(model, fullgraph=True, backend="eager")(ids, **call).logits
    other = model(torch.cat([ids[:, :25].flip(1), ids[:, 25:]], 1), **call).logits
torch.testing.assert_close(found, wanted)
assert torch.equal(other[:, 25:], wanted[:, 25:])  # the second document does not see the first
"""


def run(script, *arguments, cwd):
    return fresh_process.run(FIRST / script, *arguments, cwd=cwd, folder=cwd)


def losses_of(output):
    return [float(loss) for loss in re.findall(r"loss (-?[\d.]+)", output)]


def test_attention_is_checked(tmp_path):
    said = run("check_attention.py", cwd=tmp_path)
    assert re.search("^(cpu|cuda): .*\\n.*relative errors: output 0.00.*\\nright$", said.strip(), re.S)


def test_wrong_attention_is_noticed(capsys):
    text = (FIRST / "check_attention.py").read_text()
    wrong = text.replace("is_causal=True", "is_causal=False")
    assert wrong != text
    with pytest.raises(SystemExit, match="WRONG"):
        exec(wrong, {})
    assert "right" not in capsys.readouterr().out


def test_every_script_is_tested():
    assert {path.name for path in FIRST.glob("*.py")} == {
        "check_attention.py",
        "dpo_packed.py",
        "grpo_fsdp2.py",  # test_first_on_ranks.py
        "grpo_packed.py",
        "grpo_trl.py",
        "loop_fsdp2.py",  # test_first_on_ranks.py
        "megatron_step.py",
        "sft_trl.py",
    }


def test_sft(model_folder, chats, tmp_path):
    pytest.importorskip("trl")
    output = run("sft_trl.py", model_folder, chats, cwd=tmp_path)
    assert re.search(r"attention=2.*rope=", output)
    assert "train_loss" in output


def test_grpo_with_trl(model_folder, tmp_path):
    pytest.importorskip("trl")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"What is {i} and {i}?"}) + "\n" for i in range(4)))
    output = run("grpo_trl.py", model_folder, prompts, cwd=tmp_path)
    assert re.search(r"attention=2.*rope=", output)
    assert "('model',)" in output
    assert "train_loss" in output


def test_a_compiled_model(model_folder, tmp_path):
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    run(script, model_folder, cwd=tmp_path)


@pytest.mark.parametrize("script", ["dpo_packed.py", "grpo_packed.py"])
def test_rl(script, model_folder, tmp_path):
    losses = losses_of(run(script, model_folder, cwd=tmp_path))
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_megatron(tmp_path):
    pytest.importorskip("megatron.core")
    losses = losses_of(run("megatron_step.py", cwd=tmp_path))
    assert len(losses) == 3
    assert losses[-1] < losses[0]
