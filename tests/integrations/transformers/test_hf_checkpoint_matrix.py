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


@pytest.mark.parametrize("setting", COMPILED, ids=" ".join)
def test_compiled(setting, device, fresh_compile):
    pytest.importorskip("peft")
    said = matrix.verdict(matrix.Setting(*setting), device, DTYPES[device], backend="aot_eager")
    assert said in GOOD, said


def test_a_mode_that_cannot_be_compiled_is_refused():
    setting = matrix.Setting("llama", "layers", "around", "position_ids", "stock loss", "full", "invariant")
    assert matrix.verdict(setting, "cpu", torch.float32).startswith(
        "refused: apply_packing_ops(invariant=True): torch.compile"
    )


def test_every_pair_of_values_is_tried():
    for first, second in itertools.combinations(range(len(matrix.AXES)), 2):
        tried = {(each[first], each[second]) for each in matrix.settings()}
        assert tried == {*itertools.product(list(matrix.AXES.values())[first], list(matrix.AXES.values())[second])}
