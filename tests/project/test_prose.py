"""The figures of ``python tools/prose.py -v``, which also says where the words are: lower them, never raise them."""

import re

import pytest
from helpers import ROOT

from tools import prose

DIALECT_WORDS = {"packing_ops": 3.0, "csrc": 1.5, "docs": 4.0, "tests": 3.5}  # at most, per 1,000
VERBS = 0.9  # at least, of the docstrings of functions


@pytest.mark.parametrize("folder", prose.FOLDERS)
def test_dialect_words_are_few(folder):
    words, found = prose.dialect(folder)
    assert words > 10_000
    assert 1000 * len(found) / words <= DIALECT_WORDS[folder], "\n".join(found)


def test_docstrings_begin_with_a_verb():
    without = prose.without_verb()
    assert len(without) <= (1 - VERBS) * len(prose.first_words()), "\n".join(without)


def test_what_is_counted(tmp_path):
    """Words of code do not count: neither statements, nor examples, nor names in backquotes."""
    (tmp_path / "a.py").write_text('def f():\n    """Give.\n\n    >>> own\n    """\n    own = 1  # alone\n')
    (tmp_path / "a.cu").write_text("int own;  // told\n/* lies\nstands */\n")
    (tmp_path / "a.md").write_text("own\n```\nalone\n```\n\n    told\n\nlies\n")
    lines = {name: dict(prose.prose(tmp_path / name)) for name in ("a.py", "a.cu", "a.md")}
    assert [line.strip() for line in lines["a.py"].values()] == ["Give.", "", "", "# alone"]
    assert lines["a.cu"] == {1: "// told", 2: "/* lies", 3: "stands */"}
    assert [number for number, line in lines["a.md"].items() if line] == [1, 8]
    assert prose.DIALECT.findall("its own, None of that of standard") == ["own", "that of"]
    assert [first for *first, _ in prose.docstrings((tmp_path / "a.py").read_text())] == [
        [2, "Give.\n\n    >>> own\n    "]
    ]


def test_hooks_of_pre_commit():
    """Programs and scripts exist, and the pattern finds subjects over 72 characters."""
    yaml = pytest.importorskip("yaml")
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["id"]: hook for hook in repo["hooks"]}
    pattern = re.compile(hooks.pop("subject")["entry"], re.M | re.S)  # as pygrep --multiline reads it
    assert pattern.search("x" * 73)
    assert not pattern.search("x" * 72 + "\n\n" + "x" * 100)
    scripts = [word for hook in hooks.values() for word in hook["entry"].split() if word.endswith(".py")]
    assert [script for script in scripts if not (ROOT / script).exists()] == []
    assert scripts
