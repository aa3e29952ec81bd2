"""tests/run_gpu.py: no file is left out or run twice, and one group that fails fails the run."""

import subprocess
import sys

import pytest
import run_gpu


def test_every_file_is_in_one_group():
    files = [argument for tests in run_gpu.targets().values() for argument in tests if argument.endswith(".py")]
    left_out = {path.name for pattern in run_gpu.NOT_HERE for path in run_gpu.TESTS.glob(pattern)}
    assert sorted(files) == [
        f"tests/{p.name}" for p in sorted(run_gpu.TESTS.glob("test_*.py")) if p.name not in left_out
    ]
    assert len(run_gpu.GROUPS) <= 8
    assert left_out


def test_every_group_has_tests():
    for tests in run_gpu.targets().values():
        assert all((run_gpu.ROOT / test.partition("::")[0]).is_file() for test in tests if test != "--deselect")


@pytest.mark.parametrize(("second", "status"), [("assert True", 0), ("assert False", "failed: ['second']")])
def test_counts_of_all_and_failure_of_one(second, status, tmp_path, monkeypatch, capsys):
    bodies = {"first": "def test_a(): pass\ndef test_b(): pass", "second": f"def test_c():\n    {second}", "none": ""}
    for name, body in bodies.items():
        (tmp_path / f"test_{name}.py").write_text(body)
    monkeypatch.setattr(run_gpu, "targets", lambda: {name: [str(tmp_path / f"test_{name}.py")] for name in bodies})
    arguments = ["--logs", str(tmp_path / "logs"), "--only", *bodies]
    monkeypatch.setattr(run_gpu, "GROUPS", bodies)
    monkeypatch.setattr(sys, "argv", ["run_gpu", *arguments, "-c", "/dev/null"])
    if status:
        with pytest.raises(SystemExit) as error:
            run_gpu.main()
        assert error.value.code == status
    else:
        run_gpu.main()
    assert {path.stem for path in (tmp_path / "logs").iterdir()} == {*bodies}
    total = capsys.readouterr().out.splitlines()[-1]
    assert total == ("all groups: 2 passed, 1 failed" if status else "all groups: 3 passed")


def test_nothing_that_ran_is_a_failure(tmp_path):
    command = [sys.executable, run_gpu.__file__, "--only", "families", "--logs", str(tmp_path), "--co", "-k", "no_such"]
    assert subprocess.run(command, capture_output=True).returncode == 1
