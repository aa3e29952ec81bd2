"""tests/run_gpu.py: no file is left out or run twice, and one group that fails fails the run."""

import sys

import pytest
import run_gpu


def test_every_file_is_in_one_group():
    files = [argument for tests in run_gpu.targets().values() for argument in tests if argument.endswith(".py")]
    left_out = {path.name for pattern in run_gpu.NOT_HERE for path in run_gpu.TESTS.rglob(pattern)}
    assert sorted(files) == [
        str(p.relative_to(run_gpu.ROOT)) for p in sorted(run_gpu.TESTS.rglob("test_*.py")) if p.name not in left_out
    ]
    assert len(run_gpu.GROUPS) <= 16
    assert left_out


def test_every_group_has_tests():
    for tests in run_gpu.targets().values():
        assert all((run_gpu.ROOT / test).is_file() for test in tests if test not in ("-n", "8"))


def test_each_group_starts_on_another_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    gpus = run_gpu.visible_gpus()
    seen = [run_gpu.environment(group, gpus, 2)["CUDA_VISIBLE_DEVICES"] for group in range(4)]
    assert seen == ["4,6,7", "6,7,4", "7,4,6", "4,6,7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(run_gpu.torch.cuda, "device_count", lambda: 0)
    assert "CUDA_VISIBLE_DEVICES" not in run_gpu.environment(1, run_gpu.visible_gpus(), 2)


@pytest.mark.parametrize(
    ("second", "selected", "status", "total"),
    [
        ("assert True", "test", None, "3 passed"),
        ("assert False", "test", "failed: ['second']", "2 passed, 1 failed"),
        ("assert True", "no_such", "failed: no test ran", "3 deselected"),
    ],
)
def test_counts_of_all_and_failure_of_one(second, selected, status, total, tmp_path, monkeypatch, capsys):
    bodies = {"first": "def test_a(): pass\ndef test_b(): pass", "second": f"def test_c():\n    {second}", "none": ""}
    for name, body in bodies.items():
        (tmp_path / f"test_{name}.py").write_text(body)
    monkeypatch.setattr(run_gpu, "GROUPS", bodies)
    monkeypatch.setattr(run_gpu, "targets", lambda: {name: [str(tmp_path / f"test_{name}.py")] for name in bodies})
    arguments = ["--logs", str(tmp_path / "logs"), "--only", *bodies, "-c", "/dev/null", "-k", selected]
    monkeypatch.setattr(sys, "argv", ["run_gpu", *arguments])
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    with pytest.raises(SystemExit) as error:
        sys.exit(run_gpu.main())
    assert error.value.code == status
    assert {path.stem for path in (tmp_path / "logs").iterdir()} == {*bodies}
    assert capsys.readouterr().out.splitlines()[-1] == f"all groups: {total}"
