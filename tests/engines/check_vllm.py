"""Sampled by vLLM, trained here: log-probabilities with the same bits (make test-vllm, a separate environment)."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
import tomllib
import torch
import vllm.plugins
from cases import differences, engine, prompts, sample, saved, trainer
from helpers import ROOT
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import packing_ops as po
from packing_ops.integrations.vllm import record, register, revert_registration

FLOAT, HALF = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def registered():
    register()
    yield
    revert_registration()


def test_a_seed_draws_the_same_tokens_in_any_batch(tmp_path):
    alone, *others = prompts(90, 5, 40, 200)
    with engine(saved("qwen3", HALF, tmp_path), HALF) as llm:
        (wanted, logps), *_ = sample(llm, [alone], seed=7)
        *_, (found, again) = sample(llm, [*others, alone], seed=7)
        (other, _), *_ = sample(llm, [alone], seed=8)
    assert found == wanted != other
    assert torch.equal(again, logps)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("qwen3", FLOAT), ("qwen3", HALF), ("llama", HALF), ("gemma", FLOAT), ("gemma", HALF)]
)
def test_log_probs_are_the_trainer_s(kind, dtype, tmp_path):
    """Chunks of prompts, prefixes from the cache, and fewer pages than the requests need: some are put back and start
    again.
    """
    folder = saved(kind, dtype, tmp_path)
    shared, *others = prompts(300, 1, 7, 33, 129, 250)
    asked = [*others, shared, shared + others[1], shared + others[2], others[3]]
    limits = {
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 11,
        "max_model_len": 512,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
    }
    with engine(folder, dtype, **limits) as llm, trainer(folder, dtype) as model:
        first = sample(llm, asked)
        again = sample(llm, asked[::-1], tokens=100)
        metrics = {each.name: getattr(each, "value", None) for each in llm.get_metrics()}
        assert differences(model, first) == (0, 24 * len(asked))
        assert differences(model, again) == (0, 100 * len(asked))
    assert metrics["vllm:prefix_cache_hits"] > 0
    assert metrics["vllm:num_preemptions"] > 0


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_processed_log_probs_without_prefix_caching(dtype, tmp_path):
    folder = saved("qwen3", dtype, tmp_path)
    options = {"logprobs_mode": "processed_logprobs", "enable_prefix_caching": False}
    with engine(folder, dtype, **options) as llm, trainer(folder, dtype) as model:
        assert differences(model, sample(llm, prompts(5, 200))) == (0, 48)
        assert differences(model, sample(llm, prompts(5, 200), temperature=0.7), temperature=0.7) == (0, 48)


def test_the_same_engine_without_us_differs(tmp_path):
    folder = saved("qwen3", FLOAT, tmp_path)
    with engine(folder, FLOAT, attention_backend=None) as llm, trainer(folder, FLOAT) as model:
        differ, of = differences(model, sample(llm, prompts(5, 200)))
    assert 0 < differ <= of


def test_the_first_layer_of_an_engine_that_differs_is_named(tmp_path):
    """None of an engine on our attention."""
    for kind, backend in (("qwen3", "CUSTOM"), ("gemma", "CUSTOM"), ("qwen3", None)):
        folder = saved(kind, FLOAT, tmp_path / kind)
        with engine(folder, FLOAT, attention_backend=backend) as llm, trainer(folder, FLOAT) as model:
            sampled = sample(llm, prompts(5, 200))
            rollout = record(llm, *zip(*((document, logps.tolist()) for document, logps in sampled), strict=True))
            found = po.check_invariance(model, rollout=rollout)
        names = [layer.name for layer in found.layers]
        assert {"model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj", "model.norm"} <= {*names}
        if backend == "CUSTOM":
            assert found.why_not() == []
        else:
            assert found.why_not()[0].startswith("model.layers.0.")


def test_weights_of_a_step_go_into_the_engine(tmp_path):
    folder = saved("qwen3", HALF, tmp_path)
    with engine(folder, HALF) as llm, trainer(folder, HALF) as model:
        before = sample(llm, prompts(40), seed=0)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.01 * torch.randn_like(weight))
        llm.apply_model(lambda inner: inner.load_weights(model.state_dict().items()))
        llm.reset_prefix_cache()
        after = sample(llm, prompts(40), seed=0)
        assert differences(model, after) == (0, 24)
        assert not torch.equal(before[0][1], after[0][1])


def test_with_the_engine_its_patches_go(tmp_path):
    before = RMSNorm.forward, UnquantizedLinearMethod.apply
    folder = saved("qwen3", HALF, tmp_path)
    with engine(folder, HALF):
        assert RMSNorm.forward is not before[0]
        assert UnquantizedLinearMethod.apply is not before[1]
    assert (RMSNorm.forward, UnquantizedLinearMethod.apply) == before


def test_what_register_does_can_be_undone():
    chosen = type(current_platform).get_attn_backend_cls
    register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "packing_ops.integrations.vllm.backend.Backend"
    assert type(current_platform).get_attn_backend_cls is chosen
    revert_registration()
    assert not AttentionBackendEnum.CUSTOM.is_overridden()
    assert type(current_platform).get_attn_backend_cls is not chosen


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"block_size": 64}, "block_size"),
        ({"enable_lora": True}, "enable_lora"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"enforce_eager": False}, "enforce_eager"),
        ({"quantization": "fp8"}, "quantization"),
        ({"hf_overrides": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping"),
    ],
)
def test_refusals_name_the_option(options, named, tmp_path):
    folder = saved("qwen3", HALF, tmp_path)
    with pytest.raises(Exception, match=named), engine(folder, HALF, **options):
        pass


def test_processes_of_vllm_find_the_entry_point(tmp_path):
    """As installed, and with only the environment variable: the engine runs in a separate process."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    installed = tmp_path / "site" / "packing_ops-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Name: packing_ops\nVersion: 0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (installed / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{lines}")
    folder = saved("qwen3", HALF, tmp_path / "model")
    script = f"""
from cases import *
if __name__ == "__main__":
    with engine({folder!r}, torch.bfloat16, attention_backend=None, enforce_eager=False) as llm:
        sampled = sample(llm, prompts(5, 200))
    with trainer({folder!r}, torch.bfloat16) as model:
        print("differ:", *differences(model, sampled))
"""
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "PACKING_OPS_VLLM": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environment["PYTHONPATH"] = f"{tmp_path / 'site'}:{ROOT}:{ROOT / 'tests/engines'}"
    command = [sys.executable, tmp_path / "script.py"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert "differ: 0 48" in run.stdout, run.stdout[-3000:] + run.stderr[-3000:]


def test_vllm_loads_the_plugin(monkeypatch):
    found = importlib.metadata.EntryPoint(
        "packing_ops", "packing_ops.integrations.vllm:register", "vllm.general_plugins"
    )
    revert_registration()
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [found])
    vllm.plugins.load_general_plugins()
    assert AttentionBackendEnum.CUSTOM.is_overridden()


def test_example(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "examples" / "grpo_vllm.py", "--steps", "2", "--samples", "4", "--out", tmp_path]
    subprocess.run(command, env=environment, check=True, timeout=500)
    found = json.loads((tmp_path / "grpo_vllm_cpu.json").read_text())
    assert [step["not_0"] for step in found["packing_ops"]] == [0, 0]
    assert all(step["tokens"] > 100 for step in found["packing_ops"])
    assert sum(step["not_0"] for step in found["vLLM alone"]) > 0
    assert (tmp_path / "grpo_vllm_cpu.png").stat().st_size > 10_000
