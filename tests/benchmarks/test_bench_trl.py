"""The benchmark of TRL's SFTTrainer, with a tiny model on the CPU, where FlashAttention-2 cannot run."""

import dataclasses
import sys
import weakref

import pytest

pytest.importorskip("datasets")
pytest.importorskip("trl")

import bench_trl
import result_rows
import torch
import trl.data_utils
import trl.trainer.sft_trainer
from transformers.models.qwen3 import modeling_qwen3

FULL = "full checkpointing"


def case_of(provider, **more):
    return next(case for case in bench_trl.CASES if case.provider == provider)._replace(**more)


def test_cases_have_names_of_their_own():
    assert len({case.name for case in bench_trl.CASES}) == len(bench_trl.CASES)


def test_repeats_take_turns_and_a_case_that_fails_leaves_the_others_theirs(tmp_path, monkeypatch):
    path = tmp_path / "trl_cpu.csv"
    again = case_of("padded").name
    before = tmp_path / "results"  # of benchmarks
    bench_trl.write_csv(
        before / path.name, [{"case": "another", "repeat": 1}, {"case": again, "repeat": 1}], show=False
    )
    monkeypatch.setattr(result_rows, "RESULTS", before)
    assert [bench_trl.epochs_of(case_of(provider)) for provider in ("padded", "ours")] == [4, 11]
    monkeypatch.setattr(bench_trl, "epochs_of", lambda case: 3 if case.row else 2)
    only = [again, f"fa2, rows of 16,384, {FULL}", f"ours, rows of 16,384, {FULL}"]
    arguments = ["--device", "cpu", "--tiny", "--repeats", "2", "--only", *only, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_trl.py", *arguments])
    bench_trl.main()
    before, *rows = result_rows.read_rows(path)
    assert (before["case"], before["loss"]) == ("another", "")
    found = [(row["provider"], row["repeat"]) for row in rows]
    assert found == [("padded", "1"), ("fa2", "1"), ("ours", "1"), ("padded", "2"), ("ours", "2")]
    for row in rows:
        assert bool(row["error"]) == (row["provider"] == "fa2") == (not row["tokens_per_second_a_gpu"])
    measured = [row for row in rows if not row["error"]]
    assert {row["tokens"] for row in measured} == {"1012"}  # no document is cut
    assert {row["provider"]: row["steps"] for row in measured} == {"padded": "11", "ours": "2"}
    assert {row["weights"] for row in measured} == {"float32"}
    assert {row["provider"]: row["epochs"] for row in measured} == {"padded": "1", "ours": "2"}
    assert all(5 < float(row["loss"]) < 6 for row in measured)  # log of the vocabulary


def test_every_case_can_be_chosen_alone(monkeypatch, capsys):
    for case in bench_trl.CASES:
        monkeypatch.setattr(sys, "argv", ["bench_trl.py", "--list", "--only", case.name])
        bench_trl.main()
        assert capsys.readouterr().out.splitlines() == [case.name]


def test_nothing_starts_after_the_limit(tmp_path, monkeypatch, capsys):
    arguments = ["--device", "cpu", "--tiny", "--limit", "0", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_trl.py", *arguments])
    bench_trl.main()
    assert capsys.readouterr().out.count("left out") == 3 * sum(case.ranks == 1 for case in bench_trl.CASES)
    assert not (tmp_path / "trl_cpu.csv").exists()


def test_a_case_that_the_limit_leaves_out_keeps_its_rows(tmp_path, monkeypatch):
    path, seconds = tmp_path / "trl_cpu.csv", iter((0, 0, 2))
    names = [case_of(provider).name for provider in ("padded", "fa2")]
    bench_trl.write_csv(
        path, [{"case": name, "repeat": i, "loss": "old"} for name in names for i in (1, 2)], show=False
    )
    monkeypatch.setattr(bench_trl, "measured", lambda *_: {"loss": "new"})
    monkeypatch.setattr(bench_trl.time, "perf_counter", lambda: next(seconds, 2))
    arguments = ["--device", "cpu", "--tiny", "--limit", "1", "--only", *names, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_trl.py", *arguments])
    bench_trl.main()
    found = [(row["case"], row["loss"]) for row in result_rows.read_rows(path)]
    assert sorted(found) == sorted([(names[0], "new"), (names[1], "old"), (names[1], "old")])


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_several_ranks_the_first_writes_what_was_measured(rank, tmp_path, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": rank}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(bench_trl, "measured", lambda *_: {"loss": "new"})
    monkeypatch.setattr(sys, "argv", ["bench_trl.py", "--device", "cpu", "--repeats", "1", "--out", str(tmp_path)])
    bench_trl.main()
    assert not (tmp_path / "trl_cpu.csv").exists()
    written = [*tmp_path.glob("trl_ranks_cpu.csv")]
    assert len(written) == (rank == "0")
    for path in written:
        assert {row["ranks"] for row in result_rows.read_rows(path)} == {"2"}


def test_cases_of_more_ranks_ask_for_torchrun(monkeypatch, capsys):
    case = next(case for case in bench_trl.CASES if case.ranks == 2)
    monkeypatch.setattr(sys, "argv", ["bench_trl.py", "--device", "cpu", "--only", case.name])
    with pytest.raises(SystemExit):
        bench_trl.main()
    assert "start it by torchrun" in capsys.readouterr().err


def test_what_fails_on_one_of_several_ranks_ends_the_program(tmp_path, monkeypatch):
    def failing(*_):
        raise ValueError("on this rank")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(bench_trl, "measured", failing)
    monkeypatch.setattr(sys, "argv", ["bench_trl.py", "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(ValueError, match="on this rank"):
        bench_trl.main()


def test_sorted_batches_have_less_padding():
    def share_of_padding(provider):
        with bench_trl.trainer_of(case_of(provider).small(), "cpu", tiny=True) as trainer:
            masks = [batch["attention_mask"] for batch in trainer.get_train_dataloader()]
        return 1 - sum(mask.sum() for mask in masks) / sum(mask.numel() for mask in masks)

    assert share_of_padding("sorted") < share_of_padding("padded") / 2


@pytest.mark.parametrize("case", bench_trl.CASES, ids=lambda case: case.name)
def test_settings_are_trls_defaults_but_for_what_a_case_names(case, tmp_path):
    ours, stock = bench_trl.settings_of(case, "cpu", str(tmp_path)), trl.SFTConfig(str(tmp_path), use_cpu=True)
    changed = {f.name for f in dataclasses.fields(stock) if getattr(ours, f.name) != getattr(stock, f.name)}
    named = {"num_train_epochs", "max_length", "save_strategy", "logging_strategy", "disable_tqdm"}
    named |= {"packing"} if case.row else set()
    named |= {"per_device_train_batch_size"} if case.row or case.batch == 32 else set()
    named |= set() if case.checkpointing and case.wrapper != "FSDP2" else {"gradient_checkpointing"}
    named |= {"fsdp", "fsdp_config"} if case.wrapper == "FSDP2" else set()
    named |= {"use_liger_kernel"} if case.provider == "liger" else set()
    named |= {"train_sampling_strategy"} if case.provider == "sorted" else set()
    assert changed - {"activation_checkpointing"} == named  # transformers' newer name of gradient_checkpointing
    assert ours.bf16
    # In FSDP2 accelerate puts checkpoints into its wrapper.
    sharded = case.wrapper == "FSDP2"
    checkpoints = ours.fsdp_config["activation_checkpointing"] if sharded else ours.gradient_checkpointing
    assert checkpoints == bool(case.checkpointing)
    assert not (sharded and ours.gradient_checkpointing)


def test_a_case_leaves_no_model_and_nothing_that_it_replaced():
    stock = modeling_qwen3.apply_rotary_pos_emb, trl.trainer.sft_trainer.pack_dataset, trl.data_utils.pack_dataset
    with bench_trl.trainer_of(case_of("ours").small(), "cpu", tiny=True) as trainer:
        assert trl.trainer.sft_trainer.pack_dataset is not stock[1]
        modeling_qwen3.apply_rotary_pos_emb = None  # as Liger does
        model = weakref.ref(trainer.model)
    assert stock == (
        modeling_qwen3.apply_rotary_pos_emb, trl.trainer.sft_trainer.pack_dataset, trl.data_utils.pack_dataset,
    )  # fmt: skip
    del trainer
    bench_trl.release("cpu")
    assert model() is None


def test_lora_trains_adapters_on_bfloat16_weights(tmp_path, monkeypatch):
    (case,) = (case for case in bench_trl.CASES if case.lora and not case.compiled and case.provider == "ours")
    with bench_trl.trainer_of(case.small(), "cpu", True) as trainer:
        trained = {name for name, weight in trainer.model.named_parameters() if weight.requires_grad}
        assert trainer.model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert len(trained) == 2 * 7 * 2  # of two layers with seven products each
    assert all(".lora_" in name for name in trained)
    monkeypatch.setattr(bench_trl, "measured", lambda *_: {"loss": "1"})
    arguments = ["--device", "cpu", "--repeats", "1", "--only", case.name, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_trl.py", *arguments])
    bench_trl.main()
    (row,) = result_rows.read_rows(tmp_path / "trl_cpu.csv")
    assert (row["weights"], row["lora"]) == ("bfloat16", "1")
