"""The figures of README.md and docs/, from benchmarks/results: python benchmarks/render.py [--check]

regions.toml describes what stands between ``<!-- results: NAME -->`` and ``<!-- end -->``; --check changes nothing and
fails where it is something else.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median

import result_rows
import tomllib
from result_rows import OURS, REGION, Case, Cell, Span, fill, is_like, matches, named, size_of, value_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SPEC = tomllib.loads((ROOT / "benchmarks" / "regions.toml").read_text())

# Rows =================================================================================================================


@result_rows.kept
def loaded(name: str, keys: list[str]) -> list[dict]:
    """The rows of a file with the cells that [files] gives them; of a JSON, what is below the keys."""
    path = result_rows.RESULTS / name
    if name in COUNTED:
        rows = COUNTED[name]()
    elif path.suffix == ".csv":
        rows = result_rows.read_rows(path)
        if name in SPEC["repeats"]:
            rows = result_rows.middle(rows, SPEC["repeats"][name])
    else:
        whole = json.loads(path.read_text(), parse_float=Cell, parse_int=Cell)
        found = {key: value_of(whole, key) for key in keys} or {"": whole}
        lists = {key: each if isinstance(each, list) else [each] for key, each in found.items()}
        rows = [{**whole, "key": key, **row} for key, each in lists.items() for row in each]
    rows, cells = [{"file": name, "stem": path.stem, **row} for row in rows], SPEC["files"].get(name, {})
    return with_cells(rows, SPEC["files"][cells["like"]] if "like" in cells else cells)


def with_cells(rows: list[dict], cells: dict) -> list[dict]:
    for name, cell in cells.items():
        for row, value in zip(rows, [*column_of(rows, cell)], strict=True):
            row[name] = Cell(value)
    return rows


def column_of(rows: list[dict], cell: dict | str) -> Iterator:
    """The values of a column that the file does not have, a row after the other."""
    if isinstance(cell, str):
        yield from (fill(cell, row) for row in rows)
    elif "same" in cell:
        yield from compared(rows, cell)
    else:
        for row in rows:
            value = value_of(row, cell["of"])
            if "to" in cell:
                yield re.sub(cell["match"], cell["to"], value)
            elif "match" in cell:
                yield next(iter(re.findall(cell["match"], value)), "")
            elif "by" in cell:
                yield WORDS[cell["by"]](value)
            else:
                texts = (text for pattern, text in cell["is"].items() if is_like(value, fill(pattern, row)))
                yield fill(next(texts, value), row)


def compared(rows: list[dict], cell: dict) -> Iterator:
    """A value of the row ``at``, or of each itself; over that of the row ``over``, or over its column ``per``."""
    at, over = picked(rows, cell, "at"), picked(rows, cell, "over")
    for row in rows:
        value = value_of(at(row), cell["of"])
        if "per" in cell or "over" in cell:
            base = row[cell["per"]] if "per" in cell else value_of(over(row), cell["of"])
            value = float(value) / float(base) if float(value or 0) and base else ""
        yield value


def picked(rows: list[dict], cell: dict, which: str) -> Callable[[dict], dict]:
    """What gives, of the rows of the same key, the one that a filter finds: the only one, or the one with the most."""
    if which not in cell:
        return lambda row: row
    key = lambda row: tuple(row[column] for column in cell["same"])  # noqa: E731
    rows = [row for row in in_order(rows, [cell["most"]] if "most" in cell else []) if matches(row, cell[which])]
    found = {key(row): row for row in rows}
    if len(found) < len(rows) and "most" not in cell:
        raise ValueError(f"regions.toml: {which} = {cell[which]} finds several rows of one {cell['same']}; add most")
    return lambda row: found.get(key(row), Case())


def selected(block: dict) -> list[dict]:
    """The rows of a block: those of its files and lines that it asks for, in its order, with its cells."""
    rows = []
    for i, line in enumerate(block.get("lines", [{}])):
        files = line.get("file", block.get("file"))
        where = block.get("where", {}) | {name: each for name, each in line.items() if name not in ("file", "label")}
        for file in [files] if isinstance(files, str) else files:
            found = [row for row in loaded(file, block.get("rows", [])) if matches(row, where)]
            rows += [{"label": line.get("label"), "line": Cell(i), **row} for row in found]
    for column, labels in block.get("labels", {}).items():
        rows = labelled(rows, column, labels)
    rows = with_cells(rows, block.get("cells", {}))
    if "keep" in block:
        same = lambda row: tuple(row[column] for column in block["keep"]["same"])  # noqa: E731
        kept = {same(row) for row in rows if any(matches(row, each) for each in block["keep"]["any"])}
        rows = [row for row in rows if same(row) in kept]
    return in_order(rows, block.get("sort", []))


def labelled(rows: list[dict], column: str, labels: dict | list) -> list[dict]:
    """The rows that have a label, in the order of the labels, which may stand in groups."""
    labels = {label: label for label in labels} if isinstance(labels, list) else labels
    groups, found = labels if all(isinstance(each, dict) for each in labels.values()) else {"": labels}, []
    for group, each in groups.items():
        for value, label in each.items():
            found += [row | {column: Cell(label), "was": value, "group": group} for row in rows if row[column] == value]
    return found


def in_order(rows: list[dict], columns: list[str]) -> list[dict]:
    """Rows by columns: "-x" the largest first, "~x" in the order of first appearance."""
    before = rows
    for name in reversed(columns):
        column = name.lstrip("-~")
        if name.startswith("~"):
            seen = [row[column] for row in before]
            rows = sorted(rows, key=lambda row: seen.index(row[column]))
        else:
            rows = sorted(rows, key=lambda row: size_of(row[column]), reverse=name.startswith("-"))
    return rows


def cases_of(rows: list[dict], block: dict) -> list[dict]:
    """A line for each case, in which of[PROVIDER] is the row of a provider."""
    by, found = block.get("by", "provider"), {}
    for row in rows:
        case = found.setdefault(tuple(row[column] for column in block["case"]), {None: []})
        case[None].append(row)
        case.setdefault(row.get(by, ""), []).append(row)

    def together(rows: list[dict]) -> dict:
        return rows[0] | {name: figure_of(rows, each, {}) for name, each in block.get("stats", {}).items()}

    lines = [{name: together(rows) for name, rows in case.items()} for case in found.values()]
    return with_cells([line.pop(None) | {"of": Case(line)} for line in lines], block.get("line_cells", {}))


COUNTED = {"prefix trees": result_rows.prefix_trees, "sft lengths": result_rows.sft_lengths}  # not measured
WORDS = {"workload": result_rows.workload}

# Text =================================================================================================================

STATS = {
    "sum": sum, "min": min, "max": max, "median": median, "mean": mean, "count": len, "span": Span,
    "spread": lambda values: max(values) - min(values), "ratio": lambda values: values[0] / values[1] if len(values) > 1 else "",
}  # fmt: skip


def figure_of(rows: list[dict], figure: dict, figures: dict):
    """A statistic of a column or of other figures, or a text of each row."""
    rows = loaded(figure["file"], []) if "file" in figure else rows
    rows = [row for row in rows if matches(row, figure.get("where", {}))]
    if "each" in figure:
        return figure.get("between", ", ").join(dict.fromkeys(fill(figure["each"], row) for row in rows))
    rows, paths = (rows, [figure["of"]]) if isinstance(figure["of"], str) else ([figures], figure["of"])
    values = [float(value) for row in rows for value in (value_of(row, path) for path in paths) if value != ""]
    result = STATS[figure["stat"]](values) if values else ""
    result = result if isinstance(result, Span) else Cell(result)
    return next(column_of([{**figures, "value": result}], {**figure, "of": "value"})) if "is" in figure else result


def figures_of(rows: list[dict], block: dict) -> dict:
    """Cells of the first row, and the figures that a block describes."""
    names = dict(rows[0])
    if "device" in names:
        names |= {each.__name__: each(rows) for each in (result_rows.machine, result_rows.origin, result_rows.commits)}
    for name, figure in block.get("figures", {}).items():
        names[name] = figure_of(rows, figure, names)
    return names


def said(pieces: list, names: dict, rows: list[dict]) -> str:
    """Sentences that have all figures, and a row that meets their condition; "- " begins a line."""
    lines = [""]
    for piece in pieces:
        text, condition = (piece["text"], piece["if"]) if isinstance(piece, dict) else (piece, {})
        if any(matches(row, condition) for row in rows) and all(value_of(names, each) != "" for each in named(text)):
            lines += [""] if text.startswith("- ") else []
            lines[-1] += f" {text.format_map(names)}"
    return "\n".join(filter(None, map(result_rows.prose, lines)))


def with_shape(block: dict) -> dict:
    shape = with_shape(SPEC["shapes"][block["like"]]) if "like" in block else {}
    cells, here = shape.get("cells", {}), block.get("cells", {})
    return {**shape, **block, "cells": {name: cells[name] for name in cells if name not in here} | here}


def text_of(block: dict) -> str:
    """A paragraph, a table with a caption and a note, or a table for each value of a column."""
    if "page" in block:
        sections = result_rows.sections((ROOT / block["page"]).read_text(), block.get("link", ""))
        return result_rows.sources((link, row) for link, each in sections for name in each for row in rows_behind(name))
    rows = selected(block := with_shape(block))
    if not rows:
        return block.get("none", "")
    names, lines = figures_of(rows, block), cases_of(rows, block) if "case" in block else rows
    caption, note = (said(block.get(which, []), names, rows) for which in ("caption", "note"))
    tables = tables_of(lines, block, names) if "columns" in block else []
    return "\n\n".join(filter(None, [caption, *tables, note]))


def tables_of(lines: list[dict], block: dict, names: dict) -> Iterator[str]:
    """A table for each value of a column, between its title and its foot, or one for each figure of all providers."""
    if "providers" not in block:
        for each in split(lines, block.get("tables")):
            yield fill(block.get("title", ""), each[0])
            yield table_of(each, block, names)
        return
    shared = result_rows.shared_words([line["label"] for line in lines], "=")
    for line in lines:
        line["label"] = " ".join(word for word in line["label"].split(" ") if word not in shared).rstrip(",")
    for figure, cell, wanted in block["providers"]:
        providers = dict.fromkeys(name for line in lines for name in [OURS, *line["of"]] if is_like(name, wanted))
        columns = block["columns"] + [[name, cell.replace("PROVIDER", name)] for name in providers]
        words = {"figure": ", ".join(filter(None, [figure, " ".join(shared)]))}
        yield table_of(lines, block | {"columns": columns}, names | words)


def split(rows: list[dict], column: str | None) -> list[list[dict]]:
    """The rows of each value of a column."""
    values = dict.fromkeys(row[column] for row in rows) if column else [None]
    return [[row for row in rows if not column or row[column] == value] for value in values]


def table_of(lines: list[dict], block: dict, names: dict) -> str:
    found = [[fill(cell, names) for cell in line] for line in block.get("written", [])] or [
        [fill(cell, names | line) or "".join(empty) for _, cell, *empty in block["columns"]] for line in lines
    ]
    heads = [fill(head, names | lines[0]) for head, *_ in block["columns"]]
    return result_rows.table(heads, found, block.get("empty", ""))


def rows_behind(name: str) -> Iterator[dict]:
    """The rows that a region shows or counts."""
    for block in map(with_shape, SPEC["regions"][name]):
        if "page" not in block:
            yield from selected(block)
            for figure in block.get("figures", {}).values():
                if "file" in figure:
                    yield from (row for row in loaded(figure["file"], []) if matches(row, figure.get("where", {})))


def made(name: str) -> str:
    """What a page has between the marks of a region; where a file is missing, the command that writes it."""
    try:
        return "\n\n".join(filter(None, map(text_of, SPEC["regions"][name])))
    except FileNotFoundError as missing:
        stem = Path(missing.filename).stem.removesuffix("_cuda").removesuffix("_cpu")
        return f"Not run yet: `benchmarks/{SPEC['commands'].get(stem, f'bench_{stem}.py')}`."
    except KeyError as missing:
        raise KeyError(f"regions.toml, {name}: {missing} is no column, figure or key there") from missing


def rewritten(text: str, page: Path) -> tuple[str, list[str]]:
    """The text of a page with today's figures, and the regions that had others."""
    changed = []
    results = os.path.relpath(ROOT / "benchmarks" / "results", page.parent)

    def replace(match: re.Match) -> str:
        begin, name, before, end = match.groups()
        after = f"{made(name)}\n".replace("](benchmarks/results/", f"]({results}/")  # as the page reaches them
        changed.extend([name] * (after != before))
        return begin + after + end

    return REGION.sub(replace, text), changed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check, stale = parser.parse_args().check, []
    for page in PAGES:
        text, changed = rewritten(page.read_text(), page)
        if changed:
            stale.append(f"{page.relative_to(ROOT)}: {'stale' if check else 'rewritten'}: {', '.join(changed)}")
        if changed and not check:
            page.write_text(text)
    print("\n".join(stale) or "README.md and docs: are what benchmarks/results says")
    if stale and check:
        sys.exit("make readme writes them again")


if __name__ == "__main__":
    main()
