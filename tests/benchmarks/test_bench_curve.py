"""The benchmark of many steps on real text, with a tiny model on the CPU, where FlashAttention-2 cannot run."""

import argparse
import json
import queue
import subprocess
import sys
import types

import pytest
from helpers import compiler, fresh_process

pytest.importorskip("transformers")

import bench_curve
import result_rows


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    lines = [{"prompt": f"name_{i}(x)\n", "completion": "Return what it is. é" * (1 + i * 7 % 9)} for i in range(60)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_row_has_whole_documents_each_with_its_end(text):
    rows = bench_curve.rows_of_documents(text, 1024)
    assert sum(map(len, rows)) == 60
    for documents in rows:
        assert sum(map(len, documents)) <= 1024
        for document in documents:
            assert len(document) <= 128
            assert document[-1] == 0
            assert document[:-1].min() > 0


def test_packed_and_padded_batches_of_a_row_give_the_losses_of_the_same_steps(text, monkeypatch):
    compiler.run_as_they_are(monkeypatch)
    arguments = argparse.Namespace(device="cpu", tiny=True, steps=7, limit=60, text=text)
    ours, padded = (bench_curve.trained(name, arguments) for name in ("ours", "padded"))
    assert [row["step"] for row in ours] == [row["step"] for row in padded] == list(range(1, 8))
    assert [float(row["loss"]) for row in ours] == pytest.approx([float(row["loss"]) for row in padded], abs=2e-3)
    assert float(ours[-1]["loss"]) < float(ours[0]["loss"])
    arguments.limit = 0
    assert bench_curve.trained("padded", arguments) == []


def test_a_process_that_fails_says_why_and_has_no_rows(tmp_path, capsys, monkeypatch):
    """It is a fork of one that has imported transformers."""

    def run(command, env, **_):
        program = command[command.index(bench_curve.__file__) :]
        with pytest.raises(AssertionError, match="exit code 1") as failed:
            fresh_process.run(*program, folder=tmp_path, environment=env)
        return subprocess.CompletedProcess(program, 1, stdout=str(failed.value))

    monkeypatch.setattr(bench_curve, "subprocess", types.SimpleNamespace(run=run, PIPE=None, STDOUT=None))
    gpus = queue.Queue()
    gpus.put("0")
    arguments = argparse.Namespace(device="cpu", tiny=True, steps=2, limit=60)
    assert bench_curve.in_a_process("ours", gpus, tmp_path / "no.jsonl", arguments) == []
    assert "FileNotFoundError" in capsys.readouterr().out
    assert gpus.get_nowait() == "0"  # for the next one


def test_one_that_fails_leaves_the_others_their_rows(tmp_path, monkeypatch):
    path, run = tmp_path / "curve_cpu.csv", subprocess.run
    before = [
        {"provider": name, "step": 1, "loss": loss} for name, loss in (("ours", 5.5), ("fa2", 5), ("padded", 5.25))
    ]
    bench_curve.write_csv(path, before, show=False)

    def without_text(command, **options):  # parsing the standard library takes long
        return None if "docstrings.py" in str(command) else run(command, **options)

    monkeypatch.setattr(subprocess, "run", without_text)
    found = {"ours": [{"provider": "ours", "step": 1, "loss": "6.5"}], "fa2": []}
    monkeypatch.setattr(bench_curve, "in_a_process", lambda name, *_: found[name])
    monkeypatch.setattr(sys, "argv", ["", "--device", "cpu", "--tiny", "--only", "ours", "fa2", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"failed: \['fa2'\]"):
        bench_curve.main()
    rows = result_rows.read_rows(path)
    assert [(row["provider"], row["loss"], row["apart"], row["apart_from_fa2"]) for row in rows] == [
        ("ours", "6.5", "0.00000", "1.50000"), ("fa2", "5", "1.50000", "0.00000"), ("padded", "5.25", "1.25000", "0.25000")
    ]  # fmt: skip


def steps_of(name, loss, speed, count=4):
    where = {"device": "GPU", "torch": "2", "commit": "abcdef012345"}
    return [
        {"provider": name, "step": i + 1, "loss": f"{loss / (i + 1):.5f}", "seconds": f"{16384 / speed:.4f}",
         "tokens_per_second": speed, **where}
        for i in range(count)
    ]  # fmt: skip


def test_the_page_and_the_picture_say_how_far_losses_are_apart(tmp_path, monkeypatch):
    pytest.importorskip("tomllib")  # of Python 3.11
    pytest.importorskip("matplotlib")
    import render
    import render_pictures
    from curves import lines

    monkeypatch.setattr(result_rows, "RESULTS", tmp_path)
    assert render.made("curve") == "Not run yet: `benchmarks/bench_curve.py`."
    rows = [*steps_of("ours", 12, 120_000), *steps_of("fa2", 12.004, 100_000), *steps_of("fa2_again", 12.006, 100_000)]
    rows += steps_of("padded", 12.001, 20_000, count=2)
    bench_curve.write_csv(tmp_path / "curve_cuda.csv", bench_curve.with_differences(rows), show=False)
    said = render.made("curve")
    table = [[cell.strip() for cell in line.split("|")[2:-1]] for line in said.splitlines() if line.startswith("| ")]
    assert table[1:] == [
        ["4", "6.2500", "0.0017", "0.0040"],
        ["4", "6.2521", "–", "–"],
        ["4", "6.2531", "0.0008", "0.0020"],
        ["2", "9.0008", "0.0023", "0.0030"],
    ]
    assert "(loss of the first step: 12.00), compiled layers" in " ".join(said.split())
    block = render_pictures.PICTURES["lines"]["curve_cuda"]
    figure = lines(block, render_pictures.WIDTH, render_pictures.SMALL, render_pictures.LARGE)
    assert "differ by 0.0017 (median) and at most 0.0040; ours is 1.20 times as fast" in figure.get_suptitle()
    assert [len(axis.lines) for axis in figure.axes] == [4, 4]
    figure.savefig(tmp_path / "curve.png")
    monkeypatch.setattr(sys, "argv", ["render_pictures.py", "--family", "curve"])
    render_pictures.main()
    assert (tmp_path / "curve_cuda.png").exists()
