"""Tables and pictures from benchmarks/results: python benchmarks/render_results.py [--device cpu|cuda] [--family NAME]

Prints a Markdown table per family and writes results/<family>_<device>.png, from the CSV alone. Tables of README and
docs: benchmarks/render_pages.py.
"""

import argparse

from render_picture_efficiency import picture_of_efficiency
from render_picture_whole import picture_of_whole
from render_pictures import picture
from result_rows import (
    COPY,
    PERCENT_OF_COPY,
    RESULTS,
    cases_of,
    markdown,
    origin,
    percent_of_copy,
    rows_of,
    without_overlap,
)


def table(rows: list[dict]) -> str:
    lines, copied = [], False
    for case, providers in cases_of(rows).items():
        ours, *rest = providers.values()
        others = ", ".join(
            f"{row['provider']} {float(row['ratio_to_ours']):.2f}" for row in rest if row["provider"] != COPY
        )
        percent = percent_of_copy(providers)
        copied |= percent is not None
        lines.append([*case, f"{float(ours['p50_us']):,.1f} us", "" if percent is None else f"{percent:.0f}%", others])
    header = ["op", "shape", "dtype", "ours", "percent of copy", "others, times ours"]
    note = f" {PERCENT_OF_COPY}" if copied else ""
    return f"{markdown(header, lines)}\n\n{origin(rows)}; medians, every provider in the same run.{note}"


def plain_table(rows: list[dict]) -> str:
    """Of a CSV that has no timings: every column as it is."""
    names = [name for name in rows[0] if name not in ("device", "torch", "commit")]
    return markdown(names, [[row[name] for name in names] for row in rows])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--family")
    arguments = parser.parse_args()
    for path in sorted(RESULTS.glob(f"{arguments.family or '*'}_{arguments.device or '*'}.csv")):
        rows = rows_of(path.stem)
        if "ratio_to_ours" not in rows[0]:
            print(f"\n### {path.stem}\n\n{plain_table(rows)}")
            if path.stem.startswith("parallel_"):
                note = "attention without overlap of what it sends" if without_overlap(rows) else ""
                picture_of_efficiency(rows, path.with_suffix(".png"), note)
            if path.stem.startswith("whole_"):
                picture_of_whole(rows, path.with_suffix(".png"))
            continue
        print(f"\n### {path.stem}\n\n{table(rows)}")
        if not picture(rows, path.with_suffix(".png")):
            path.with_suffix(".png").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
