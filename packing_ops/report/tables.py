"""The report as tables: drawn by rich where rich is installed, otherwise plain; and the progress of reading."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WIDTH = 110  # of a terminal, or a file
_NOTED = {"empty": "empty, left out", "no target": "without a target (labels all ignored, no answer), kept"}
_BATCHES = {"padded": "padded", "length_grouped": "grouped by length", "padding_free": "padding-free"}


def printable(text: str, most: int | None = None) -> str:
    """Return ``text`` on one line, with control characters escaped as in Python's strings.

    Example:
        >>> print(printable("grün\\x1b[2J\\n"), printable("one hundred", most=3))
        grün\\x1b[2J\\n one...
    """
    if most is not None and len(text) > most:
        text = text[:most] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show_report(report: dict[str, Any]) -> None:
    """Print a make_report result to stdout: what follows from it, then every table."""
    settings, examples = report["settings"], report["examples"]
    _heading(conclusion(report), "bold")
    if in_bytes := report["in_bytes"]:
        which = "" if in_bytes == examples["documents"] else f" OF {in_bytes:,} OF {examples['documents']:,} DOCUMENTS"
        _heading(
            f"LENGTHS{which} ARE BYTES, NOT TOKENS, and the capacity of {settings['capacity']:,} is too: --tokenizer "
            "counts tokens.",
            "bold red",
        )
    print()
    _table(
        f"Examples: {', '.join(map(printable, settings['files']))}",
        ["", "examples"],
        [
            ["read", f"{examples['read']:,}"],
            *[[f"unreadable, left out: {kind}", f"{p['count']:,}"] for kind, p in report["unreadable"].items()],
            *[[_NOTED[kind], f"{p['count']:,}"] for kind, p in report["noted"].items()],
            ["documents", f"{examples['documents']:,}"],
            *_overlong_rows(report),
        ],
    )
    if not examples["documents"]:
        return
    lengths = report["lengths"]
    most = max(bucket["documents"] for bucket in lengths["histogram"])
    quantiles = ", ".join(f"{name} {lengths[name]:,}" for name in ("p10", "p50", "p90", "p99", "max"))
    _table(
        f"{length_label(report)}: {examples['tokens']:,} in all, mean {lengths['mean']:,.1f}, {quantiles}",
        ["length", "documents", "of the documents", f"of the {unit_of(report)}", ""],
        [
            [
                f"{bucket['from']:,} to {bucket['to']:,}",
                f"{bucket['documents']:,}",
                f"{bucket['documents'] / examples['documents']:.1%}",
                f"{bucket['tokens'] / examples['tokens']:.1%}",
                "#" * math.ceil(30 * bucket["documents"] / most),
            ]
            for bucket in lengths["histogram"]
        ],
    )
    if report["layouts"]:
        _layouts(report)
    if report.get("prefix_trees"):
        _prefix_trees(report["prefix_trees"], settings, unit_of(report))


def conclusion(report: dict[str, Any]) -> str:
    """Return one sentence: what packing would save, or that it would not.

    Example:
        >>> conclusion({"examples": {"documents": 0}, "layouts": {}})
        'Nothing to pack: no document was read.'
    """
    if not report["layouts"]:
        left = "every document is over the capacity" if report["examples"]["documents"] else "no document was read"
        return f"Nothing to pack: {left}."
    settings, layouts = report["settings"], report["layouts"]
    packed, padding = layouts["ffd"], {name: f"{1 - layout['fill']:.1%}" for name, layout in layouts.items()}
    rows = f"packed rows of {settings['capacity']:,} slots (ffd)"
    if max(_speeds(packed, layouts["padded"])) < 1.05:
        return (
            f"Packing saves next to nothing: {padding['padded']} of padded batches of {settings['batch_size']} is "
            f"padding, and {padding['ffd']} of {rows}."
        )
    return (
        f"In {rows} an epoch is an estimated {_as_fast(packed, layouts['padded'])} as fast as in padded batches of "
        f"{settings['batch_size']} and {_as_fast(packed, layouts['length_grouped'])} as fast as in such batches "
        f"grouped by length: {padding['ffd']} padding, not {padding['padded']} or {padding['length_grouped']}."
    )


def _speeds(layout: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Return how many times as fast an epoch of ``layout`` is as one of ``other``: by tokens and by flops,
    ascending.
    """
    return sorted(layout["epoch_time_ratio"][by] / other["epoch_time_ratio"][by] for by in ("tokens", "flops"))


def _as_fast(layout: dict[str, Any], other: dict[str, Any]) -> str:
    low, high = (f"{speed:.{1 if speed >= 2 else 2}f}" for speed in _speeds(layout, other))
    return f"{low} times" if low == high else f"{low} to {high} times"


def _overlong_rows(report: dict[str, Any]) -> list[list[str]]:
    overlong, capacity = report["overlong"], report["settings"]["capacity"]
    if not overlong["documents"]:
        return []
    fate = next(name for name in ("truncated", "split", "own", "dropped") if overlong[name])
    fate = "given a row of their own" if fate == "own" else fate
    unit = unit_of(report)
    lost = f"; {unit} lost: {overlong['lost_tokens']:,}" if overlong["lost_tokens"] else ""
    return [[f"over {capacity:,} {unit}, {fate}{lost}", f"{overlong['documents']:,}"]]


def unit_of(report: dict[str, Any]) -> str:
    """Return what lengths are counted in: tokens with a tokenizer, or of examples that have them."""
    if not report["in_bytes"]:
        return "tokens"
    return "bytes" if report["in_bytes"] == report["examples"]["documents"] else "tokens or bytes"


def length_label(report: dict[str, Any]) -> str:
    unit = unit_of(report)
    return "Length in bytes, not tokens" if unit == "bytes" else f"Length in {unit}"


def layout_label(name: str, settings: dict[str, Any]) -> str:
    if name == "stream":
        return f"packed, a stream with {settings['buffer']:,} waiting"
    if name in _BATCHES:
        return f"{_BATCHES[name]}, batches of {settings['batch_size']}"
    return f"packed, {name}"


def _layouts(report: dict[str, Any]) -> None:
    settings, model = report["settings"], report["model"]
    named = [(layout_label(name, settings), layout) for name, layout in report["layouts"].items()]
    parallel = settings["dp"] > 1
    header = ["", "rows", "steps per epoch", "fill", "padding"]
    step = "one batch or one row" + (f" on each of {settings['dp']} ranks" if parallel else "")
    rows = [
        [label, f"{layout['rows']:,}", f"{layout['steps']:,}", f"{layout['fill']:.1%}", f"{1 - layout['fill']:.1%}"]
        for label, layout in named
    ]
    if parallel:
        header += ["FLOP balance", "as packed"]
        for row, (_, layout) in zip(rows, named, strict=True):
            balance = layout["flop_balance"]
            row += [f"{each:.1%}" for each in (balance, layout.get("flop_balance_as_packed", balance))]
    _table(f"Layouts: packed rows of {settings['capacity']:,} slots; a step is {step}", header, rows)
    _table(
        "Estimated speed relative to the padded batches (above 1: faster)",
        ["", "step, by slots", "step, by flops", "epoch, by slots", "epoch, by flops"],
        [
            [
                label,
                *(
                    f"{layout[span][by]:.2f}x"
                    for span in ("step_time_ratio", "epoch_time_ratio")
                    for by in ("tokens", "flops")
                ),
            ]
            for label, layout in named
        ],
    )
    if parallel:
        print(
            'FLOP balance: rows dealt to the ranks with balance="flops"; as packed: without. '
            "A step takes as long as its slowest rank."
        )
    print(
        f"grouped by length: sorted inside groups of 50 steps, as transformers' group_by_length does.\n"
        f"by slots: time in proportion to the slots; by flops: to a*L + b*L^2 for L slots that attend to each other,\n"
        f"a = 12 * hidden_size = {model['a']:,.0f}, b = {model['b']:g} (dense causal decoder)."
    )


def _prefix_trees(trees: dict[str, Any], settings: dict[str, Any], unit: str) -> None:
    compared = "all are compared"
    if trees["group_by"] is not None:
        compared = f"{trees['groups']:,} groups by {printable(trees['group_by'])}"
    names = {"tokens": unit, "rows": f"rows of {settings['capacity']:,} slots", "pairs": f"visible pairs of {unit}"}
    rows = []
    for name, label in names.items():
        alone, shared = trees[name]["alone"], trees[name]["shared"]
        times = f"{alone / shared:.2f}x" if shared else ""
        rows.append([label, f"{alone:,}", f"{shared:,}", times])
    title = f"Prefix trees: what documents share from their start on, computed once ({compared})"
    _table(title, ["", "alone", "shared", "fewer"], rows)
    print(
        f"Of the shared {unit} {trees['repeated_at_forks']:,} are repeated at forks, which are at multiples of 128, "
        f"and {trees['repeated_by_cuts']:,} where a tree does not fit a row.\n"
        "Documents over the capacity are cut to it, or left out with --overlong drop."
    )


def _console() -> Any:
    """Return a console of rich; None where rich is not installed."""
    try:
        from rich import console
    except ImportError:
        return None
    return console.Console(width=WIDTH, markup=False, highlight=False)


def _heading(text: str, style: str) -> None:
    if (console := _console()) is None:
        print(text)
    else:
        console.print(text, style=style, soft_wrap=True)


def _table(title: str, header: list[str], rows: list[list[str]]) -> None:
    _heading(title, "bold")
    if (console := _console()) is not None:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD)
        for i, name in enumerate(header):
            table.add_column(name, justify="right" if i and name else "left", no_wrap=not (i and name))
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = [
            cell.rjust(width) if i and header[i] else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    print()


# --- while a report is made ---


@contextmanager
def progress(total: float, what: str = "reading") -> Iterator[Callable[[float], None]]:
    """Show progress on stderr: rich's bar where rich is installed and stderr is a terminal, else nothing. Yields a
    function to call with how much more of ``total`` is done.
    """
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda amount: None
        return
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)
