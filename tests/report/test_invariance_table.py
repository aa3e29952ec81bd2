"""python -m packing_ops invariance: the table, the JSON and the exit status."""

import json
import re

import pytest
import torch

from packing_ops.__main__ import main

transformers = pytest.importorskip("transformers")
SIZES = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "dtype": "float32"},
}


@pytest.fixture
def config(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.Qwen3Config(**SIZES).save_pretrained(tmp_path)
    yield tmp_path / "config.json"
    torch.set_num_threads(before)


def test_equal(config, capsys, tmp_path):
    assert (
        main(["invariance", str(config), "--rows", "1,3,5,40", "--layers", "2", "--json", str(tmp_path / "out")]) == 0
    )
    told = capsys.readouterr().out
    assert told.startswith("with the mode, float32 on cpu, torch ")
    assert re.search(r"^model\.layers\.\*\.mlp\.up_proj +Linear +[\d,]+ +equal +equal$", told, re.M)
    assert re.search(r"^\(the model\) +Qwen3ForCausalLM", told, re.M)
    assert told.endswith("packs: equal bits\nprefixes: equal bits\n")
    result = json.loads((tmp_path / "out").read_text())
    assert result["packs"]
    assert result["active"]
    names = [layer["name"] for layer in result["layers"]]
    assert "model.layers.1.mlp.up_proj" in names
    assert not any("layers.2" in name for name in names)


def test_without_the_mode_layers_are_named(config, capsys):
    assert main(["invariance", str(config.parent), "--stock"]) == 1
    told = capsys.readouterr().out
    assert told.startswith("without the mode")
    assert "run it within packing_ops.invariant()" in told
    assert "packs: not claimed" in told


def test_dropout_in_evaluation_and_no_configuration(tmp_path, config, capsys):
    transformers.Qwen3Config(**SIZES, attention_dropout=0.1).save_pretrained(tmp_path / "dropout")
    assert main(["invariance", str(tmp_path / "dropout"), "--rows", "3"]) == 0  # in evaluation nothing is dropped
    capsys.readouterr()
    assert main(["invariance", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


WRONG_ARGUMENTS = {
    "--rows=0": "--rows: expected numbers above 0 with commas between, got '0'",
    "--rows=3,-1": "--rows: expected numbers above 0 with commas between, got '3,-1'",
    "--rows=a": "--rows: expected numbers above 0 with commas between, got 'a'",
    "--rows=": "--rows: expected numbers above 0 with commas between, got ''",
    "--device=tpu": "--device: expected cpu, cuda or cuda:N, got 'tpu'",
    "--device=cuda": "--device: expected cpu, got 'cuda', and torch",
}


@pytest.mark.parametrize("argument", WRONG_ARGUMENTS)
def test_arguments_are_refused(config, argument, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        main(["invariance", str(config), argument])
    assert end.value.code == 2
    assert WRONG_ARGUMENTS[argument].partition(": ")[2] in capsys.readouterr().err


@pytest.mark.parametrize("layers", [0, -1, 4])
def test_numbers_of_layers_are_refused(config, layers, capsys):
    assert main(["invariance", str(config), f"--layers={layers}"]) == 2
    error = f"error: --layers: expected 1 to 3, the layers of the model, got {layers}\n"
    assert capsys.readouterr().err.endswith(error)


def test_other_models_and_folders_are_refused(config, tmp_path, capsys):
    transformers.T5Config().save_pretrained(tmp_path / "t5")
    assert main(["invariance", str(tmp_path / "t5")]) == 2
    error = "error: MODEL_OR_CONFIG: expected a causal language model of transformers, got t5\n"
    assert capsys.readouterr().err.endswith(error)
    assert main(["invariance", str(config), "--json", str(tmp_path / "none" / "out.json")]) == 2
    assert capsys.readouterr().err.startswith("error: --json: expected a file in a folder that exists, got ")
