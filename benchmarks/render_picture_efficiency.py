"""A picture of what several GPUs reach of their ideal, from a CSV with a column of efficiency."""

from pathlib import Path

from render_pictures import CASE, DPI, WIDTH, plt

ONE_OP = {"Ulysses": "tab:blue", "gathered": "tab:orange", "training": "tab:green"}


def picture_of_efficiency(rows: list[dict], path: Path, note: str = "") -> bool:
    """A bar per row, 1 is ideal. False, and no picture, where no row has an efficiency of several ranks."""
    rows = [row for row in rows if row["efficiency"] and row["ranks"] != "1"]
    if not rows:
        return False
    figure, axis = plt.subplots(figsize=(WIDTH, 1.9 + 2 * CASE * len(rows)), layout="constrained")
    for y, row in enumerate(rows):
        efficiency = float(row["efficiency"])
        axis.barh(y, efficiency, height=0.7, color=ONE_OP.get(row["op"].split()[0].rstrip(","), "tab:gray"))
        axis.text(0.01, y, f"{efficiency:.2f}", fontsize=8, va="center", color="white", fontweight="bold")
    axis.axvline(1, color="black", linewidth=1)
    labels = [f"{row['op']}\n{row['shape']}" for row in rows]
    axis.set_yticks(
        range(len(rows)), [label.replace(", sft lengths, ", ", sft lengths,\n", 1) for label in labels], fontsize=7
    )
    axis.invert_yaxis()
    axis.set_xlabel("time of one GPU / (GPUs x their time), measured in the same run", fontsize=8)
    axis.grid(axis="x", color="lightgray", linewidth=0.5)
    axis.set_axisbelow(True)
    where = rows[0]
    figure.suptitle(
        f"{path.stem.rpartition('_')[0]} on {', '.join(sorted({row['ranks'] for row in rows}))} x {where['device']}: how much "
        f"of ideal do several GPUs reach?\ntorch {where['torch']}, commit {where['commit'][:7]}{note and f'; {note}'}",
        fontsize=9,
    )
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return True
