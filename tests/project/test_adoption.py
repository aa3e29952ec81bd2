"""docs/adopt says what its patches are and what adoption.json recorded; tests/adoption/run.py makes the record."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "tests" / "adoption"))

import merge
import pages
import patches
import run
from projects import PROJECTS

PATCHES = [patch for project in PROJECTS.values() for patch in project.patches]
BEFORE = "one\ntwo\nthree\nfour\nfive\n"
AFTER = "one\n2\nthree\nfive\nsix\n"


@pytest.fixture
def checkout(tmp_path):
    """A repository of one file, and the same with the file edited."""
    stock, edited = tmp_path / "stock", tmp_path / "edited"
    for folder, text in ((stock, BEFORE), (edited, AFTER)):
        folder.mkdir()
        (folder / "a.py").write_text(BEFORE)
        patches.git("init", "-q", cwd=folder)
        patches.git("add", "a.py", cwd=folder)
        patches.git("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m", cwd=folder)
        (folder / "a.py").write_text(text)
    return stock, edited


def test_a_patch_holds_no_line_of_the_project_and_applies(checkout):
    stock, edited = checkout
    patch = patches.make(edited)
    assert not {"-two", "-four", " three", " one"} & set(patch.splitlines())
    assert [(file["deleted"], file["added"]) for file in patches.files(patch)] == [(2, 2)]
    assert patches.changed(patch, stock) == []
    patches.apply(patch, stock)
    assert (stock / "a.py").read_text() == AFTER


def test_a_patch_is_made_and_applied_from_the_command_line(checkout, tmp_path):
    stock, edited = checkout
    script = Path(patches.__file__)
    made = subprocess.run(
        [sys.executable, script, edited.name], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    (tmp_path / "a.patch").write_text(made.stdout)
    subprocess.run([sys.executable, script, "a.patch", stock.name], cwd=tmp_path, check=True)
    assert (stock / "a.py").read_text() == AFTER


def test_a_patch_of_some_files(checkout):
    _, edited = checkout
    (edited / "b.py").write_text(BEFORE)
    patches.git("add", "b.py", cwd=edited)
    patches.git("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m", "b.py", cwd=edited)
    (edited / "b.py").write_text(AFTER)
    assert [file["path"] for file in patches.files(patches.make(edited))] == ["a.py", "b.py"]
    assert [file["path"] for file in patches.files(patches.make(edited, "b.py"))] == ["b.py"]


def test_a_patch_refuses_another_file(checkout):
    stock, edited = checkout
    patch = patches.make(edited)
    (stock / "a.py").write_text(BEFORE.replace("two", "zwei"))
    assert patches.changed(patch, stock) == ["a.py"]
    with pytest.raises(ValueError, match=r"a\.py: expected blob"):
        patches.apply(patch.replace("\n+six", "\n+seven"), stock)


@pytest.mark.parametrize("name", PROJECTS)
def test_page_is_what_patch_and_record_make(name):
    text = (pages.DOCS / f"{name}.md").read_text()
    results = json.loads(pages.RESULTS.read_text())
    assert pages.page(name, text, results) == text, "python tests/adoption/pages.py writes it again"
    for part in ("sizes", "outcome", *(f"patch {patch}" for patch in PROJECTS[name].patches)):
        assert f"<!-- {part} -->" in text


@pytest.mark.parametrize("name", PATCHES)
def test_patch_holds_nothing_but_what_comes(name):
    patch = pages.patch_of(name)
    starts = ("diff --git ", "index ", "--- a/", "+++ b/", "@@ -", "+")
    assert [line for line in patch.splitlines() if not line.startswith(starts)] == []
    assert [line for line in patch.splitlines() if line.startswith("@@") and not line.endswith("@@")] == []


@pytest.mark.parametrize("name", PROJECTS)
def test_record_is_of_this_patch(name):
    result = json.loads(pages.RESULTS.read_text())[name]
    assert result["commit"] == PROJECTS[name].commit
    if "passed" in result:
        assert result["patches"] == {patch: pages.digest(pages.patch_of(patch)) for patch in PROJECTS[name].patches}
        assert result["failed"] == len(result["failures"])
        assert all(failure["why"] for failure in result["failures"])
    else:
        assert result["not_run"]


@pytest.mark.parametrize("name", [name for name, project in PROJECTS.items() if project.flag])
def test_without_its_flag_a_patch_changes_nothing(name):
    off = json.loads(pages.RESULTS.read_text())[name]["without_flag"]
    assert all(failure["why"].startswith("fails without the patch too") for failure in off["failures"])


@pytest.mark.parametrize("name", [name for name, project in PROJECTS.items() if project.training])
def test_every_way_of_a_training_run_has_the_same_losses(name):
    for ways in json.loads(pages.RESULTS.read_text())[name]["losses"].values():
        first, *others = ways.values()
        assert others
        assert len(set(first)) == len(first) > 1
        assert all(other == pytest.approx(first, rel=1e-5) for other in others)


@pytest.mark.skipif(not os.environ.get("CHECKOUTS"), reason="no CHECKOUTS given")
@pytest.mark.parametrize("name", PROJECTS)
def test_patch_applies(name, tmp_path):
    checkout = run.checkout_of(name, PROJECTS[name].repository, Path(os.environ["CHECKOUTS"]))
    if checkout is None:
        pytest.skip(f"no checkout of {PROJECTS[name].repository}")
    for patch in map(pages.patch_of, PROJECTS[name].patches):
        for file in patches.files(patch):
            (tmp_path / file["path"]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkout / file["path"], tmp_path / file["path"])
        patches.apply(patch, tmp_path)


def test_without_checkouts_every_project_is_skipped_with_its_reason(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "RESULTS", tmp_path / "adoption.json")
    monkeypatch.setattr(run.pages, "write", lambda: None)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("a process was started"))
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert run.main() == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].split() == ["host", "commit", "patch", "passed", "failed", "why"]
    assert [line.split()[0] for line in told[1:] if "not run, no checkout of " in line] == list(PROJECTS)


def test_a_missing_checkout_is_cloned_at_the_commit(monkeypatch, tmp_path, checkout):
    stock, _ = checkout
    first = patches.git("rev-parse", "HEAD", cwd=stock).strip()
    (stock / "a.py").write_text(AFTER)
    patches.git("-c", "user.name=n", "-c", "user.email=e", "commit", "-qam", "m", cwd=stock)
    monkeypatch.setattr(run, "HOST", f"file://{tmp_path}/")
    cloned = run.fetch("project", "stock", first, tmp_path / "checkouts")
    assert (cloned / "a.py").read_text() == BEFORE
    assert run.checkout_of("project", "owner/other", tmp_path / "checkouts") == cloned


def test_what_cannot_be_cloned_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "HOST", f"file://{tmp_path}/nothing/")
    found = run.examine("trl", tmp_path / "checkouts", fetched=True)
    assert found["not_run"].startswith("huggingface/trl was not cloned: fatal: ")
    assert not (tmp_path / "checkouts" / "trl").exists()


# --- on another commit ---


def test_a_patch_merges_onto_another_commit_or_its_hunk_is_named(checkout, tmp_path):
    stock, edited = checkout
    patch, commit = patches.make(edited), patches.git("rev-parse", "HEAD", cwd=stock).strip()
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "a.py").write_text("zero\n" + BEFORE)
    assert merge.merge([patch], stock, commit, moved) == (3, [])
    assert (moved / "a.py").read_text() == "zero\n" + AFTER
    (moved / "a.py").write_text(BEFORE.replace("two", "zwei"))
    assert merge.merge([patch], stock, commit, moved) == (3, ["a.py:2"])
    (moved / "a.py").unlink()
    assert merge.merge([patch], stock, commit, moved) == (3, ["a.py:2", "a.py:4", "a.py:5"])


def test_a_merge_needs_the_commit_of_the_patches(monkeypatch, capsys, checkout):
    stock, _ = checkout
    monkeypatch.setattr(run, "checkout_of", lambda *_: stock)
    monkeypatch.setattr(sys, "argv", ["merge.py", "--checkouts", str(stock), "trl"])
    monkeypatch.setattr(pages, "write", lambda: None)
    assert merge.main() == 0
    assert capsys.readouterr().out.startswith("trl: the checkout has no HEAD, or no f2cd57710ae3")


def test_the_table_of_merges_is_of_its_record():
    tried = json.loads(pages.MERGES.read_text())
    text = (pages.DOCS / "README.md").read_text()
    assert pages.filled(text, {"merges": pages.merges(tried)}) == text, "python tests/adoption/pages.py writes it again"
    assert all(each["conflicts"] or each.get("new", 0) == 0 for commits in tried.values() for each in commits)
