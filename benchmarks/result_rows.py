"""Result files of benchmarks/results, and how their figures are written."""

import csv
import textwrap
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
BEFORE_OVERLAP = ("163c9ab",)  # commits of results/parallel_cuda.csv in which attention waited for all that it sends
OURS, COPY = "packing_ops", "copy of the same bytes"
PERCENT_OF_COPY = (
    "Percent of copy: the time of a copy that reads and writes as many bytes, in the same run, over that of ours."
)


def rows_of(name: str) -> list[dict]:
    return read_rows(RESULTS / f"{name}.csv")


def read_rows(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def without_overlap(rows: list[dict]) -> str:
    """What a page says of rows of BEFORE_OVERLAP."""
    if not any(row["commit"] in BEFORE_OVERLAP for row in rows):
        return ""
    return (
        " Attention is of a commit in which it waited for all that it sends: since then the heads travel in parts beside it, "
        "which is not measured on several GPUs yet."
    )


def is_measured(name: str) -> bool:
    return (RESULTS / f"{name}.csv").exists()


def cases_of(rows: list[dict]) -> dict[tuple, dict[str, dict]]:
    """{(op, shape, dtype): {provider: row}}, ours first."""
    cases = {}
    for row in rows:
        cases.setdefault((row["op"], row["shape"], row["dtype"]), {})[row["provider"]] = row
    return cases


def percent_of_copy(providers: dict[str, dict]) -> float | None:
    """What PERCENT_OF_COPY says, of a case of ``cases_of``; None where no copy was timed."""
    ours, *_ = providers.values()
    return 100 * float(providers[COPY]["p50_us"]) / float(ours["p50_us"]) if COPY in providers else None


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def origin(rows: list[dict]) -> str:
    """Where figures come from."""
    device, torch = (", ".join(sorted({row[name] for row in rows})) for name in ("device", "torch"))
    return f"{device}, torch {torch}, commit {commits(rows)}"


def commits(rows: list[dict]) -> str:
    return ", ".join(dict.fromkeys(row["commit"][:7] for row in rows))


def duration(row: dict) -> str:
    microseconds = float(row["p50_us"])
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{microseconds / 1000:.2f} ms"


def times(value) -> str:
    """A ratio in three digits or so."""
    return f"{float(value):.{0 if float(value) >= 20 else 1 if float(value) >= 4 else 2}f}"


def prose(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)
