"""The pages build, their links lead somewhere, their Python runs, and their figures are from result files."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT

import packing_ops as po

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "csrc/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
MEASURED = re.compile(r"\d\s?(us|ms|GiB|MiB|GB/s|TFLOPS?|tokens per second)\b|\d\.\d+x\b|\d% (of copy|faster|slower)")
RUN_BY = {  # pages with blocks of Python
    "docs/data.md": "test_examples.py",
    "docs/decoder.md": "test_examples.py",
    "docs/layers-with-a-state.md": "test_examples.py",
    "docs/losses.md": "test_examples.py",
    "docs/megatron.md": "test_examples.py",
    "docs/ops.md": "test_examples.py",
    "docs/same-bits-details.md": "test_examples.py",
    "docs/same-bits.md": "test_examples.py",
}
FOLDERS = "benchmarks|csrc|docs|examples|packing_ops|tests|tools"


def name_of(path):
    return str(path.relative_to(ROOT))


def prose_of(page):
    """Without blocks of code and what is quoted."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors_of(page):
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def wrong_links(page, root=ROOT):
    wrong = []
    for link, anchor in LINK.findall(prose_of(page)):
        if link.startswith("https://"):
            continue
        target = (page.parent / link).resolve() if link else page
        there = target.is_file() and target.is_relative_to(root)
        if not there or (anchor and anchor not in anchors_of(target)):
            wrong.append(f"{link}#{anchor}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    assert wrong_links(page) == []


def rows_of_design(start):
    rows = [row for row in (ROOT / "docs" / "design.md").read_text().splitlines() if row.startswith(start)]
    return len(rows), {name for row in rows for name in re.findall(r"`(?:\w+/)*(\w+\.py)`", row)}


def files_with(pattern, folder):
    texts = {path.name: path.read_text() for path in folder.rglob("*.py") if path.name != "__init__.py"}
    return {name for name, text in texts.items() if re.search(pattern, re.sub(">>>.*", "", text))}


def test_design_leads_to_every_list_of_contributing():
    lists = {anchor for anchor in anchors_of(ROOT / "CONTRIBUTING.md") if anchor.startswith("add-a")}
    assert {"add-an-op", "add-an-architecture"} <= lists
    assert lists <= {anchor for _, anchor in LINK.findall((ROOT / "docs" / "design.md").read_text())}


def test_design_names_the_files_that_name_trl():
    count, named = rows_of_design("| a name that a host library changed")
    found = files_with(r"(?<!integrations\.)\btrl(\.|_data_utils\(\))", ROOT / "packing_ops" / "integrations" / "trl")
    assert count == 1
    assert "packing.py" in found
    assert found <= named


def test_design_names_the_files_that_cut_labels_at_documents():
    count, named = rows_of_design(("| labels of documents", "| the same of"))
    folders = [ROOT / "packing_ops" / name for name in ("data", "parallel", "integrations", "contrib")]
    found = set.union(*(files_with(r"\b(mask_boundary_labels|shift_labels)\(", folder) for folder in folders))
    assert count == 3
    assert {"padding_free.py", "sharding.py"} <= found
    assert found <= named


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_pages_name_are_there(page):
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]+)(?:::\w+)?`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists() and page.parent.name != "adopt"] == []


def test_the_link_check_sees_what_is_missing(tmp_path):
    (tmp_path / "b.md").write_text("# A heading\n```\n# none\n```\n")
    page = tmp_path / "a.md"
    page.write_text("[a](b.md#a-heading) [b](b.md) [e](https://example.org) `[quoted](nowhere)`")
    assert wrong_links(page, tmp_path) == []
    page.write_text("[a](c.md) [b](b.md#none) [c](../outside.md) [d](#here)")
    assert wrong_links(page, tmp_path) == ["c.md#", "b.md#none", "../outside.md#", "#here"]


def test_every_page_is_reached_from_the_readme():
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached:
            reached.add(page)
            ahead += [
                (page.parent / link).resolve() for link, _ in LINK.findall(prose_of(page)) if link.endswith(".md")
            ]
    assert [name_of(page) for page in PAGES if page not in reached] == []


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_python_of_the_pages_is_run():
    found = {name_of(page) for page in PAGES if "```python" in page.read_text()}
    assert found == set(RUN_BY)
    for page, test in RUN_BY.items():
        assert Path(page).name in (ROOT / "tests" / "examples" / test).read_text()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_measured_figures_come_from_result_files(page):
    written = re.sub(r"<!-- (results|api): .*?<!-- end -->", "", page.read_text(), flags=re.S)
    assert [match[0] for match in MEASURED.finditer(written)] == []


def test_errors_of_the_page_are_raised():
    labels, cu_seqlens = torch.zeros(5, dtype=torch.int64), torch.tensor([0, 2, 5], dtype=torch.int32)
    raised = []
    for call in (
        lambda: po.shift_labels(labels, torch.tensor([0, 3, 2], dtype=torch.int32)),
        lambda: po.shift_labels(labels.float(), cu_seqlens),
        lambda: po.shift_labels(labels, [0, 2, 5]),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        raised.append(f"{caught.type.__name__}: {caught.value}")
    page = (ROOT / "docs" / "errors-and-env.md").read_text()
    assert [f"    {text}\n" in page for text in raised] == [True] * 3, raised


def test_what_the_page_says_of_failed_installs_is_what_the_code_says():
    python = [path for folder in ("packing_ops", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]
    sources = [ROOT / "setup.py", *python, ROOT / "csrc" / "host" / "launch.cpp", ROOT / "csrc" / "core" / "launch.cu"]
    said = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in sources))
    _, after = (ROOT / "docs" / "install.md").read_text().split("## When it fails")
    table, *_ = after.split("\n## ")
    quoted = [quote for cell in re.findall(r"^\| (.*?) \|", table, re.M) for quote in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) >= 10
    parts = [part.strip() for quote in quoted for part in re.split(r"\.\.\.", quote)]
    assert [part for part in parts if part and part not in said] == []


def test_the_api_pages_are_what_the_docstrings_say():
    api_pages = pytest.importorskip("tools.api_pages", reason="needs griffe", exc_type=ImportError)
    for page in api_pages.PAGES:
        assert api_pages.rewritten(page.read_text()) == page.read_text(), f"{page.name}: make api writes it again"


def test_an_api_page_shows_signature_arguments_example_and_errors():
    api_pages = pytest.importorskip("tools.api_pages", reason="needs griffe", exc_type=ImportError)
    region = "<!-- api: packing_ops.shift_labels -->\n{}<!-- end -->"
    text = api_pages.rewritten(region.format("another docstring\n"))
    assert text == api_pages.rewritten(region.format("")) != region.format("")
    for part in (
        "### shift_labels\n\n```py\nshift_labels(",
        "- `labels`: ",
        "```pycon\n>>> ",
        "- `ValueError`: ",
        "- **Memory**: ",
    ):
        assert part in text


def test_the_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run([str(c) for c in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "excluded from the built site" not in done.stderr
    text = (tmp_path / "site" / "api" / "packing_ops.html").read_text()
    assert 'id="varlen_attention"' in text
    assert "&gt;&gt;&gt;" in text
    assert (tmp_path / "site" / "repository" / "examples" / "first" / "sft_trl.py").is_file()
