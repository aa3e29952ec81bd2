"""README.md says what the result files say: benchmarks/readme.py."""

import csv
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import readme
import readme_ops
import readme_training
import result_rows

README = readme.README.read_text()


def test_readme_says_what_the_result_files_say():
    text, changed = readme.rewritten(README)
    assert changed == [], "make readme"
    assert text == README


def test_every_table_stands_in_readme_once():
    assert sorted(match[2] for match in readme.REGION.finditer(README)) == sorted(readme.TABLES)


def test_another_figure_is_noticed_and_put_right():
    wrong = README.replace("| packed, ffd | 816 |", "| packed, ffd | 815 |")
    assert wrong != README
    assert readme.rewritten(wrong) == (README, ["docstrings"])


@pytest.fixture
def results(tmp_path, monkeypatch):
    """An empty folder of results, and what writes a CSV there."""
    monkeypatch.setattr(result_rows, "RESULTS", tmp_path)

    def write(name, rows):
        rows = [{"dtype": "bfloat16", "device": "GPU", "torch": "2", "commit": "abcdef012345", **row} for row in rows]
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, {name: "" for row in rows for name in row})
            writer.writeheader()
            writer.writerows(rows)

    return write


def test_attention_shows_who_was_measured_and_where_ours_is_behind(results):
    long16k, large = "long16k: T=65536 docs=4 heads=32/8 D=128 causal", "mid4k: T=65536 docs=16 heads=32/8 D=64 causal"
    figures = [
        ("varlen_attention", long16k, {"packing_ops": 1, readme_ops.FLASH_2: 1.03, readme_ops.FLASH_3: 0.56}),
        ("varlen_attention_backward", long16k, {"packing_ops": 1, readme_ops.FLASH_2: 1.07}),
        ("varlen_attention", large, {"packing_ops": 1, readme_ops.FLASH_2: 0.96}),
        ("varlen_attention_backward", large, {"packing_ops": 1}),
    ]
    results("attention_cuda", [
        {"op": op, "shape": shape, "provider": provider, "p50_us": 1000, "ratio_to_ours": ratio, "sm_mhz": 1500 + i}
        for i, (op, shape, providers) in enumerate(figures) for provider, ratio in providers.items()
    ])  # fmt: skip
    table = readme_ops.attention()
    assert "| long16k: 4 x 16,384 | 1.00 | 1.03 | 0.56 | 1.00 | 1.07 |" in table
    assert "Flex" not in table
    assert "commit abcdef0, multiprocessors at 1,500 to 1,501 MHz" in table
    assert readme_ops.attention_slower().splitlines()[2:] == ["| mid4k, 32/8 heads, D=64 | 1.00 | 0.96 | 1.00 |"]


def test_models_are_compared_with_ours_of_the_same_kind(results):
    ours, flash = "packing_ops", readme_training.FLASH
    layers = readme_training.LAYERS
    speeds = {ours: 90, flash: 60, f"{ours}, {layers}": 110, f"{flash}, {layers}": 100}
    results("e2e_cuda", [
        {"provider": name, "tokens": 10, "documents": 2, "tokens_per_second": speed, "peak_gib": 1, "loss": 5}
        for name, speed in speeds.items()
    ])  # fmt: skip
    rows = [[cell.strip() for cell in line.split("|")] for line in readme_training.e2e().splitlines()[2:6]]
    assert [(row[1], row[4]) for row in rows] == [
        ("packing_ops, rows of 8,192", ""),
        ("packed, torch's FlashAttention-2", "1.50"),
        ("**each layer under torch.compile:** packing_ops", ""),
        ("packed, torch's FlashAttention-2", "1.10 (compiled)"),
    ]
