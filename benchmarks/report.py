"""Tables and pictures from benchmarks/results: python benchmarks/report.py [--device cpu|cuda] [--family NAME]

Prints a Markdown table per family (what README.md shows) and writes results/<family>_<device>.png.
"""

import argparse
import csv
from collections import defaultdict

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from harness import RESULTS


def cases_of(rows: list[dict]) -> dict[tuple, list[dict]]:
    """Rows of one measured case together, ours first."""
    cases = defaultdict(list)
    for row in rows:
        cases[row["op"], row["shape"], row["dtype"]].append(row)
    return cases


def table(rows: list[dict]) -> str:
    lines = ["| op | shape | dtype | ours | copy rate | others, times ours |", "|---|---|---|---|---|---|"]
    for (op, shape, dtype), providers in cases_of(rows).items():
        ours = providers[0]
        others = ", ".join(f"{r['provider']} {float(r['ratio_to_ours']):.2f}" for r in providers if r is not ours)
        percent = f"{ours['copy_rate_percent']} %" if ours["copy_rate_percent"] else ""
        lines.append(f"| {op} | {shape} | {dtype} | {float(ours['p50_us']):,.1f} us | {percent} | {others} |")
    first = rows[0]
    machine = f"{first['device']}, torch {first['torch']}, commit {first['commit']}"
    return "\n".join([*lines, "", f"{machine}; medians, every provider in the same run."])


def plain_table(rows: list[dict]) -> str:
    """Of a CSV that has no timings: every column as it is."""
    names = [name for name in rows[0] if name not in ("device", "torch", "commit")]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *(f"| {' | '.join(row[name] for name in names)} |" for row in rows)])


def picture(rows: list[dict], path) -> None:
    """Time of every provider as a multiple of ours, one group of bars per case."""
    cases = cases_of(rows)
    figure, axis = plt.subplots(figsize=(10, 1 + 0.35 * len(rows)), constrained_layout=True)
    y, ticks, labels = 0, [], []
    for (op, shape, dtype), providers in cases.items():
        for row in providers:
            color = "tab:blue" if row is providers[0] else "tab:gray"
            axis.barh(y, float(row["ratio_to_ours"]), color=color)
            axis.text(float(row["ratio_to_ours"]), y, f" {float(row['p50_us']):,.0f} us", va="center", fontsize=7)
            ticks.append(y)
            labels.append(f"{op} {shape} {dtype}: {row['provider']}" if row is providers[0] else row["provider"])
            y += 1
        y += 0.7
    axis.set(yticks=ticks, xlabel="time, ours = 1", title=f"{path.stem}: {rows[0]['device']}")
    axis.set_yticklabels(labels, fontsize=7)
    axis.invert_yaxis()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--family")
    arguments = parser.parse_args()
    for path in sorted(RESULTS.glob(f"{arguments.family or '*'}_{arguments.device or '*'}.csv")):
        rows = list(csv.DictReader(path.open()))
        if "ratio_to_ours" not in rows[0]:
            print(f"\n### {path.stem}\n\n{plain_table(rows)}")
            continue
        print(f"\n### {path.stem}\n\n{table(rows)}")
        picture(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
