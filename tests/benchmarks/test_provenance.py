"""What the result files say of where they are from."""

import json
import subprocess
import sys

import bench_demo
import provenance
import pytest
from helpers import ROOT


@pytest.mark.parametrize("told", ["0123456789ab", ""])
def test_the_commit_stands_in_front_of_what_a_program_wrote(tmp_path, monkeypatch, told):
    monkeypatch.setenv("PACKING_OPS_COMMIT", told)
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"loss": 2.5, "device": "theirs"}))
    provenance.add_commit(file, device="ours", torch="2")
    results = json.loads(file.read_text())
    assert [*results] == ["device", "torch", "commit", "loss"]
    assert (results["loss"], results["device"]) == (2.5, "theirs")  # the program knows better
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    if told or not head:
        assert results["commit"] == (told or None)
    else:
        assert head.startswith(results["commit"].removesuffix("-dirty"))


@pytest.mark.parametrize("missing", ["git", "checkout"])
def test_commit_is_not_known_everywhere(tmp_path, monkeypatch, missing):
    monkeypatch.delenv("PACKING_OPS_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    if missing == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit() is None


def test_the_demo_among_the_results_says_its_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PACKING_OPS_COMMIT", "0123456789ab")

    def run(command, check):
        assert command[1:] == [str(ROOT / "examples/train_packed.py"), *given, "--documents", "8"]
        assert check
        (tmp_path / "demo_cpu.json").write_text('{"speedup": 2}')

    monkeypatch.setattr(bench_demo.subprocess, "run", run)
    given = ["--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["", *given, "--only", "demo", "--documents", "8"])
    bench_demo.main()
    assert json.loads((tmp_path / "demo_cpu.json").read_text()) == {"commit": "0123456789ab", "speedup": 2}


def test_options_of_an_example_need_its_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "--documents", "8"])
    with pytest.raises(SystemExit):
        bench_demo.main()
    assert "--only: expected, since --documents is an option of one example" in capsys.readouterr().err
