"""One picture per result file: how much faster than the fastest other is packing_ops, case by case?"""

import itertools
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from result_rows import COPY, OURS, cases_of, times

WIDTH, DPI = 10, 130  # inches of a page
CASE = 0.19  # inches of one
EVEN = 0.02  # what is no difference
PARTS = {  # of the work: the indices are given that ours finds first; no softmax
    "torch index_select",
    "bare matmuls",
    "bare matmuls, logits kept",
}
OURS_TOO = (OURS, "chunked_cross_entropy", "varlen_attention")
OURS_ALONE = ("token_logps by ",)  # cases of ours with other options
PREPARATIONS = ("FlexAttention, its block mask",)  # once for many calls, timed in rows of their own
NOTES = dict.fromkeys(PARTS, "a part of the work")
COLORS = {  # of a provider the same in every picture
    "torch FlashAttention-2": "tab:orange",
    "FlashAttention-3": "tab:red",
    "FlashAttention-3, deterministic": "tab:pink",
    "FlashAttention-4": "tab:blue",
    "FlashAttention-4, deterministic": "tab:cyan",
    "FlexAttention": "tab:green",
    "torch eager": "tab:orange",
    "torch.compile": "tab:purple",
    "transformers formula": "tab:orange",
    "transformers formula, torch.compile": "tab:purple",
    "bert_padding formulas": "tab:orange",
    "bert_padding formulas, torch.compile": "tab:purple",
    "torch zeros + index_copy": "tab:green",
    "torch index_select": "tab:gray",
    "bare matmuls": "tab:gray",
    "bare matmuls, logits kept": "tab:brown",
}
OTHERS = ("tab:orange", "tab:purple", "tab:green", "tab:brown", "tab:olive", "tab:cyan", "tab:pink", "tab:red")


class Comparison(NamedTuple):
    """A case: how many times as fast as each other provider ours is, below 1 where that one is faster."""

    op: str
    shape: str
    speeds: dict[str, float]
    fastest: str  # of the others that do the same work


def comparisons(rows: list[dict]) -> list[Comparison]:
    """Cases in which somebody else does the same work. A copy moves as many bytes and does none of it."""
    found = []
    for (op, shape, dtype), providers in cases_of(rows).items():
        if op.startswith(OURS_ALONE):
            continue
        _, *others = providers
        speeds = {
            name: float(providers[name]["ratio_to_ours"])
            for name in others
            if name != COPY and name not in PREPARATIONS and not name.startswith(OURS_TOO)
        }
        peers = [name for name in speeds if name not in PARTS]
        if peers:
            found.append(Comparison(op, f"{shape} {dtype}", speeds, min(peers, key=speeds.get)))
    return found


def colors_of(cases: list[Comparison]) -> dict[str, str]:
    names = list(dict.fromkeys(name for case in cases for name in case.speeds))
    used = {COLORS.get(name) for name in names}
    unknown = itertools.cycle(color for color in OTHERS if color not in used)
    return {name: COLORS[name] if name in COLORS else next(unknown) for name in names}


def picture(rows: list[dict], path: Path) -> bool:
    """A bar per case for the fastest other, in its colour, left of 1 where that one is ahead; dots for the rest.

    Ops that have the same shapes stand side by side. False, and no picture, where nobody else was measured.
    """
    cases = comparisons(rows)
    if not cases:
        return False
    by_op = {op: [case for case in cases if case.op == op] for op in dict.fromkeys(case.op for case in cases)}
    shapes = [[case.shape for case in each] for each in by_op.values()]
    side_by_side = len(by_op) == 2 and shapes[0] == shapes[1]
    panels = list(by_op.items()) if side_by_side else [("", cases)]
    colors, most = colors_of(cases), max(len(each) for _, each in panels)
    words = [case.shape.split() for case in cases]
    common = [word for word in words[0] if all(word in each for each in words) and len(cases) > 1]
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(WIDTH, 1.7 + CASE * most),
        layout="constrained",
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for axis, (op, each) in zip(axes[0], panels, strict=True):
        _draw(axis, each, colors)
        axis.set_title(op, fontsize=9)
        shapes = [" ".join(word for word in case.shape.split() if word not in common) for case in each]
        labels = shapes if side_by_side else [f"{case.op}, {shape}" for case, shape in zip(each, shapes, strict=True)]
        axis.set_yticks(range(len(each)), labels, fontsize=7)
    axes[0][0].invert_yaxis()
    device = ", ".join(dict.fromkeys(row["device"] for row in rows))
    all_of_them = f" (all {' '.join(common)})" if common else ""
    figure.suptitle(
        f"{path.stem.rpartition('_')[0]} on {device}: how many times as fast as the fastest other is packing_ops?\n"
        f"{_counts(cases)}{all_of_them}\n"
        "bars: the fastest other, dots: the rest; left of 1 the other is faster; behind in bold",
        fontsize=9,
    )
    handles = [
        plt.Line2D(
            [], [], marker="s", linestyle="", color=color, label=f"{name} ({NOTES[name]})" if name in NOTES else name
        )
        for name, color in colors.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=8, frameon=False)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return True


def _counts(cases: list[Comparison]) -> str:
    speeds = [case.speeds[case.fastest] for case in cases]
    ahead, behind = sum(speed > 1 + EVEN for speed in speeds), sum(speed < 1 - EVEN for speed in speeds)
    even = len(cases) - ahead - behind
    return f"{len(cases)} cases: ahead in {ahead}, behind in {behind}" + (
        f", even within {EVEN:.0%} in {even}" if even else ""
    )


def _draw(axis, cases: list[Comparison], colors: dict[str, str]) -> None:
    axis.set_xscale("log", base=2)
    axis.axvline(1, color="black", linewidth=1, zorder=3)
    for y, case in enumerate(cases):
        speed = case.speeds[case.fastest]
        axis.barh(y, speed - 1, left=1, height=0.7, color=colors[case.fastest])
        for name, other in case.speeds.items():
            if name != case.fastest:
                axis.plot(
                    other, y, marker="o", markersize=4, color=colors[name], markeredgecolor="white", markeredgewidth=0.4
                )
        weight = "bold" if speed < 1 - EVEN else "normal"
        axis.text(
            1.01, y, times(speed), transform=axis.get_yaxis_transform(), fontsize=7, va="center", fontweight=weight
        )
    axis.xaxis.set_major_formatter("{x:g}")
    axis.tick_params(axis="x", labelsize=8)
    axis.set_xlabel("speed of packing_ops / speed of the other", fontsize=8)
    axis.grid(axis="x", color="lightgray", linewidth=0.5)
    axis.set_axisbelow(True)
    speeds = [speed for case in cases for speed in case.speeds.values()]
    left, right = axis.get_xlim()
    axis.set_xlim(min(left, 0.8, min(speeds) / 1.1), max(right, 1.25, max(speeds) * 1.1))
    axis.margins(y=0.01)
