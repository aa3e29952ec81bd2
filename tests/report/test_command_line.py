"""What python -m packing_ops does with streams that are closed or full, and with code in a folder that it is given."""

import io
import json
import sys
from pathlib import Path

import pytest
from helpers.report_case import RECORDS, write_lines

from packing_ops.__main__ import main


def test_a_closed_stdin_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["report", "-"]) == 2
    assert capsys.readouterr().err == "error: stdin: expected a file or a pipe, got none: it is closed\n"


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_stdout_or_stderr_is_no_error(tmp_path, monkeypatch, capsys, closed):
    """And what is meant for one does not go to the other."""
    file = write_lines(tmp_path / "a.jsonl", *RECORDS, "no JSON")
    with monkeypatch.context() as patch:
        patch.setattr(sys, closed, None)
        assert main(["report", str(file)]) == 1
        getattr(sys, closed).close()
    told = capsys.readouterr()
    assert bool(told.out) == (closed == "stderr")
    assert bool(told.err) == (closed == "stdout")


def test_a_full_disk_is_an_error(monkeypatch, capsys):
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main(["info"]) == 2
    assert "No space left on device" in capsys.readouterr().err


# Each folder writes a file where its code runs. The answer to transformers' question on stdin would be yes.
CODE_OF_A_FOLDER = {
    "tok.py": "open('ran', 'w')\nfrom transformers import PreTrainedTokenizer as Tok\n",
    "conf.py": "open('ran', 'w')\nfrom transformers import PretrainedConfig as Conf\n",
    "tokenizer_config.json": json.dumps({"tokenizer_class": "Tok", "auto_map": {"AutoTokenizer": ["tok.Tok", None]}}),
    "config.json": json.dumps({"model_type": "another", "auto_map": {"AutoConfig": "conf.Conf"}}),
}


@pytest.mark.parametrize("command", [["report", "-", "--tokenizer", "."], ["invariance", "config.json"]])
def test_no_code_of_a_folder_runs(tmp_path, monkeypatch, capsys, command):
    pytest.importorskip("transformers")
    for name, text in CODE_OF_A_FOLDER.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"y\n" * 9)))
    assert main(command) == 2
    assert not (tmp_path / "ran").exists()
    assert "expected one that transformers loads without code of its folder" in capsys.readouterr().err
    assert sys.stdin.read() == "y\n" * 9


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_an_attention_of_the_hub_is_not_loaded(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, name: "somebody/kernel"}))
    assert main(["invariance", str(tmp_path), "--rows", "3"]) != 2
