"""tests/fresh_environments.py: the versions that it asks for, and that a script which did not run is a failure."""

import sys

import fresh_environments
import pytest
from fresh_environments import Outcome, came_of, oldest, table, torches


@pytest.mark.parametrize(
    ("requirement", "lowest"),
    [
        ("torch>=2.10", "torch==2.10.*"),
        ('trl>=1; extra == "hf"', "trl==1.0.*"),
        ("megatron-core>=0.13 ; extra == 'megatron'", "megatron-core==0.13.*"),
    ],
)
def test_oldest(requirement, lowest):
    assert oldest(requirement) == lowest


def test_torches_are_those_of_the_project():
    first, newest = torches()
    assert (
        f"{first.removeprefix('torch==').removesuffix('.*')} and later"
        in (fresh_environments.ROOT / "README.md").read_text()
    )
    assert newest == "torch"  # of no version: what pip gives today


@pytest.mark.parametrize(
    ("code", "output", "outcome"),
    [
        (0, "......\n6 passed in 60.12s (0:01:00)", (True, "6 passed")),
        (0, "..s...\n5 passed, 1 skipped in 9.1s", (False, "5 passed, 1 skipped")),
        (1, "..F...\n1 failed, 5 passed in 9.1s", (False, "1 failed, 5 passed")),
        (0, "s\n1 skipped in 0.01s", (False, "1 skipped")),
        (5, "no tests ran in 0.01s", (False, "pytest ended with 5")),
        (-11, "", (False, "pytest ended with -11")),
    ],
)
def test_came_of(code, output, outcome):
    assert came_of(code, output) == outcome


def test_table():
    rows = table([Outcome({"torch": "2.10.0", "packing_ops": "0.1.0"}, True, "6 passed in 61 s")]).splitlines()
    assert rows[0].split() == [*fresh_environments.COLUMNS, "scripts"]
    assert rows[1].split() == ["2.10.0", "–", "–", "–", "0.1.0", "6", "passed", "in", "61", "s"]


def test_one_that_fails_fails_all_after_the_others(monkeypatch, capsys):
    def outcomes_of(torch, with_oldest, keep):
        if torch == "torch==2.11.0":
            raise RuntimeError("pip install: no room")
        return [Outcome({"torch": torch}, torch == "c", "1 failed, 5 passed in 2 s")]

    monkeypatch.setattr(fresh_environments, "outcomes_of", outcomes_of)
    monkeypatch.setattr(sys, "argv", ["fresh_environments.py", "b", "torch==2.11.0", "c"])
    with pytest.raises(SystemExit) as error:
        fresh_environments.main()
    assert error.value.code == "failed: torch==2.11.0; torch b: 1 failed, 5 passed in 2 s"
    assert "no room" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["fresh_environments.py", "c"])
    with pytest.raises(SystemExit) as error:
        fresh_environments.main()
    assert error.value.code is None
