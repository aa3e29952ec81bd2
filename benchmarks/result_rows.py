"""Result files of benchmarks/results, and how their figures are written."""

import csv
import json
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
BEFORE_OVERLAP = ("163c9ab",)  # commits of results/parallel_cuda.csv in which attention waited for all that it sends
OURS, COPY = "packing_ops", "copy of the same bytes"
PERCENT_OF_COPY = (
    "Percent of copy: the time of a copy that reads and writes as many bytes, in the same run, over that of ours."
)


class Cell(str):
    """A cell of a CSV. With a format it is a number, or empty: "x" a ratio, "us" a time, ".1k" thousands, ".2ms" and
    ".1GiB" of a cell in microseconds and in MiB, or one of Python's; with "/" before it one over the number.
    """

    def __format__(self, form: str) -> str:
        if not form or not self:
            return str(self)
        value = 1 / float(self) if form.startswith("/") else float(self)
        form = form.removeprefix("/")
        for unit, size in {"k": 1000, "ms": 1000, "GiB": 1024}.items():
            if form.endswith(unit):
                return f"{value / size:{form.removesuffix(unit)}f}" + "k" * (unit == "k")
        return {"x": times, "us": duration}.get(form, lambda value: format(value, form))(value)


class Case(dict):
    """Cells by name, where every name that it does not have is empty, and so are the cells of that."""

    def __missing__(self, name: str) -> "Absent":
        return Absent()


class Absent(Cell):
    def __getitem__(self, name) -> "Absent":
        return self


def rows_of(name: str) -> list[dict]:
    return read_rows(RESULTS / f"{name}.csv")


def read_rows(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return [{name: Cell(cell or "") for name, cell in row.items()} for row in csv.DictReader(file)]


def without_overlap(rows: list[dict]) -> str:
    """What a page says of rows of BEFORE_OVERLAP."""
    if not any(row["commit"] in BEFORE_OVERLAP for row in rows):
        return ""
    return f" At {', '.join(BEFORE_OVERLAP)} attention waited for all that it sends; since then the heads travel in parts beside it."


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


def table(header: str, lines: Iterable[str], note: str = "", empty: str = "") -> str:
    """A Markdown table of lines of cells, "a | b", and a paragraph below it. empty: what stands in a cell
    without a value; then a column of such cells is left out.
    """
    names, cells = header.split(" | "), [line.split(" | ") for line in lines]
    shown = [i for i in range(len(names)) if not empty or any(line[i] for line in cells)]
    text = "\n".join(f"| {' | '.join(line[i] or empty for i in shown)} |" for line in cells)
    header = f"| {' | '.join(names[i] for i in shown)} |\n|{'---|' * len(shown)}\n"
    return header + text + (note and f"\n\n{prose(note)}")


def by_row(rows: list[dict], header: str, line: str, note: str = "{origin}.", used=(), empty: str = "") -> str:
    """A line for each row, in which {name} is a cell of it; in the note it is one of the first row."""
    said = note and note.format(**rows[0], origin=origin(used or rows), commits=commits(used or rows))
    return table(header, (line.format_map(row) for row in rows), said, empty)


def span(form: Callable, values: Iterable) -> str:
    """ "least to most", or one of them where both are written alike."""
    values = sorted(map(float, values))
    return " to ".join(dict.fromkeys((form(values[0]), form(values[-1]))))


def json_of(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def origin(rows: list[dict]) -> str:
    """Where figures come from."""
    device, torch = (", ".join(sorted({row[name] for row in rows})) for name in ("device", "torch"))
    return f"{device}, torch {torch}, commit {commits(rows)}"


def commits(rows: list[dict]) -> str:
    return ", ".join(dict.fromkeys(row["commit"][:7] for row in rows))


def duration(microseconds) -> str:
    value = float(microseconds)
    return f"{value:.1f} us" if value < 1000 else f"{value / 1000:.2f} ms"


def times(value) -> str:
    """A ratio in three digits or so."""
    return f"{float(value):.{0 if float(value) >= 20 else 1 if float(value) >= 4 else 2}f}"


def prose(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def failed(error: str) -> str:
    return "out of memory" if "OutOfMemory" in error else "fails"
