"""The benchmark of whole models: two cases side by side on the CPU, one of which cannot run there."""

import csv
import sys
import types
import weakref

import bench_whole
import pytest
from whole_cases import CASES


def test_cases_have_names_of_their_own():
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_case_that_fails_leaves_the_others_theirs(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    kept = {"case": "of another part", "loss": "1"}
    before = tmp_path / "before"
    bench_whole.write_csv(before / "whole_cpu.csv", [kept], show=False)
    monkeypatch.setattr(bench_whole, "RESULTS", before)
    arguments = ["--device", "cpu", "--tiny", "--part", "moe", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_whole.py", *arguments])
    bench_whole.main()
    with (tmp_path / "whole_cpu.csv").open(newline="") as file:
        rows = {(row["part"], row["provider"]): row for row in csv.DictReader(file)}
    assert rows["", ""]["case"] == "of another part"
    ours, flash = rows["moe", "ours"], rows["moe", "fa2"]
    assert not ours["error"]
    assert float(ours["tokens_per_second_a_gpu"]) > 0
    assert 5 < float(ours["loss"]) < 6  # log of the vocabulary
    assert flash["error"]  # torch's FlashAttention-2 is of CUDA
    assert not flash["loss"]


def test_cases_of_one_gpu_share_a_program_for_each_part_and_provider():
    found = bench_whole.programs(list(range(len(CASES))))
    assert sorted(index for each in found for index in each) == list(range(len(CASES)))
    for each in found:
        assert len({(CASES[index].part, CASES[index].provider) for index in each}) == 1
        assert len(each) == 1 or all(CASES[index].ranks == 1 for index in each)
    alone = [(CASES[each[0]].part, CASES[each[0]].provider) for each in found if CASES[each[0]].ranks == 1]
    assert len(set(alone)) == len(alone)


def test_a_case_leaves_no_model(monkeypatch):
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    import whole_model

    models, made = [], whole_model.model_of

    def model_of(*arguments):
        model, multiplied = made(*arguments)
        models.append(weakref.ref(model))
        return model, multiplied

    monkeypatch.setattr(whole_model, "model_of", model_of)
    cases = [case for case in CASES if case.part in ("one", "lora") and case.provider == "ours" and case.checkpointing]
    whole_model.run({index: cases[index] for index in (0, -1)}, "cpu", tiny=True)  # with a policy, with adapters
    assert len(models) == 2
    assert not any(model() for model in models)


def running_of(path, left, ended):
    """A program of which ``ended`` has the exit code, once it ends."""
    running = bench_whole.Running.__new__(bench_whole.Running)
    running.left, running.log = left, path
    running.process = types.SimpleNamespace(poll=lambda: ended[0] if ended else None)
    return running


def test_rows_come_as_a_program_prints_them(tmp_path):
    ended, log = [], tmp_path / "log"
    running = running_of(log, [3, 5, 7, 9], ended)
    log.write_text('said\nRESULT {"index": 3, "loss": "1"}\nRESULT {"index": 5, "lo')
    assert running.found() == {3: {"loss": "1"}}
    assert running.found() == {}
    ended.append(1)
    log.write_text('RESULT {"index": 3, "loss": "1"}\nRESULT {"index": 5, "loss": "2"}\nValueError: bad\n')
    assert running.found() == {5: {"loss": "2"}, 7: {"error": "ValueError: bad"}}
    assert running.left == [9]  # for another program


def test_a_program_that_ends_early_leaves_the_rest_without_an_error(tmp_path):
    running = running_of(tmp_path / "log", [3, 5], [0])
    running.log.write_text('RESULT {"index": 3, "loss": "1"}\n')
    assert running.found() == {3: {"loss": "1"}}
    assert running.left == [5]


def test_the_limit_ends_what_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "--device", "cpu", "--tiny", "--limit", "0.5", "--out", str(tmp_path)])
    bench_whole.main()
    said = capsys.readouterr().out
    assert "ended by --limit" in said
    assert "not started: ['Qwen3-8B" in said
