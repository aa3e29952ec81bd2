"""Pictures of benchmarks/results: python benchmarks/render_results.py [--device cpu|cuda] [--family NAME]

Writes results/<family>_<device>.png from the CSV alone. Tables of README and docs: benchmarks/render_pages.py.
"""

import argparse
from pathlib import Path

from render_pictures import BLUE, CASE, GRAY, GREEN, LARGE, ORANGE, SMALL, WIDTH, picture, plt, saved
from render_tables_whole import PROVIDERS, SHOWN, best_of
from result_rows import RESULTS, origin, rows_of, without_overlap


def _bars(axis, values: list[float], colors: list[str], labels: list[str], size: int) -> None:
    axis.barh(range(len(values)), values, height=0.7, color=colors)
    axis.set_yticks(range(len(values)), labels, fontsize=size)
    axis.invert_yaxis()


def picture_of_efficiency(rows: list[dict], path: Path, note: str = "") -> bool:
    """A bar per row of results with a column of efficiency: what several GPUs reach of their ideal, 1. False, and no
    picture, where no row has an efficiency of several ranks.
    """
    rows = [row for row in rows if row["efficiency"] and row["ranks"] != "1"]
    if not rows:
        return False
    kinds: dict[str, list[float]] = {}
    kind_of = [row["op"].split()[0].rstrip(",") for row in rows]
    for kind, row in zip(kind_of, rows, strict=True):
        kinds.setdefault(kind, []).append(float(row["efficiency"]))
    figure, axis = plt.subplots(figsize=(WIDTH, 2.1 + 2.1 * CASE * len(rows)), layout="constrained")
    colors = {"Ulysses": BLUE, "gathered": ORANGE, "training": GREEN}
    labels = [f"{row['op']}\n{row['shape'].partition(': T=')[0]}" for row in rows]
    labels = [label.replace(", sft lengths, ", ", sft lengths,\n", 1) for label in labels]
    values = [float(row["efficiency"]) for row in rows]
    _bars(axis, values, [colors.get(kind, "tab:gray") for kind in kind_of], labels, SMALL)
    for y, value in enumerate(values):
        axis.text(0.01, y, f"{value:.2f}", fontsize=LARGE, va="center", color="black", fontweight="bold")
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xlabel("of ideal: time of one GPU / (GPUs x their time), in the same run", fontsize=SMALL)
    axis.grid(axis="x", color="lightgray", linewidth=0.5)
    axis.set_axisbelow(True)
    gpus = f"{', '.join(sorted({row['ranks'] for row in rows}))} x {rows[0]['device'].removeprefix('NVIDIA ')}"
    finding = ", ".join(f"{kind} {min(found):.0%} to {max(found):.0%}" for kind, found in kinds.items())
    where = origin(rows[:1]).partition(", ")[2] + (note and f"; {note}")
    figure.suptitle(f"{gpus} reach of ideal: {finding}\n{where}", fontsize=LARGE)
    return saved(figure, path)


def picture_of_whole(rows: list[dict], path: Path) -> bool:
    """A part of the picture for each model, a bar for each provider's best setting. False, and no picture, where none
    has one of ours.
    """
    best = best_of(rows)
    parts = {part: [name for name in PROVIDERS if (part, name) in best] for part in SHOWN if (part, "ours") in best}
    if not parts:
        return False
    bars = [*map(len, parts.values())]
    options = {"figsize": (WIDTH, 1.6 + 2 * CASE * sum(bars)), "layout": "constrained", "height_ratios": bars}
    figure, axes = plt.subplots(len(parts), squeeze=False, **options)
    for axis, (part, names) in zip(axes[:, 0], parts.items(), strict=True):
        speeds = {name: float(best[part, name]["tokens_per_second_a_gpu"]) / 1000 for name in names}
        colors = [BLUE if name == "ours" else GRAY for name in names]
        _bars(axis, [*speeds.values()], colors, [PROVIDERS[name] for name in names], SMALL + 1)
        for y, (name, speed) in enumerate(speeds.items()):
            figures = " {tokens_per_second_a_gpu:.1k} tokens/s, MFU {mfu:.2f}, {peak_gib:.0f} GiB".format(
                **best[part, name]
            )
            axis.text(speed, y, figures, fontsize=SMALL + 1, va="center")
        axis.set_xlim(0, 1.75 * max(speeds.values()))
        others = {"padded": "padded SDPA", "fa2": "packed FlashAttention-2"}
        finding = (f"{speeds['ours'] / speeds[name]:.2f} x {others[name]}" for name in names if name in others)
        axis.set_title(f"{SHOWN[part]}: {', '.join(finding)}", fontsize=LARGE, loc="left")
        axis.set_xticks([])
    where = origin([best[part, name] for part, names in parts.items() for name in names])
    figure.supxlabel(f"training steps of sft documents in bf16, tokens per second and GPU; {where}", fontsize=SMALL)
    return saved(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--family")
    arguments = parser.parse_args()
    for path in sorted(RESULTS.glob(f"{arguments.family or '*'}_{arguments.device or '*'}.csv")):
        rows, target = rows_of(path.stem), path.with_suffix(".png")
        if "ratio_to_ours" in rows[0]:
            drawn = picture(rows, target)
        elif path.stem.startswith("parallel_"):
            note = (
                "attention without overlap of what it sends"
                if without_overlap([row for row in rows if row["efficiency"]])
                else ""
            )
            drawn = picture_of_efficiency(rows, target, note)
        else:
            drawn = path.stem.startswith("whole_") and picture_of_whole(rows, target)
        if not drawn:
            target.unlink(missing_ok=True)
        print(f"{path.stem}: {target.name if drawn else 'no picture'}")


if __name__ == "__main__":
    main()
