"""Gradient checkpointing with compiled layers: some settings of tests/checkpoint_matrix.py, which runs all of
them.
"""

import itertools

import pytest
import torch

pytest.importorskip("transformers")
import checkpoint_matrix as matrix

# Nothing is compiled: each takes a fraction of a second.
EAGER = [
    ("llama", "eager", "non-reentrant", "cu_seq_lens_q", "fused loss", "full", "rms_norm"),
    ("moe", "eager", "selective", "position_ids", "stock loss", "full", "plain"),
    ("llama", "eager", "policy", "position_ids", "fused loss", "LoRA", "rms_norm"),
    ("moe", "eager", "policy", "cu_seq_lens_q", "stock loss", "full", "plain"),
    ("hybrid", "eager", "policy", "numbered mask", "stock loss", "full", "plain"),
    ("hybrid", "eager", "selective", "numbered mask", "fused loss", "LoRA", "plain"),
    ("hybrid", "eager", "around", "position_ids", "stock loss", "full", "invariant"),
    ("vlm", "eager", "reentrant", "numbered mask", "stock loss", "LoRA", "rms_norm"),
]
COMPILED = [
    ("llama", "layers", "around", "position_ids", "fused loss", "full", "plain"),
    ("llama", "layers dynamic", "around", "cu_seq_lens_q", "stock loss", "LoRA", "rms_norm"),
    ("hybrid", "layers", "around", "position_ids", "fused loss", "full", "plain"),
    ("vlm", "layers", "selective", "numbered mask", "fused loss", "full", "plain"),
    ("llama", "layers", "policy", "position_ids", "fused loss", "LoRA", "plain"),
    ("llama", "model", "non-reentrant", "position_ids", "stock loss", "full", "plain"),
]
GOOD = "same bits", "as exact"
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


@pytest.mark.parametrize("setting", EAGER, ids=" ".join)
def test_eager(setting, device):
    pytest.importorskip("peft")
    said = matrix.verdict(matrix.Setting(*setting), device, DTYPES[device])
    assert said == "same bits" or (said in GOOD and setting[0] == "moe"), said


@pytest.fixture
def one_layer(monkeypatch):
    """Models of one layer: each is compiled by itself."""
    matrix.expected.cache_clear()
    monkeypatch.setitem(matrix._SIZES, "num_hidden_layers", 1)
    yield
    matrix.expected.cache_clear()


@pytest.mark.parametrize("setting", COMPILED, ids=" ".join)
def test_compiled(setting, device, fresh_compile, request):
    pytest.importorskip("peft")
    if setting[0] != "hybrid" and setting[1] != "layers dynamic":  # two kinds of layers; one case of two of a kind
        request.getfixturevalue("one_layer")
    said = matrix.verdict(matrix.Setting(*setting), device, DTYPES[device], backend="aot_eager")
    assert said in GOOD, said


def test_a_mode_that_cannot_be_compiled_is_refused():
    setting = matrix.Setting("llama", "layers", "around", "position_ids", "stock loss", "full", "invariant")
    assert matrix.verdict(setting, "cpu", torch.float32).startswith(
        "refused: apply_packing_ops(invariant=True): torch.compile"
    )


def test_a_setting_in_progress_is_no_result(tmp_path):
    """A process that is ended leaves its table, from which the next one goes on."""
    settings = matrix.settings()[:3]
    said = ["as exact", matrix.UNFINISHED, "refused: a | b"]
    rows = [f"| {setting} | {each} |" for setting, each in zip(settings, said, strict=True)]
    matrix.written(tmp_path / "table.md", ["torch", "", *rows])
    matrix.written(None, ["of another rank"])
    assert [path.name for path in tmp_path.iterdir()] == ["table.md"]
    done = matrix.finished(tmp_path.iterdir())
    assert [str(setting) in done for setting in settings] == [True, False, True]


def test_a_row_says_what_any_rank_says():
    assert matrix.worst(["same bits"]) == matrix.worst(["same bits"] * 2) == "same bits"
    assert matrix.worst(["same bits", "as exact"]) == "as exact"
    assert matrix.worst(["refused: a", "same bits"]) == "refused: a"
    assert matrix.worst(["WRONG: a", "WRONG: a"]) == "WRONG: a"
    assert matrix.worst(["same bits", "WRONG: a"]) == "WRONG: rank 0: same bits, rank 1: WRONG: a"


def test_every_pair_of_values_is_tried():
    for first, second in itertools.combinations(range(len(matrix.AXES)), 2):
        tried = {(each[first], each[second]) for each in matrix.settings()}
        assert tried == {*itertools.product(list(matrix.AXES.values())[first], list(matrix.AXES.values())[second])}
