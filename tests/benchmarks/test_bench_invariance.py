"""benchmarks/bench_invariance.py in small: nothing differs in the mode, something does without it."""

import csv
import sys
import types

import bench_invariance
import pytest
import torch
from helpers import fresh_process

pytest.importorskip("transformers")


@pytest.fixture
def forks(monkeypatch, tmp_path):
    """Its processes are forks of one that has imported transformers."""

    class Fork:
        returncode = 0

        def __init__(self, command, **_):
            self.args = command

        def communicate(self):
            program = self.args.index(sys.executable) + 1
            environment = dict(setting.split("=") for setting in self.args[1 : program - 1])
            return fresh_process.run(*self.args[program:], folder=tmp_path, environment=environment), None

    monkeypatch.setattr(bench_invariance, "subprocess", types.SimpleNamespace(Popen=Fork, PIPE=None))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_in_small(tmp_path, forks):
    options = ["--device", "cpu", "--tokens", "4000", "--steps", "1", "--results", str(tmp_path)]
    bench_invariance.main([*options, "--models", "tiny"])
    rows = list(csv.DictReader((tmp_path / "invariance_cpu.csv").open()))
    assert [(row["mode"], row["claimed"], row["compared"]) for row in rows] == [
        ("without", "", "4000"),
        ("invariant", "yes", "4000"),
    ]
    assert int(rows[0]["differ"]) > 0
    assert rows[1]["differ"] == "0"
    assert all(float(row["step_ms"]) > 0 for row in rows)


def test_a_hybrid_beside_rows_of_other_models(tmp_path, forks):
    path = tmp_path / "invariance_cpu.csv"
    path.write_text("model,mode,layers,compared,differ,claimed\ntiny,invariant,eager,4000,0,yes\n")
    options = ["--device", "cpu", "--tokens", "400", "--steps", "1", "--results", str(tmp_path)]
    bench_invariance.main([*options, "--models", "tiny hybrid"])
    rows = {(row["model"], row["mode"]): row for row in csv.DictReader(path.open())}
    assert rows["tiny", "invariant"]["compared"] == "4000"
    found = rows["tiny hybrid", "invariant"]
    assert found["compared"] == "400"
    assert found["claimed"].startswith("no: model.layers.0.linear_attn: rows that were")
    assert int(rows["tiny hybrid", "without"]["differ"]) > 0


def test_every_document_is_in_one_row():
    documents = bench_invariance.documents_of(300, 10, "cpu")
    assert sum(map(len, documents)) == 300
    for capacity in (0, 50):
        rows = bench_invariance.packs(documents, capacity, bench_invariance.random.Random(0))
        assert sorted(i for row in rows for i in row) == list(range(len(documents)))
        assert all(len(row) == 1 or sum(len(documents[i]) for i in row) <= 50 for row in rows)
    assert torch.cat(documents).max() < 10
