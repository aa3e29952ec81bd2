"""Result files of benchmarks/results, and how their figures are written."""

import csv
import functools
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from string import Formatter

RESULTS = Path(__file__).parent / "results"
REGION = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.S)
OURS, COPY = "packing_ops", "copy of the same bytes"


class Cell(str):
    """A cell of a CSV. With a format it is a number, or empty: "x" a ratio, "us" a time, ".1k" thousands, ".2ms" of a
    cell in microseconds, ".1GiB" of MiB and ".1bytes" of bytes in GiB, or one of Python's; "/" before it: one over the
    number, "1-": one less it.
    """

    def __format__(self, form: str) -> str:
        if not form or not self:
            return str(self)
        value = 1 / float(self) if form.startswith("/") else 1 - float(self) if form.startswith("1-") else float(self)
        form = form.removeprefix("/").removeprefix("1-")
        for unit, size in {"k": 1000, "ms": 1000, "GiB": 1024, "bytes": 2**30}.items():
            if form.endswith(unit):
                return f"{value / size:{form.removesuffix(unit)}f}" + "k" * (unit == "k")
        return {"x": times, "us": duration}.get(form, lambda value: format(value, form))(value)


class Span(list):
    """Numbers, written as the least and the most of them; as one where both look alike."""

    def __format__(self, form: str) -> str:
        ends = [format(Cell(value), form) for value in (min(self), max(self))]
        return " to ".join(dict.fromkeys(reversed(ends) if form.startswith("/") else ends))


class Case(dict):
    """Cells by name, where every name that it does not have is empty, and so are the cells of that."""

    def __missing__(self, name: str) -> "Absent":
        return Absent()


class Absent(Cell):
    def __getitem__(self, name) -> "Absent":
        return self


def size_of(cell: str) -> tuple:
    """What cells are sorted by: first those without a value, then numbers, then text."""
    return (1, float(cell)) if re.fullmatch(r"[\d.]+", cell) else (2 * bool(cell), cell)


@functools.cache
def is_like(text: str, pattern: str) -> bool:
    """Return whether the text is what a pattern of regions.toml describes."""
    if pattern.startswith("!"):
        return not is_like(text, pattern[1:])
    if pattern.startswith("<"):
        return bool(text) and float(text) < float(pattern[1:])
    either = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".").replace(r"\|", "|")
    return re.fullmatch(either, text, re.S) is not None


def matches(row: dict, where: dict) -> bool:
    return all(is_like(row[column], fill(pattern, row)) for column, pattern in where.items())


def value_of(row: dict, path: str):
    """The cell at a path such as of[packing_ops][p50_us], or the text of a template."""
    return fill(path, row) if "{" in path else Formatter().get_field(path, (), row)[0]


@functools.cache
def named(template: str) -> list[str]:
    return [name for _, name, *_ in Formatter().parse(template) if name]


def fill(template: str, row: dict) -> str:
    """The template with cells of a row; empty if it names cells and none of them has a value."""
    if "{" not in template and "}" not in template:
        return template
    values = [value_of(row, name) for name in named(template)]
    return template.format_map(row) if not values or any(value != "" for value in values) else ""


def read_rows(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return [{name: Cell(cell or "") for name, cell in row.items()} for row in csv.DictReader(file)]


def kept(load: Callable[[str, list[str]], list[dict]]) -> Callable[[str, list[str]], list[dict]]:
    """Keeps what a function makes of a file in RESULTS, for as long as the file is the same: pages have many regions
    of one file.
    """
    before: dict = {}

    def loaded(name: str, keys: list[str]) -> list[dict]:
        path = RESULTS / name
        if not path.exists():
            return load(name, keys)
        state = path, path.stat().st_mtime_ns, *keys
        if state not in before:
            before[state] = load(name, keys)
        return [dict(row) for row in before[state]]

    return loaded


def middle(rows: list[dict], column: str) -> list[dict]:
    """Of the repeats of each case the row with the median of a column, of an even number the lower middle one with the
    mean of both. It has cells more: how often the case ran, the least and the most of several runs, how far apart.
    """
    cases: dict = {}
    for i, row in enumerate(rows):
        cases.setdefault(row["case"] if row.get("repeat") else i, []).append(row)
    found = []
    for each in cases.values():
        runs = sorted((row for row in each if row[column]), key=lambda row: float(row[column])) or each
        span = Span(float(row[column]) for row in runs) if len(runs) > 1 else ""
        often, apart = (f"{len(runs)} times", str(max(span) / min(span) - 1)) if span else ("once", "")
        of_all = {"lowest": runs[0][column], "highest": runs[-1][column], "often": Cell(often), "span": span}
        of_all |= {column: Cell(median(span))} if span else {}
        found.append(runs[(len(runs) - 1) // 2] | of_all | {"apart": Cell(apart)})
    return found


def rows_before(path: Path) -> list[dict]:
    """The rows of a CSV; until it is there, those of the CSV of its name in benchmarks/results."""
    path = path if path.exists() else RESULTS / path.name
    return read_rows(path) if path.exists() else []


def with_row(rows: list[dict], row: dict) -> list[dict]:
    """The rows of a CSV with one more. The first repeat of a case takes the place of the rows that the case had."""
    before = [i for i, each in enumerate(rows) if each["case"] == row["case"]]
    if row["repeat"] > 1 or not before:
        return [*rows, row]
    return [row if i == before[0] else each for i, each in enumerate(rows) if i not in before[1:]]


def table(names: list[str], cells: list[list[str]], empty: str = "") -> str:
    """A Markdown table. empty: what stands in a cell without a value; then a column of such cells is left out."""
    shown = [i for i in range(len(names)) if not empty or any(line[i] for line in cells)]
    text = "\n".join(f"| {' | '.join(line[i] or empty for i in shown)} |" for line in cells)
    header = f"| {' | '.join(names[i] for i in shown)} |\n|{'---|' * len(shown)}\n"
    return header + text


def machine(rows: list[dict]) -> str:
    """What figures were measured on."""
    device, torch = (", ".join(sorted({row[name] for row in rows})) for name in ("device", "torch"))
    return f"{device}, torch {torch}"


def origin(rows: list[dict]) -> str:
    """Where figures come from."""
    return f"{machine(rows)}, commit {commits(rows)}"


def commits(rows: list[dict]) -> str:
    return ", ".join(dict.fromkeys(row["commit"][:7] for row in rows))


def sections(page: str, link: str = "") -> list[tuple[str, list[str]]]:
    """A link to each section of a page, and the regions in it. link: the page, as another page reaches it."""
    found = []
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        heading = section.partition("\n")[0]
        anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        found.append((f"[{heading}]({link}#{anchor})", [name for _, name, *_ in REGION.findall(section)]))
    return found


def sources(figures: Iterable[tuple[str, dict]]) -> str:
    """A line for each file behind (section, row): its sections, machine, torch and commits."""
    files: dict = {}
    for section, row in figures:
        if row.get("commit"):
            files.setdefault(row["file"], []).append((section, row))
    lines = []
    for name, each in files.items():
        links, rows = ", ".join(dict.fromkeys(section for section, _ in each)), [row for _, row in each]
        lines.append([f"[{name}](benchmarks/results/{name})", links, machine(rows), commits(rows)])
    return table(["file", "its figures", "measured on", "commit"], lines)


def duration(microseconds) -> str:
    value = float(microseconds)
    return f"{value:.1f} us" if value < 1000 else f"{value / 1000:.2f} ms"


def times(value) -> str:
    """A ratio in three digits or so."""
    return f"{float(value):.{0 if float(value) >= 20 else 1 if float(value) >= 4 else 2}f}"


def prose(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def shared_words(texts: list[str], pattern: str) -> list[str]:
    """Words such as D=128, which say enough without the others, that all of several texts have."""
    words = [text.split(" ") for text in texts]
    named = [word for word in words[0] if re.search(pattern, word)]
    return [word for word in named if len(texts) > 1 and all(word in each for each in words)]


def lengths_of(name: str) -> list[int]:
    return json.loads((Path(__file__).parent / "workloads.json").read_text())["workloads"].get(name, [])


def sft_lengths() -> list[dict]:
    """How long documents of sft lengths are, and what share of batches of 8 and of 32 is padding, as they come and
    sorted.
    """
    lengths, padding = lengths_of("sft"), []
    for size, each in itertools.product((8, 32), (lengths, sorted(lengths))):
        batches = [each[i : i + size] for i in range(0, len(each), size)]
        padding.append(1 - sum(lengths) / sum(len(batch) * max(batch) for batch in batches))
    found = {"documents": len(lengths), "shortest": min(lengths), "longest": max(lengths), "median": median(lengths)}
    slots = 1 / (1 - padding[0])  # for each token of a document
    found |= {"mean": sum(lengths) / len(lengths), "slots": slots}
    return [found | dict(zip(("padding", "padding_sorted", "padding_32", "padding_sorted_32"), padding, strict=True))]


def workload(name: str) -> str:
    """How many documents of which lengths workloads.json has under a name."""
    lengths = lengths_of(name)
    if len({*lengths}) < 2:
        return f"{name}: {len(lengths)} x {lengths[0]:,}" if lengths else ""
    return f"{name}: {len(lengths)}, median {median(lengths):.0f}, longest {max(lengths):,}"


def prefix_trees() -> list[dict]:
    """Tokens and visible pairs of samples that repeat their prompt, over those of a tree."""
    rows, pairs_of = [], lambda tokens: tokens * (tokens + 1) // 2
    for answers, prompt, answer in ((8, 8192, 1024), (8, 2048, 2048), (8, 1024, 8192), (64, 1024, 256), (2, 1024, 256)):
        tokens = answers * (prompt + answer) / (prompt + answers * answer)
        pairs = answers * pairs_of(prompt + answer)
        pairs /= pairs_of(prompt) + answers * (pairs_of(answer) + answer * prompt)
        rows.append({"answers": answers, "prompt": prompt, "answer": answer, "tokens": tokens, "pairs": pairs})
    return rows
