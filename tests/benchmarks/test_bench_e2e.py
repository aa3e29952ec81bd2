"""benchmarks/bench_e2e.py in small: providers that agree, one that is wrong, one that cannot run."""

import contextlib
import csv
import dataclasses
import functools
import inspect
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.nn.attention import varlen

pytest.importorskip("transformers")

import bench_e2e
import e2e_providers
from e2e_batches import by_document, documents_of, packed_rows, padded_batches
from e2e_providers import EACH_LAYER, FLASH, PROVIDERS, Provider, ours

import packing_ops as po


@pytest.fixture
def flash_attention_of_ours(monkeypatch):
    """varlen_attn on a machine without a GPU."""
    real = varlen.varlen_attn

    @functools.wraps(real)
    def on_this_machine(*arguments, **options):
        call = inspect.signature(real).bind(*arguments, **options).arguments
        assert call["window_size"] == (-1, 0)
        return po.varlen_attention(call["query"], call["key"], call["value"], call["cu_seq_q"])

    monkeypatch.setattr(varlen, "varlen_attn", on_this_machine)


def rows_of(tmp_path, monkeypatch, providers):
    once = {name: dataclasses.replace(provider, runs=1, cuda_only=False) for name, provider in providers.items()}
    monkeypatch.setattr(bench_e2e, "PROVIDERS", once)
    monkeypatch.setattr(bench_e2e, "OVERHEADS", {})
    monkeypatch.setattr(bench_e2e, "TINY_TOKENS", 512)
    monkeypatch.setattr(bench_e2e, "TINY_CAPACITY", 256)
    monkeypatch.setattr(sys, "argv", ["bench_e2e", "--device", "cpu", "--tiny", "--out", str(tmp_path)])
    status = None
    try:
        bench_e2e.main()
    except SystemExit as error:
        status = error.code
    with (tmp_path / "e2e_cpu.csv").open(newline="") as file:
        return {row["provider"]: row for row in csv.DictReader(file)}, status


def test_providers_have_the_losses_of_the_first(tmp_path, monkeypatch, flash_attention_of_ours):
    names = ["packing_ops", "packing_ops, rms_norm=True", "padded batches of 8, sdpa", "packed, sdpa mask", FLASH]
    rows, status = rows_of(tmp_path, monkeypatch, {name: PROVIDERS[name] for name in names})
    assert status is None
    assert list(rows) == names
    losses = [float(row["loss"]) for row in rows.values()]
    assert losses == pytest.approx([losses[0]] * len(losses), abs=2e-4)
    assert 5 < losses[0] < 7  # near log(256), which nothing learned
    assert {row["vocabulary"] for row in rows.values()} == {"256"}


def test_wrong_or_failing_providers_are_told_and_leave_the_others_their_rows(tmp_path, monkeypatch, capsys):
    from transformers import AttentionInterface

    def whole_row(module, query, key, value, mask, **_):
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2), None

    AttentionInterface.register("whole_row", whole_row)
    providers = {"right": ours(), "wrong": Provider("whole_row"), "missing": Provider("nowhere"), "last": ours()}
    rows, status = rows_of(tmp_path, monkeypatch, providers)
    assert list(rows) == ["right", "wrong", "last"]
    assert "wrong" in status
    assert "missing" in status
    assert "'right'" not in status
    assert "'last'" not in status
    assert "missing: failed, ValueError" in capsys.readouterr().out


def test_rows_of_another_vocabulary_are_not_kept_beside_these(tmp_path):
    overhead = next(iter(bench_e2e.OVERHEADS))
    lines = ["provider,vocabulary,loss", "small,256,5", "large,512,6", f'"{overhead}",,', "old,,7"]
    (tmp_path / "e2e_cpu.csv").write_text("\n".join(lines))
    assert [*bench_e2e.rows_of(tmp_path / "e2e_cpu.csv", 256)] == ["small", overhead]


def test_the_model_is_qwen3s():
    assert bench_e2e.SHAPE["vocab_size"] == 151_936
    assert bench_e2e.SHAPE["tie_word_embeddings"]


# --- torch.compile ---


@pytest.fixture
def traced_only(monkeypatch):
    """What torch.compile traced runs as it is, so that no code has to be generated."""
    monkeypatch.setitem(e2e_providers.COMPILE, "backend", "eager")


def test_what_is_called_compiled_is_compiled(tmp_path, monkeypatch, flash_attention_of_ours, traced_only):
    layers, batches = bench_e2e.TINY["num_hidden_layers"], 2
    names = [f"packing_ops, {EACH_LAYER}", f"{FLASH}, {EACH_LAYER}", f"{FLASH}, compiled rope", FLASH]
    rows, status = rows_of(tmp_path, monkeypatch, {name: PROVIDERS[name] for name in names})
    assert status is None
    assert [row["compiled_calls"] for row in rows.values()] == [str(layers * batches)] * 3 + [""]


def test_code_that_falls_back_to_eager_has_no_figure(
    tmp_path, monkeypatch, flash_attention_of_ours, traced_only, capsys
):
    name = f"{FLASH}, compiled rope"
    with torch.compiler.set_stance("force_eager"):
        rows, status = rows_of(tmp_path, monkeypatch, {FLASH: PROVIDERS[FLASH], name: PROVIDERS[name]})
    assert list(rows) == [FLASH]
    assert name in status
    assert "expected it to run 4 times in 2 batches, got 0" in capsys.readouterr().out


def test_code_that_is_compiled_while_it_is_timed_has_no_figure(
    tmp_path, monkeypatch, flash_attention_of_ours, traced_only, capsys
):
    step, calls = bench_e2e.step, itertools.count()

    def step_that_forgets(*arguments):
        if next(calls):  # the first is the warm-up
            torch._dynamo.reset()
        return step(*arguments)

    monkeypatch.setattr(bench_e2e, "step", step_that_forgets)
    names = [f"{FLASH}, compiled rope", FLASH]
    rows, status = rows_of(tmp_path, monkeypatch, {name: PROVIDERS[name] for name in names})
    assert list(rows) == [FLASH]
    assert names[0] in status
    assert "expected all of it before the timing, got 1 more graphs" in capsys.readouterr().out


def test_a_documents_losses_are_found_in_any_batches():
    documents = documents_of(1024, 256, vocabulary=100)
    tokens = [document[1:].float() for document in documents]
    for batches in (padded_batches(documents), packed_rows(documents, 256, explicit=True)):
        in_order = torch.cat([tokens[i] for i in batches.order])
        assert torch.equal(by_document(in_order, batches.order, documents), torch.cat(tokens))
        assert sum(batches.shares) == pytest.approx(1)


def test_shares_count_kernels_once_and_only_waits_inside(monkeypatch):
    def event(key, device_type, device_time=0, cpu_time=0):
        kinds = {"device_type": device_type, "is_user_annotation": False}
        return SimpleNamespace(key=key, self_device_time_total=device_time, self_cpu_time_total=cpu_time, **kinds)

    events = [
        event("packing_ops::varlen_attention", DeviceType.CPU, device_time=30),  # the kernel below
        event("void packing_ops::forward_kernel<64>", DeviceType.CUDA, device_time=30),
        event("gemm", DeviceType.CUDA, device_time=90),
        event("cudaStreamSynchronize", DeviceType.CPU, cpu_time=5),
        event("cudaDeviceSynchronize", DeviceType.CPU, cpu_time=500),
    ]
    trace = SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr("torch.profiler.profile", lambda **_: contextlib.nullcontext(trace))
    monkeypatch.setattr(bench_e2e, "seconds", lambda call, device: 50e-6)
    assert bench_e2e.shares_of(None) == {"our_kernels_percent": "25.0", "host_waits_percent": "10.0"}
