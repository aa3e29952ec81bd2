"""Pictures of benchmarks/results: python benchmarks/render_pictures.py [--device cpu|cuda] [--family NAME]

Writes results/<family>_<device>.png from the CSV and [pictures] of regions.toml: how much faster than the fastest other
is packing_ops, case by case, a bar for each row, or losses of steps.
"""

import argparse
import itertools
import re
from collections import Counter

import matplotlib
import result_rows
from curves import lines
from render import SPEC, cases_of, figures_of, selected, split
from result_rows import fill, is_like, shared_words, times

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WIDTH, DPI = 10, 130  # inches of a page
CASE = 0.23  # inches of one
SMALL, LARGE = 9, 11  # points: read at half the size too
EVEN = 0.02  # what is no difference
PICTURES = SPEC["pictures"]
MARKERS = "osD^vPX*<>"  # of the providers of a picture, in their order


def comparisons(rows: list[dict]) -> list[dict]:
    """Cases in which somebody else does the same work, with the speedups over each and the name of the fastest."""
    found = []
    for case in cases_of(rows, {"case": ["op", "shape", "dtype"]}):
        compared = {} if is_kind(case["op"], "ours_alone") else case["of"]
        speeds = {name: float(row["ratio_to_ours"]) for name, row in compared.items() if not is_kind(name, "left_out")}
        if any(not is_kind(name, "quadratic") and not is_kind(name, "parts") for name in speeds):
            speeds = {name: speed for name, speed in speeds.items() if not is_kind(name, "quadratic")}
        peers = [name for name in speeds if not is_kind(name, "parts")]
        if peers:
            shape = re.sub("(documents|pages) of ", "\\1\u00a0of\u00a0", case["shape"]) + f" {case['dtype']}"
            fastest = min(peers, key=speeds.get)
            found.append(case | {"shape": shape, "speeds": speeds, "fastest": fastest, "speed": speeds[fastest]})
    return found


def is_kind(name: str, kind: str) -> bool:
    return is_like(name, PICTURES[kind])


def styles_of(cases: list[dict]) -> dict[str, tuple[str, str]]:
    """The colour and the marker of each provider."""
    names, colors = list(dict.fromkeys(name for case in cases for name in case["speeds"])), PICTURES["colors"]
    unknown = itertools.cycle(color for color in PICTURES["others"] if color not in map(colors.get, names))
    found = [PICTURES["palette"][colors[name] if name in colors else next(unknown)] for name in names]
    return dict(zip(names, zip(found, itertools.cycle(MARKERS), strict=False), strict=True))


def picture(rows: list[dict], stem: str) -> plt.Figure | None:
    """A bar per case for the fastest other, in its colour, left of 1 where that one is ahead; marks for the rest.

    Shows the device with the most rows, ops of the same shapes side by side. None where nobody else was measured.
    """
    ((device, _),) = Counter(row["device"] for row in rows).most_common(1)
    cases = comparisons([row for row in rows if row["device"] == device])
    if not cases:
        return None
    panels = split(cases, "op")
    side_by_side = len(panels) == 2 and len({tuple(case["shape"] for case in panel) for panel in panels}) == 1
    panels = panels if side_by_side else [cases]
    common = shared_words([case["shape"] for case in cases], r"[=\d]|causal|images")
    high = 2.1 + CASE * max(map(len, panels))
    options = {"layout": "constrained", "sharex": True, "sharey": True, "squeeze": False}
    figure, axes = plt.subplots(1, len(panels), figsize=(WIDTH, high), **options)
    styles = styles_of(cases)
    for axis, panel in zip(axes[0], panels, strict=True):
        _draw(axis, panel, styles)
        axis.set_title(panel[0]["op"] if side_by_side else "", fontsize=SMALL)
        labels = [label_of(case, common, with_op=not side_by_side) for case in panel]
        axis.set_yticks(range(len(panel)), labels, fontsize=SMALL)
    axes[0][0].invert_yaxis()
    figure.suptitle(title_of(stem, device, cases), fontsize=LARGE)
    handles = [
        plt.Line2D([], [], marker=marker, linestyle="", color=color, label=_legend(name, cases))
        for name, (color, marker) in styles.items()
    ]
    columns = min(3 if max(len(handle.get_label()) for handle in handles) < 40 else 2, len(handles))
    legend = {"loc": "outside lower center", "ncols": columns, "fontsize": SMALL, "frameon": False}
    note = "; ".join([PICTURES["legend"], *[f"all cases: {' '.join(common)}"] * bool(common)])
    figure.legend(handles=handles, title=note, title_fontsize=SMALL, **legend)
    return figure


def title_of(stem: str, device: str, cases: list[dict]) -> str:
    """The finding: from how slow to how fast beside the fastest other, and in how many cases."""
    family = stem.rpartition("_")[0]
    family = PICTURES["families"].get(family) or family.replace("_", " ").capitalize()
    where = device.removeprefix("NVIDIA ").removesuffix(" HBM3").replace("x86_64", "the CPU (x86_64)")
    speeds = [case["speed"] for case in cases]
    ahead, behind = sum(speed > 1 + EVEN for speed in speeds), sum(speed < 1 - EVEN for speed in speeds)
    even = f", even within {EVEN:.0%} in {len(cases) - ahead - behind}" if ahead + behind < len(cases) else ""
    finding = f"{times(min(speeds))} to {times(max(speeds))} times the speed of the fastest other"
    return f"{family} on {where}: {finding}\n{len(cases)} cases: ahead in {ahead}, behind in {behind}{even}"


def label_of(case: dict, common: list[str], with_op: bool) -> str:
    """Names a case in few words, without those that all cases have."""
    shape = " ".join(word for word in case["shape"].split(" ") if word not in common)
    label = ", ".join(filter(None, [case["op"] * with_op, shape]))
    for pattern, replacement in PICTURES["shorter"]:
        label = re.sub(pattern, replacement, label)
    return label.strip()


def _legend(name: str, cases: list[dict]) -> str:
    """A provider with the speedups over it."""
    speeds = [case["speeds"][name] for case in cases if name in case["speeds"]]
    note = f"{name} (a part of the work)" if is_kind(name, "parts") else name
    return f"{note}: {times(min(speeds))}" + (f" to {times(max(speeds))}" if len(speeds) > 1 else "")


def _draw(axis, cases: list[dict], styles: dict[str, tuple[str, str]]) -> None:
    axis.set_xscale("log", base=2)
    axis.axvline(1, color="black", linewidth=1, zorder=3)
    for y, case in enumerate(cases):
        axis.barh(y, case["speed"] - 1, left=1, height=0.7, color=styles[case["fastest"]][0])
        for name, other in case["speeds"].items():
            color, marker = styles[name]
            axis.plot(other, y, marker=marker, markersize=6, color=color, markeredgecolor="white", markeredgewidth=0.5)
        weight, across = "bold" if case["speed"] < 1 - EVEN else "normal", axis.get_yaxis_transform()
        axis.text(1.01, y, times(case["speed"]), fontsize=SMALL, fontweight=weight, transform=across, va="center")
    axis.tick_params(axis="x", labelsize=SMALL)
    _grid(axis, "speedup over the other; left of 1 it is faster")
    speeds = [speed for case in cases for speed in case["speeds"].values()]
    left, right = axis.get_xlim()
    left, right = min(left, 0.8, min(speeds) / 1.1), max(right, 1.25, max(speeds) * 1.1)
    if right < 4 * left:
        axis.set_xticks([tick for tick in (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3) if left <= tick <= right])
        axis.minorticks_off()
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlim(left, right)
    axis.margins(y=0.01)


def _grid(axis, label: str) -> None:
    axis.set_xlabel(label, fontsize=SMALL)
    axis.grid(axis="x", color="lightgray", linewidth=0.5)
    axis.set_axisbelow(True)


def bars(block: dict) -> plt.Figure | None:
    """A bar for each row, a panel for each value of a column; None where there is no row."""
    rows = selected(block)
    if not rows:
        return None
    panels = split(rows, block["panels"])
    (first, each), inside = block["inches"], "inside" in block
    options = {"layout": "constrained", "squeeze": False, "height_ratios": [*map(len, panels)]}
    figure, axes = plt.subplots(len(panels), figsize=(WIDTH, first + each * CASE * len(rows)), **options)
    style = {"fontsize": LARGE, "fontweight": "bold"} if inside else {"fontsize": SMALL + 1}
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        values = [float(row[block["value"]]) for row in panel]
        axis.barh(range(len(panel)), values, height=0.7, color=[PICTURES["palette"][row["color"]] for row in panel])
        axis.set_yticks(range(len(panel)), [row["label"] for row in panel], fontsize=SMALL + (not inside))
        axis.invert_yaxis()
        for y, (row, value) in enumerate(zip(panel, values, strict=True)):
            axis.text(0.01 if inside else value, y, fill(block["text"], row), va="center", color="black", **style)
        if inside:
            axis.axvline(1, color="black", linewidth=1)
            _grid(axis, block["inside"])
        else:
            axis.set_xlim(0, 1.75 * max(values))
            axis.set_xticks([])
            axis.set_title(fill(block["title"], figures_of(panel, block)), fontsize=SMALL + 1, loc="left")
    words = figure.suptitle if inside else figure.supxlabel
    words(fill(block["of_all"], figures_of(rows, block)), fontsize=LARGE if inside else SMALL)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--family")
    arguments = parser.parse_args()
    for path in sorted(result_rows.RESULTS.glob(f"{arguments.family or '*'}_{arguments.device or '*'}.csv")):
        rows, target = result_rows.read_rows(path), path.with_suffix(".png")
        figure = picture(rows, path.stem) if "ratio_to_ours" in rows[0] else None
        if path.stem in PICTURES["bars"]:
            figure = bars(PICTURES["bars"][path.stem])
        elif path.stem in PICTURES["lines"]:
            figure = lines(PICTURES["lines"][path.stem], WIDTH, SMALL, LARGE)
        if figure:
            figure.savefig(target, dpi=DPI)
            plt.close(figure)
        else:
            target.unlink(missing_ok=True)
        print(f"{path.stem}: {target.name if figure else 'no picture'}")


if __name__ == "__main__":
    main()
