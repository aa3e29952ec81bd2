"""The report as a picture: lengths, slots of every layout, estimated time."""

from pathlib import Path

from packing_ops.report.tables import layout_label, length_label

try:
    from matplotlib.figure import Figure  # not pyplot: no window, no state to leave behind
    from matplotlib.ticker import EngFormatter
except ImportError as error:
    raise ImportError("a picture needs matplotlib: pip install packing_ops[data]") from error


def save_picture(report: dict, path: Path) -> None:
    """Draws a make_report result to ``path``, in the format of its suffix.

    Raises:
        ImportError: matplotlib is not installed (when this module is imported).
        ValueError: a format that matplotlib does not write.
    """
    figure = Figure(figsize=(16, 4.8), layout="constrained")
    lengths, slots, time = figure.subplots(1, 3)
    _draw_lengths(lengths, report)
    if report["layouts"]:
        _draw_slots(slots, report)
        _draw_time(time, report)
    figure.savefig(path, dpi=110)


def _draw_lengths(axis, report: dict) -> None:
    buckets, capacity = report["lengths"]["histogram"], report["settings"]["capacity"]
    edges = [bucket["from"] for bucket in buckets]
    axis.bar(
        edges, [bucket["documents"] for bucket in buckets], width=edges, align="edge", color="tab:green", ec="white"
    )
    axis.axvline(capacity, color="black", linewidth=1, label=f"capacity {capacity:,}")
    axis.set_xscale("log", base=2)
    axis.set(
        title=f"{report['examples']['documents']:,} documents",
        xlabel=length_label(report["settings"]),
        ylabel="documents",
    )
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.tick_params(axis="x", rotation=30)
    axis.legend(framealpha=1)


def _names(axis, report: dict) -> list[int]:
    """Layouts from the top down."""
    names = [layout_label(name, report["settings"]) for name in report["layouts"]]
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.margins(x=0.2)  # room for the figures at the ends of the bars
    return list(range(len(names)))


def _draw_slots(axis, report: dict) -> None:
    layouts = report["layouts"].values()
    y = _names(axis, report)
    tokens = [layout["slots"] * layout["fill"] for layout in layouts]
    padding = [layout["slots"] - real for layout, real in zip(layouts, tokens, strict=True)]
    axis.barh(y, tokens, color="tab:blue", label="tokens")
    bars = axis.barh(y, padding, left=tokens, color="lightgray", label="padding")
    axis.bar_label(bars, [f"{1 - layout['fill']:.1%}" for layout in layouts], padding=3)
    axis.xaxis.set_major_formatter(EngFormatter())
    axis.set(title="slots of an epoch, share of padding", xlabel="slots")
    axis.legend(loc="lower right")


def _draw_time(axis, report: dict) -> None:
    y = _names(axis, report)
    for by, offset, color in (("tokens", -0.2, "tab:blue"), ("flops", 0.2, "tab:orange")):
        times = [1 / layout["epoch_time_ratio"][by] for layout in report["layouts"].values()]
        bars = axis.barh([each + offset for each in y], times, height=0.38, color=color, label=f"by {by}")
        axis.bar_label(bars, [f"{time:.2f}" for time in times], padding=3)
    axis.set(title="estimated time, padded = 1", xlabel=f"time of an epoch, dp = {report['settings']['dp']}")
    axis.legend(loc="lower right")
