"""An empty folder of results for the renderer."""

import csv

import pytest


@pytest.fixture
def results(tmp_path, monkeypatch):
    """An empty folder of results, and what writes a CSV there."""
    result_rows = pytest.importorskip("result_rows")
    monkeypatch.setattr(result_rows, "RESULTS", tmp_path)

    def write(name, rows):
        rows = [{"dtype": "bfloat16", "device": "GPU", "torch": "2", "commit": "abcdef012345", **row} for row in rows]
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, {name: "" for row in rows for name in row})
            writer.writeheader()
            writer.writerows(rows)

    return write
