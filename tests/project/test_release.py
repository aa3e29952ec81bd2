"""What a tag releases: tools/release_notes.py, and the files that the workflow names."""

import re

import pytest
from helpers import ROOT

from packing_ops._runtime.library import VERSION
from tools.release_notes import notes

CHANGELOG = """\
# Changelog

## [Unreleased]

- Later.

## [0.2.0] - 2026-11-23

### Added

- This.

## [0.1.0] - 2026-11-22

- That.
"""
LIBRARY = 'VERSION = "0.2.0"  # pyproject.toml reads it\n'


def test_notes_are_the_section_of_the_tag():
    assert notes("v0.2.0", LIBRARY, CHANGELOG) == "### Added\n\n- This.\n"


@pytest.mark.parametrize(
    ("tag", "changelog", "message"),
    [
        ("v0.2.1", CHANGELOG, "expected the tag v0.2.0, .* got v0.2.1"),
        ("0.2.0", CHANGELOG, "expected the tag v0.2.0, .* got 0.2.0"),
        ("v0.2.0", CHANGELOG.replace("] - 2026-11-23", "]"), r"expected a heading '## \[0.2.0\] - <date>'"),
    ],
)
def test_a_tag_without_a_section_is_refused(tag, changelog, message):
    with pytest.raises(SystemExit, match=message):
        notes(tag, LIBRARY, changelog)


def test_this_version_has_notes():
    assert notes(
        f"v{VERSION}", *((ROOT / name).read_text() for name in ("packing_ops/_runtime/library.py", "CHANGELOG.md"))
    )


def test_files_that_the_workflow_names_are_there():
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    scripts = re.findall(r"python ((?:tools|tests)/\w+\.py)", workflow)
    assert len(scripts) == 3
    assert all((ROOT / script).exists() for script in scripts)


def test_what_a_workflow_runs_is_named_by_its_contents():
    """A tag of an action, and a second index of packages, may have other contents tomorrow."""
    for path in (ROOT / ".github" / "workflows").iterdir():
        workflow = path.read_text()
        actions = re.findall(r"uses: (\S+)", workflow)
        assert actions
        assert [action for action in actions if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action)] == []
        assert "EXTRA_INDEX" not in workflow
        assert "extra-index" not in workflow


def test_tools_of_the_release_have_hashes():
    tomllib = pytest.importorskip("tomllib")
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["release"]
    lines = (ROOT / ".github" / "release-tools.txt").read_text().splitlines()
    pins = [re.fullmatch(r"([\w-]+)==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines if line[0] != "#"]
    assert all(pins)
    assert {re.match(r"[\w-]+", name)[0] for name in group} <= {pin[1] for pin in pins}
