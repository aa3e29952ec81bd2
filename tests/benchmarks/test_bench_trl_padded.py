"""The benchmark of TRL's trainers that pad, with a tiny model on the CPU."""

import dataclasses
import sys
import weakref

import pytest

pytest.importorskip("datasets")
pytest.importorskip("trl")

import bench_trl_padded
import result_rows
import trl
import trl.trainer.utils
from bench_e2e import release
from transformers.models.qwen3 import modeling_qwen3

import packing_ops as po


def case_of(part, provider, compiled=False, lora=False):
    wanted = part, provider, compiled, lora
    (found,) = (
        case for case in bench_trl_padded.CASES if (case.part, case.provider, case.compiled, case.lora) == wanted
    )
    return found


def varlen_on_the_cpu(query, key, value, ends, *_, **options):
    assert options.pop("window_size") == (-1, 0)
    return po.varlen_attention(query, key, value, ends, causal=True, softmax_scale=options["scale"])


def test_cases_have_names_of_their_own():
    assert len({case.name for case in bench_trl_padded.CASES}) == len(bench_trl_padded.CASES) == 44


@pytest.mark.parametrize(("part", "tokens"), [("DPO", 242), ("GRPO", 545)])
def test_providers_train_on_the_same_tokens_to_the_same_loss(part, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_trl_padded, "EPOCHS", 2)
    monkeypatch.setattr(bench_trl_padded.varlen, "varlen_attn", varlen_on_the_cpu)
    providers = ["padded", "fa2", "ours", "padded", "ours"]
    only = [case_of(part, provider, i > 2).name for i, provider in enumerate(providers)]
    arguments = ["--device", "cpu", "--tiny", "--repeats", "1", "--only", *only, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_trl_padded.py", *arguments])
    bench_trl_padded.main()
    rows = result_rows.read_rows(tmp_path / "trl_padded_cpu.csv")
    assert [(row["part"], row["provider"], row["error"]) for row in rows] == [(part, each, "") for each in providers]
    assert [row["compiled"] for row in rows] == [*"00011"]
    padded, *others = rows
    assert (padded["steps"], padded["epochs"], padded["tokens"]) == ("2", "1", str(tokens))
    assert int(padded["slots"]) > 1.25 * tokens
    for row in others:  # in bfloat16
        assert float(row["loss"]) == pytest.approx(float(padded["loss"]), abs=1e-3)
        assert float(row["grad_norm"]) == pytest.approx(float(padded["grad_norm"]), rel=5e-3)
        assert (row["tokens"], row["slots"]) == (padded["tokens"], padded["slots"])


@pytest.mark.parametrize("part", ["DPO", "GRPO"])
def test_adapters_alone_train_to_the_loss_of_padded_batches(part, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_trl_padded, "EPOCHS", 2)
    only = [
        case_of(part, provider, compiled, lora=True) for provider, compiled in (("padded", 0), ("ours", 0), ("ours", 1))
    ]
    arguments = ["--device", "cpu", "--tiny", "--repeats", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_trl_padded.py", *arguments, "--only", *(case.name for case in only)])
    bench_trl_padded.main()
    padded, *ours = result_rows.read_rows(tmp_path / "trl_padded_cpu.csv")
    assert [row["error"] for row in (padded, *ours)] == [""] * 3
    for row in ours:
        assert (row["lora"], row["weights"], row["model"]) == ("1", "bfloat16", "Qwen3-8B")
        assert float(row["loss"]) == pytest.approx(float(padded["loss"]), abs=1e-3)
        assert float(row["grad_norm"]) == pytest.approx(float(padded["grad_norm"]), rel=5e-3)


@pytest.mark.parametrize("part", ["DPO", "GRPO"])
def test_all_models_of_ours_run_without_padding(part, monkeypatch):
    monkeypatch.setattr(bench_trl_padded, "EPOCHS", 1)
    count, seen = bench_trl_padded.Count(), []
    with bench_trl_padded.trainer_of(case_of(part, "ours").small(), "cpu", True, count) as trainer:
        models = [model for model in (trainer.model, trainer.ref_model) if model is not None]
        for model in models:
            model.get_input_embeddings().register_forward_hook(lambda _, given, __: seen.append(given[0].numel()))
        trainer.train()
    assert len(models) == {"DPO": 2, "GRPO": 1}[part]
    assert sum(seen) == len(models) * count.tokens < len(models) * count.slots


def test_a_case_that_fails_leaves_the_others_theirs(tmp_path, monkeypatch):
    def failing(case, *_):
        if case.provider == "liger":
            raise ImportError("liger-kernel")
        return {"loss": "1"}

    monkeypatch.setattr(bench_trl_padded, "measured", failing)
    arguments = ["--device", "cpu", "--repeats", "2", "--only", "DPO", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_trl_padded.py", *arguments])
    bench_trl_padded.main()
    rows = result_rows.read_rows(tmp_path / "trl_padded_cpu.csv")
    assert [(row["provider"], row["repeat"], row["compiled"]) for row in rows if not row["error"]] == [
        (provider, repeat, compiled)
        for repeat in "12"
        for compiled in "01"
        for _model in ("Qwen3-0.6B", "Qwen3-8B")
        for provider in ("padded", "sorted", "fa2", "liger_sdpa", "ours")
    ]
    failed = [(row["provider"], row["error"]) for row in rows if row["error"]]
    assert failed == [("liger", "ImportError: liger-kernel")] * 4


@pytest.mark.parametrize("case", bench_trl_padded.CASES, ids=lambda case: case.name)
def test_settings_are_trls_defaults_but_for_what_a_case_names(case, tmp_path):
    ours = bench_trl_padded.settings_of(case, "cpu", str(tmp_path))
    stock = type(ours)(str(tmp_path), use_cpu=True)
    changed = {f.name for f in dataclasses.fields(stock) if getattr(ours, f.name) != getattr(stock, f.name)}
    named = {"num_train_epochs", "save_strategy", "logging_strategy", "disable_tqdm"}
    named |= {"per_device_train_batch_size"} if case.batch != 8 else set()
    named |= {"use_liger_kernel"} if "liger" in case.provider else set()
    named |= {"train_sampling_strategy"} if case.provider == "sorted" else set()
    if case.part == "GRPO":  # made of the others
        named |= {"generation_batch_size"}
    assert changed == named
    assert ours.bf16
    assert ours.gradient_checkpointing


def test_an_epoch_has_as_many_rows_as_its_steps_take():
    for case in bench_trl_padded.CASES:
        if case.part == "DPO":
            rows = bench_trl_padded.preference_pairs(case, 100, False)
            assert len(rows) == case.steps * case.batch
            assert all(min(len(text.split()) for text in row.values()) > 0 for row in rows)
        else:
            completions = bench_trl_padded.completions_of(case, 100, False)
            sizes = [len(ids) for each in completions.values() for ids in each]
            assert len(sizes) == case.steps * case.batch
            assert max(sizes) <= case.longest


@pytest.mark.parametrize("part", ["DPO", "GRPO"])
def test_a_case_leaves_no_model_and_nothing_that_it_replaced(part):
    stock = modeling_qwen3.apply_rotary_pos_emb, vars(trl.trainer.utils).get("_ChunkedLogProbFunction")
    count = bench_trl_padded.Count()
    with bench_trl_padded.trainer_of(case_of(part, "ours").small(), "cpu", True, count) as trainer:
        modeling_qwen3.apply_rotary_pos_emb = None  # as Liger does
        models = [weakref.ref(model) for model in (trainer.model, trainer.ref_model) if model is not None]
    assert stock == (modeling_qwen3.apply_rotary_pos_emb, vars(trl.trainer.utils).get("_ChunkedLogProbFunction"))
    del trainer
    release("cpu")
    assert [model() for model in models] == [None] * len(models)
