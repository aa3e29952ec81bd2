"""One picture per result file: how much faster than the fastest other is packing_ops, case by case?"""

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from result_rows import COPY, OURS, cases_of, times

WIDTH, DPI = 10, 130  # inches of a page
CASE = 0.23  # inches of one
SMALL, LARGE = 9, 11  # points: read at half the size too
EVEN = 0.02  # what is no difference
# Parts of the work: the indices are given that ours finds first; no softmax
PARTS = {"torch index_select", "bare matmuls", "bare matmuls, logits kept", "filling new tensors of these sizes"}
OURS_TOO = (OURS, "chunked_cross_entropy", "varlen_attention")
OURS_ALONE = ("token_logps by ",)  # cases of ours with other options
PREPARATIONS = ("FlexAttention, its block mask",)  # once for many calls, timed in rows of their own
LOOPS = {"torch formula in chunks", "padded loop in torch", "trl's tree in a plain loop",
         "Karmarkar-Karp, a plain loop in Python"}  # in the CSV alone  # fmt: skip
QUADRATIC = {"torch SDPA block mask", "megatron-core, padded"}  # drawn where no peer serves packed rows
# Okabe and Ito's palette: safe for colour-blind readers
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK, GRAY = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999",
)  # fmt: skip
COLORS = {  # of a provider the same in every picture
    "torch FlashAttention-2": ORANGE, "FlashAttention-3": RED, "FlashAttention-3, deterministic": PINK,
    "FlashAttention-4": BLUE, "FlashAttention-4, deterministic": SKY, "FlexAttention": GREEN,
    "torch eager": ORANGE, "torch.compile": BLUE, "torch zeros + index_copy": GREEN, "torch index_select": GRAY,
    "transformers formula": ORANGE, "transformers formula, torch.compile": BLUE,
    "bert_padding formulas": ORANGE, "bert_padding formulas, torch.compile": BLUE,
    "bare matmuls": GRAY, "bare matmuls, logits kept": BLACK,
}  # fmt: skip
OTHERS = (ORANGE, BLUE, GREEN, PINK, SKY, RED, YELLOW, BLACK)
FAMILIES = {"logps": "Log-probabilities", "kl": "Distillation", "rope": "RoPE", "data": "Collators and batches"}
MARKERS = "osD^vPX*<>"  # of the providers of a picture, in their order
NAMED = re.compile(r"[=\d]|causal|images")  # words of a shape that say enough without the rest of it
SHORTER = (
    (re.compile(r"forward (and|\+) backward"), "fwd + bwd"),
    (re.compile(r": T=\d+ docs=\d+"), ","),  # a workload's name says both
    (re.compile(r" \[(\d+), (\d+)\]"), r" \1 x \2"),
    (re.compile(r", (?=[A-Z]+=)|,? *$"), " "),
)


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
            if name != COPY and name not in PREPARATIONS and name not in LOOPS and not name.startswith(OURS_TOO)
        }
        if any(name not in PARTS and name not in QUADRATIC for name in speeds):
            speeds = {name: speed for name, speed in speeds.items() if name not in QUADRATIC}
        peers = [name for name in speeds if name not in PARTS]
        if peers:
            shape = re.sub("(documents|pages) of ", "\\1\u00a0of\u00a0", shape)
            found.append(Comparison(op, f"{shape} {dtype}", speeds, min(peers, key=speeds.get)))
    return found


def colors_of(cases: list[Comparison]) -> dict[str, str]:
    names = list(dict.fromkeys(name for case in cases for name in case.speeds))
    used = {COLORS.get(name) for name in names}
    unknown = itertools.cycle(color for color in OTHERS if color not in used)
    return {name: COLORS[name] if name in COLORS else next(unknown) for name in names}


def picture(rows: list[dict], path: Path) -> bool:
    """A bar per case for the fastest other, in its colour, left of 1 where that one is ahead; marks for the rest.

    Shows the device with the most rows. Ops that have the same shapes stand side by side. Returns False, and draws no
    picture, where nobody else was measured.
    """
    ((device, _),) = Counter(row["device"] for row in rows).most_common(1)
    cases = comparisons([row for row in rows if row["device"] == device])
    if not cases:
        return False
    by_op = {op: [case for case in cases if case.op == op] for op in dict.fromkeys(case.op for case in cases)}
    shapes = [[case.shape for case in each] for each in by_op.values()]
    side_by_side = len(by_op) == 2 and shapes[0] == shapes[1]
    panels = list(by_op.items()) if side_by_side else [("", cases)]
    most = max(len(each) for _, each in panels)
    words = [case.shape.split(" ") for case in cases]
    common = [word for word in words[0] if NAMED.search(word) and all(word in each for each in words[1:])]
    common *= len(cases) > 1
    options = {"layout": "constrained", "sharex": True, "sharey": True, "squeeze": False}
    figure, axes = plt.subplots(1, len(panels), figsize=(WIDTH, 2.1 + CASE * most), **options)
    styles = dict(zip(colors_of(cases).items(), itertools.cycle(MARKERS), strict=False))
    styles = {name: (color, marker) for (name, color), marker in styles.items()}
    for axis, (op, each) in zip(axes[0], panels, strict=True):
        _draw(axis, each, styles)
        axis.set_title(op, fontsize=SMALL)
        labels = [label_of(case, common, with_op=not side_by_side) for case in each]
        axis.set_yticks(range(len(each)), labels, fontsize=SMALL)
    axes[0][0].invert_yaxis()
    figure.suptitle(f"{title_of(path.stem, device, cases)}\n{_counts(cases)}", fontsize=LARGE)
    handles = [
        plt.Line2D([], [], marker=marker, linestyle="", color=color, label=_legend(name, cases))
        for name, (color, marker) in styles.items()
    ]
    columns = min(3 if max(len(handle.get_label()) for handle in handles) < 40 else 2, len(handles))
    legend = {"loc": "outside lower center", "ncols": columns, "fontsize": SMALL, "frameon": False}
    all_of_them = f"; all cases: {' '.join(common)}" if common else ""
    note = f"bars: the fastest other; marks: the rest; behind in bold{all_of_them}"
    figure.legend(handles=handles, title=note, title_fontsize=SMALL, **legend)
    return saved(figure, path)


def title_of(stem: str, device: str, cases: list[Comparison]) -> str:
    """The finding: from how slow to how fast beside the fastest other."""
    family = stem.rpartition("_")[0]
    family = FAMILIES.get(family) or family.replace("_", " ").capitalize()
    where = device.removeprefix("NVIDIA ").removesuffix(" HBM3").replace("x86_64", "the CPU (x86_64)")
    slowest, fastest = (bound(case.speeds[case.fastest] for case in cases) for bound in (min, max))
    return f"{family} on {where}: {times(slowest)} to {times(fastest)} times the speed of the fastest other"


def label_of(case: Comparison, common: list[str], with_op: bool) -> str:
    """Names a case in few words, without those that all cases have."""
    shape = " ".join(word for word in case.shape.split(" ") if word not in common)
    label = f"{case.op}, {shape}" if with_op and shape else case.op if with_op else shape
    for pattern, replacement in SHORTER:
        label = pattern.sub(replacement, label)
    return label.strip()


def saved(figure, path: Path) -> bool:
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return True


def _legend(name: str, cases: list[Comparison]) -> str:
    """A provider with the speedups over it."""
    speeds = [case.speeds[name] for case in cases if name in case.speeds]
    note = f"{name} (a part of the work)" if name in PARTS else name
    return f"{note}: {times(min(speeds))}" + (f" to {times(max(speeds))}" if len(speeds) > 1 else "")


def _counts(cases: list[Comparison]) -> str:
    speeds = [case.speeds[case.fastest] for case in cases]
    ahead, behind = sum(speed > 1 + EVEN for speed in speeds), sum(speed < 1 - EVEN for speed in speeds)
    even = len(cases) - ahead - behind
    counts = f"{len(cases)} cases: ahead in {ahead}, behind in {behind}"
    return counts + (f", even within {EVEN:.0%} in {even}" if even else "")


def _draw(axis, cases: list[Comparison], styles: dict[str, tuple[str, str]]) -> None:
    axis.set_xscale("log", base=2)
    axis.axvline(1, color="black", linewidth=1, zorder=3)
    for y, case in enumerate(cases):
        speed = case.speeds[case.fastest]
        axis.barh(y, speed - 1, left=1, height=0.7, color=styles[case.fastest][0])
        for name, other in case.speeds.items():
            color, marker = styles[name]
            axis.plot(other, y, marker=marker, markersize=6, color=color, markeredgecolor="white", markeredgewidth=0.5)
        weight = "bold" if speed < 1 - EVEN else "normal"
        place = {"transform": axis.get_yaxis_transform(), "va": "center"}
        axis.text(1.01, y, times(speed), fontsize=SMALL, fontweight=weight, **place)
    axis.tick_params(axis="x", labelsize=SMALL)
    axis.set_xlabel("speedup over the other; left of 1 it is faster", fontsize=SMALL)
    axis.grid(axis="x", color="lightgray", linewidth=0.5)
    axis.set_axisbelow(True)
    speeds = [speed for case in cases for speed in case.speeds.values()]
    left, right = axis.get_xlim()
    left, right = min(left, 0.8, min(speeds) / 1.1), max(right, 1.25, max(speeds) * 1.1)
    if right < 4 * left:
        axis.set_xticks([tick for tick in (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3) if left <= tick <= right])
        axis.minorticks_off()
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlim(left, right)
    axis.margins(y=0.01)
