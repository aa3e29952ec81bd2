"""The benchmark of whole models: two cases side by side on the CPU, one of which cannot run there."""

import csv
import sys
import types

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


def test_cases_of_a_sweep_share_a_program_for_each_provider():
    found = bench_whole.programs([i for i, case in enumerate(CASES) if case.part in ("sweep", "moe")])
    providers = [{CASES[index].provider for index in each} for each in found]
    assert providers == [{"ours"}, {"fa2"}, {"ours"}, {"fa2"}]
    assert [len(each) > 1 for each in found] == [False, False, True, True]


def test_rows_come_as_a_program_prints_them(tmp_path):
    running, ended = bench_whole.Running.__new__(bench_whole.Running), []
    running.left, running.log = [3, 5, 7], tmp_path / "log"
    running.process = types.SimpleNamespace(poll=lambda: 1 if ended else None)
    running.log.write_text('said\nRESULT {"index": 3, "loss": "1"}\nRESULT {"index": 5, "lo')
    assert running.found() == {3: {"loss": "1"}}
    assert running.found() == {}
    ended.append(True)
    running.log.write_text('RESULT {"index": 3, "loss": "1"}\nRESULT {"index": 5, "loss": "2"}\nValueError: bad\n')
    assert running.found() == {5: {"loss": "2"}, 7: {"error": "ValueError: bad"}}
    assert not running.left


def test_the_limit_ends_what_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "--device", "cpu", "--tiny", "--limit", "0.5", "--out", str(tmp_path)])
    bench_whole.main()
    said = capsys.readouterr().out
    assert "ended by --limit" in said
    assert "not started: ['Qwen3-8B" in said
