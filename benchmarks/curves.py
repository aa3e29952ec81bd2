"""The picture of losses over steps and over seconds, by [pictures.lines] of regions.toml."""

import itertools

import matplotlib.pyplot as plt
from render import SPEC, figures_of, selected, split
from result_rows import fill

COMPILING = 2  # steps whose seconds are left out
STYLES = (":", "-", "--", "-.", "-")  # lines that lie on each other stay visible


def lines(block: dict, width: float, small: int, large: int) -> plt.Figure | None:
    """A line for each provider; None where there is no row."""
    rows = selected(block)
    if not rows:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(width, 4.5), layout="constrained", sharey=True)
    for one, style in zip(split(rows, "provider"), itertools.cycle(STYLES)):
        steps, losses, seconds = ([float(row[name]) for row in one] for name in ("step", "loss", "seconds"))
        seconds = list(itertools.accumulate(seconds[COMPILING:]))
        look = {"color": SPEC["pictures"]["palette"][one[0]["color"]], "linestyle": style, "linewidth": 1.2}
        axes[0].plot(steps, losses, label=one[0]["provider"], **look)
        axes[1].plot(seconds, losses[COMPILING:], **look)
    for axis, label in zip(axes, ("step", f"seconds, without the first {COMPILING} steps, which compile"), strict=True):
        axis.set_yscale("log")
        axis.set_xlabel(label, fontsize=small)
        axis.tick_params(labelsize=small, which="both")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.grid(color="lightgray", linewidth=0.5)
    axes[0].set_ylabel("loss", fontsize=small)
    figure.legend(loc="outside lower center", ncols=3, fontsize=small, frameon=False)
    figure.suptitle(fill(block["title"], figures_of(rows, block)), fontsize=large)
    return figure
