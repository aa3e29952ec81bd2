"""tests/matrix.py: which versions it takes, what a row says, and that a later run takes a row's place."""

import csv
import subprocess
from pathlib import Path

import matrix
import pytest


def test_the_last_patch_release_of_each_torch(monkeypatch):
    listed = "torch (2.11.1)\nAvailable versions: 2.11.1, 2.11.0+cpu, 2.11.0, 2.10.2, 2.10.0, 2.9.1, 1.13.0\n"
    monkeypatch.setattr(matrix, "run", lambda *command, cwd: subprocess.CompletedProcess(command, 0, listed))
    assert matrix.torches() == ["2.10.2", "2.11.1"]


def test_the_commit_where_there_is_no_git(monkeypatch, tmp_path):
    """The containers of the release have none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PACKING_OPS_COMMIT", raising=False)
    assert matrix.commit() == "unknown"
    monkeypatch.setenv("PACKING_OPS_COMMIT", "0123456789abcdef")
    assert matrix.commit() == "0123456789ab"


def test_a_wheel_that_is_not_there_is_refused_before_a_row_is_replaced(monkeypatch, tmp_path):
    monkeypatch.setattr(matrix, "pythons", dict)
    monkeypatch.setattr(matrix, "torches", lambda: [])
    monkeypatch.setattr(matrix, "save", None)
    monkeypatch.setattr("sys.argv", ["matrix.py", str(tmp_path / "gone.whl")])
    with pytest.raises(SystemExit, match=r"expected a wheel, found no .*gone\.whl: make wheel"):
        matrix.main()


@pytest.mark.parametrize(
    ("failing", "result"),
    [
        ("venv", "no environment"),
        ("torch==2.11.0", "no such torch"),
        ("numpy", "not installed"),
        ("-c", "not imported"),
    ],
)
def test_a_row_names_the_step_that_failed(monkeypatch, tmp_path, failing, result):
    def run(*command, cwd):
        failed = failing in map(str, command)
        return subprocess.CompletedProcess(command, failed, "2.11.0|3.10.4|12.8|\n")

    monkeypatch.setattr(matrix, "run", run)
    row, said = matrix.tried(Path("/bin/python3.10"), "2.11.0", Path("x.whl"), tmp_path / "cell")
    assert row == {"torch": "2.11.0", "python": "3.10", "result": result}
    assert said


def test_a_row_that_passed(monkeypatch, tmp_path):
    def run(*command, cwd):
        return subprocess.CompletedProcess(
            command, 0, "9 passed in 3 s\n" if "pytest" in command else "2.11.0+cu128|3.10.4|12.8|\n"
        )

    monkeypatch.setattr(matrix, "run", run)
    row, _ = matrix.tried(Path("/bin/python3.10"), "2.11.0", Path("x.whl"), tmp_path / "cell")
    expected = {"torch": "2.11.0+cu128", "python": "3.10.4", "torch_cuda": "12.8", "gpu": "", "result": "9 passed"}
    assert row == expected
    assert (tmp_path / "cell" / "tests" / "test_quick.py").exists()


@pytest.mark.parametrize("failing", ["venv", "-c", "transformers==5.17.*", "--no-deps", "pytest", None])
def test_the_oldest_transformers(monkeypatch, tmp_path, failing):
    assert matrix.oldest_transformers() == "5.17"
    commands = []

    def run(*command, cwd):
        commands.append([str(part) for part in command])
        return subprocess.CompletedProcess(command, failing in commands[-1], "1 skipped, 12 passed in 3 s\n")

    monkeypatch.setattr(matrix, "run", run)
    result, said = matrix.tried_with_transformers("5.17", Path("x.whl"), tmp_path / "cell")
    assert (result == "12 passed") == (failing is None)
    assert said
    assert failing is None or failing in commands[-1]
    if failing is None:
        assert commands[-1][-1] == "tests/integrations/transformers"


def test_a_later_run_takes_the_place_of_a_row(monkeypatch, tmp_path):
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "matrix.csv")
    row = {"torch": "2.11.0", "python": "3.10.4", "gpu": "", "result": "failed"}
    matrix.save([row, row | {"torch": "2.9.1"}])
    matrix.save([row | {"torch": "2.11.1", "result": "9 passed"}, row | {"gpu": "H100"}])
    rows = list(csv.DictReader((tmp_path / "matrix.csv").open()))
    found = [(row["torch"], row["gpu"], row["result"]) for row in rows]
    assert found == [("2.9.1", "", "failed"), ("2.11.1", "", "9 passed"), ("2.11.0", "H100", "failed")]
