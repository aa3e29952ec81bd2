"""Tables and pictures from benchmarks/results: python benchmarks/report.py [--device cpu|cuda] [--family NAME]

Prints a Markdown table per family and writes results/<family>_<device>.png. README.md's tables: benchmarks/readme.py.
"""

import argparse

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from result_rows import RESULTS, cases_of, markdown, origin, rows_of


def table(rows: list[dict]) -> str:
    lines = []
    for case, providers in cases_of(rows).items():
        ours, *rest = providers.values()
        others = ", ".join(f"{row['provider']} {float(row['ratio_to_ours']):.2f}" for row in rest)
        percent = f"{ours['copy_rate_percent']} %" if ours["copy_rate_percent"] else ""
        lines.append([*case, f"{float(ours['p50_us']):,.1f} us", percent, others])
    header = ["op", "shape", "dtype", "ours", "copy rate", "others, times ours"]
    return f"{markdown(header, lines)}\n\n{origin(rows)}; medians, every provider in the same run."


def plain_table(rows: list[dict]) -> str:
    """Of a CSV that has no timings: every column as it is."""
    names = [name for name in rows[0] if name not in ("device", "torch", "commit")]
    return markdown(names, [[row[name] for name in names] for row in rows])


def picture(rows: list[dict], path) -> None:
    """Time of every provider as a multiple of ours, one group of bars per case."""
    cases = cases_of(rows)
    figure, axis = plt.subplots(figsize=(10, 1 + 0.35 * len(rows)), constrained_layout=True)
    y, ticks, labels = 0, [], []
    for (op, shape, dtype), providers in cases.items():
        first, *_ = providers.values()
        for row in providers.values():
            color = "tab:blue" if row is first else "tab:gray"
            axis.barh(y, float(row["ratio_to_ours"]), color=color)
            axis.text(float(row["ratio_to_ours"]), y, f" {float(row['p50_us']):,.0f} us", va="center", fontsize=7)
            ticks.append(y)
            labels.append(f"{op} {shape} {dtype}: {row['provider']}" if row is first else row["provider"])
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
        rows = rows_of(path.stem)
        if "ratio_to_ours" not in rows[0]:
            print(f"\n### {path.stem}\n\n{plain_table(rows)}")
            continue
        print(f"\n### {path.stem}\n\n{table(rows)}")
        picture(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
