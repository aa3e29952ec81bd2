"""The report as a picture: where the slots of an epoch go in every layout, and how long the documents are."""

from pathlib import Path
from typing import Any

from packing_ops.report.tables import layout_label, length_label, unit_of

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure  # not pyplot: no window, no state to leave behind
    from matplotlib.ticker import EngFormatter
except ImportError as error:
    raise ImportError("a picture needs matplotlib: pip install matplotlib") from error

WIDTH, DPI = 10, 160  # inches of a page


def save_picture(report: dict[str, Any], path: Path) -> None:
    """Draw a make_report result to ``path``, in the format of its suffix.

    Raises:
        ImportError: matplotlib is not installed (when this module is imported).
        ValueError: a format that matplotlib does not write.
    """
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    lengths, slots = figure.subplots(1, 2, width_ratios=[2, 3])
    _draw_lengths(lengths, report)
    if report["layouts"]:
        _draw_slots(slots, report)
    figure.savefig(path, dpi=DPI)


def _draw_lengths(axis: Axes, report: dict[str, Any]) -> None:
    buckets, capacity = report["lengths"]["histogram"], report["settings"]["capacity"]
    edges = [bucket["from"] for bucket in buckets]
    counts = [bucket["documents"] for bucket in buckets]
    axis.bar(edges, counts, width=edges, align="edge", color="#009E73", ec="white")
    axis.axvline(capacity, color="black", linewidth=1, label=f"capacity {capacity:,}")
    axis.set_xscale("log", base=2)
    documents, median = report["examples"]["documents"], report["lengths"].get("p50", 0)
    axis.set_title(f"{documents:,} documents, half of them up to {median:,} long", fontsize=10)
    axis.set(xlabel=length_label(report), ylabel="documents")
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.tick_params(axis="x", rotation=30)
    axis.legend(framealpha=1, fontsize=8)


def _draw_slots(axis: Axes, report: dict[str, Any]) -> None:
    """Draw a bar per layout, its padding grey, and how much faster its epoch is."""
    names = [layout_label(name, report["settings"]) for name in report["layouts"]]
    layouts, y = report["layouts"].values(), range(len(names))
    tokens = [layout["slots"] * layout["fill"] for layout in layouts]
    padding = [layout["slots"] - real for layout, real in zip(layouts, tokens, strict=True)]
    axis.barh(y, tokens, color="#0072B2", label=unit_of(report))
    bars = axis.barh(y, padding, left=tokens, color="lightgray", label="padding")
    labels = []
    for layout in layouts:
        low, high = (f"{ratio:.1f}" for ratio in sorted(layout["epoch_time_ratio"].values()))
        labels.append(f"{1 - layout['fill']:.1%} padding, {low if low == high else f'{low} to {high}'}x")
    axis.bar_label(bars, labels, padding=3, fontsize=8)
    axis.set_yticks(y, names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.5 * max(layout["slots"] for layout in layouts))  # room for the labels at the ends of the bars
    axis.xaxis.set_major_formatter(EngFormatter())
    waste = [1 - layout["fill"] for layout in layouts]
    packed = [share for name, share in zip(names, waste, strict=True) if name.startswith("packed")]
    best = f", {min(packed):.1%} in packed rows" if packed else ""
    axis.set_title(f"Padding is {waste[0]:.0%} of a padded epoch{best}", fontsize=10)
    dp = report["settings"]["dp"]
    where = f" on {dp} ranks" if dp > 1 else ""
    axis.set_xlabel(f"slots; times as fast as the first{where}, estimated", fontsize=9)
    axis.legend(loc="lower right", fontsize=8)
