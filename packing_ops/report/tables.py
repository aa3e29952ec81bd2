"""The report as tables: drawn by rich where rich is installed, otherwise plain."""

import math

WIDTH = 110  # of a terminal, or a file


def printable(text: str, most: int | None = None) -> str:
    """``text`` of a file on one line: what a terminal would obey is written out, as in Python's strings.

    Example:
        >>> print(printable("grün\\x1b[2J\\n"), printable("one hundred", most=3))
        grün\\x1b[2J\\n one...
    """
    if most is not None and len(text) > most:
        text = text[:most] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show_report(report: dict) -> None:
    """Prints every table of a make_report result to stdout."""
    settings, examples = report["settings"], report["examples"]
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
    _lengths(report)
    if report["layouts"]:
        _layouts(report)


_NOTED = {"empty": "empty, left out", "no target": "without a target (labels all ignored, no answer), kept"}


def _overlong_rows(report: dict) -> list[list[str]]:
    overlong, capacity = report["overlong"], report["settings"]["capacity"]
    if not overlong["documents"]:
        return []
    fate = next(name for name in ("truncated", "split", "own", "dropped") if overlong[name])
    fate = "given a row of their own" if fate == "own" else fate
    lost = f"; tokens lost: {overlong['lost_tokens']:,}" if overlong["lost_tokens"] else ""
    return [[f"over {capacity:,} tokens, {fate}{lost}", f"{overlong['documents']:,}"]]


def _lengths(report: dict) -> None:
    lengths, examples = report["lengths"], report["examples"]
    most = max(bucket["documents"] for bucket in lengths["histogram"])
    quantiles = ", ".join(f"{name} {lengths[name]:,}" for name in ("p10", "p50", "p90", "p99", "max"))
    _table(
        f"{length_label(report['settings'])}: {examples['tokens']:,} in all, mean {lengths['mean']:,.1f}, {quantiles}",
        ["length", "documents", "of the documents", "of the tokens", ""],
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


def length_label(settings: dict) -> str:
    return "Length in tokens" + (" (a byte of text is one)" if settings["tokenizer"] == "bytes" else "")


def layout_label(name: str, settings: dict) -> str:
    if name in ("padded", "padding_free"):
        return f"{name.replace('_', '-')}, batches of {settings['batch_size']}"
    return f"packed, {name}"


def _layouts(report: dict) -> None:
    settings, model = report["settings"], report["model"]
    named = [(layout_label(name, settings), layout) for name, layout in report["layouts"].items()]
    _table(
        f"Layouts: packed rows of {settings['capacity']:,} slots; a step is one batch or one row on each rank, "
        f"dp = {settings['dp']}",
        ["", "rows", "steps per epoch", "fill", "padding", "FLOP balance", "as packed"],
        [
            [
                label,
                f"{layout['rows']:,}",
                f"{layout['steps']:,}",
                f"{layout['fill']:.1%}",
                f"{1 - layout['fill']:.1%}",
                f"{layout['flop_balance']:.1%}",
                f"{layout.get('flop_balance_as_packed', layout['flop_balance']):.1%}",
            ]
            for label, layout in named
        ],
    )
    _table(
        "Estimated time of the padded batches / of this layout (above 1: faster than padded)",
        ["", "step, by tokens", "step, by flops", "epoch, by tokens", "epoch, by flops"],
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
    print(
        f'FLOP balance: rows dealt to the ranks with balance="flops"; as packed: without.\n'
        f"by tokens: time in proportion to the slots; by flops: to a*L + b*L^2 for L slots that attend to each other,\n"
        f"a = 12 * hidden_size = {model['a']:,.0f}, b = {model['b']:g} (dense causal decoder). "
        "A step takes as long as its slowest rank."
    )


def _table(title: str, header: list[str], rows: list[list[str]]) -> None:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _plain_table(title, header, rows)
        return

    table = Table(box=box.SIMPLE_HEAD)
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i and name else "left", no_wrap=not (i and name))
    for row in rows:
        table.add_row(*row)
    console = Console(width=WIDTH, markup=False, highlight=False)
    console.print(title, style="bold", soft_wrap=True)
    console.print(table)


def _plain_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(title)
    for row in (header, *rows):
        cells = [
            cell.rjust(width) if i and header[i] else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    print()
