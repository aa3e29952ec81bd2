"""benchmarks/harness.py: how often a provider runs, and what stays of a run that ends early."""

import sys

import pytest

pytest.importorskip("rich")

import harness
import result_rows


def counted(case: harness.Case) -> dict[str, int]:
    calls = dict.fromkeys(case.providers, 0)

    def call(name):
        calls[name] += 1

    case.providers = {name: lambda name=name: call(name) for name in case.providers}
    return calls


@pytest.mark.parametrize("slow", [True, False])
def test_a_slow_provider_runs_less_often(slow, monkeypatch):
    case = harness.Case("forward", "small", "float32", {"ours": None})
    calls = counted(case)
    monkeypatch.setattr(harness, "SLOW_US", -1.0 if slow else 1e9)
    monkeypatch.setattr(harness, "time_cpu", lambda call, inner: call() or 1.0)
    assert harness.measure(case, "cpu")["ours"][1] == 1.0
    assert calls["ours"] == (2 + harness.SLOW_RUNS if slow else 4 + case.runs)


def test_what_is_measured_stays_when_a_later_case_fails(tmp_path, monkeypatch, capsys):
    def cases(device):
        yield harness.Case("forward", "small", "float32", {"ours": lambda: None}, runs=1)
        raise RuntimeError("out of time")

    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(RuntimeError, match="out of time"):
        harness.run("some", cases)
    assert [row["op"] for row in result_rows.read_rows(tmp_path / "some_cpu.csv")] == ["forward"]
    assert "forward small float32 ours" in capsys.readouterr().out


def test_the_first_repeat_of_a_case_replaces_its_rows():
    rows = [{"case": "a"}, {"case": "b", "repeat": "1"}, {"case": "b", "repeat": "2"}]  # "a" is of before
    rows = result_rows.with_row(rows, {"case": "b", "repeat": 1, "new": True})
    rows = result_rows.with_row(rows, {"case": "b", "repeat": 2, "new": True})
    rows = result_rows.with_row(rows, {"case": "a", "repeat": 1, "new": True})
    assert [(row["case"], row["repeat"]) for row in rows] == [("a", 1), ("b", 1), ("b", 2)]
    assert all("new" in row for row in rows)
