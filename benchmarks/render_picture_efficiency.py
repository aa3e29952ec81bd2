"""A picture of what several GPUs reach of their ideal, from a CSV with a column of efficiency."""

from pathlib import Path

from render_pictures import BLUE, CASE, DPI, GREEN, LARGE, ORANGE, SMALL, WIDTH, plt

ONE_OP = {"Ulysses": BLUE, "gathered": ORANGE, "training": GREEN}


def picture_of_efficiency(rows: list[dict], path: Path, note: str = "") -> bool:
    """A bar per row, 1 is ideal. False, and no picture, where no row has an efficiency of several ranks."""
    rows = [row for row in rows if row["efficiency"] and row["ranks"] != "1"]
    if not rows:
        return False
    figure, axis = plt.subplots(figsize=(WIDTH, 2.1 + 2.1 * CASE * len(rows)), layout="constrained")
    for y, row in enumerate(rows):
        efficiency = float(row["efficiency"])
        axis.barh(y, efficiency, height=0.7, color=ONE_OP.get(_kind(row), "tab:gray"))
        axis.text(0.01, y, f"{efficiency:.2f}", fontsize=LARGE, va="center", color="black", fontweight="bold")
    axis.axvline(1, color="black", linewidth=1)
    labels = [f"{row['op']}\n{row['shape'].partition(': T=')[0]}" for row in rows]
    labels = [label.replace(", sft lengths, ", ", sft lengths,\n", 1) for label in labels]
    axis.set_yticks(range(len(rows)), labels, fontsize=SMALL)
    axis.invert_yaxis()
    axis.set_xlabel("of ideal: time of one GPU / (GPUs x their time), in the same run", fontsize=SMALL)
    axis.grid(axis="x", color="lightgray", linewidth=0.5)
    axis.set_axisbelow(True)
    where = rows[0]
    gpus = ", ".join(sorted({row["ranks"] for row in rows}))
    origin = f"torch {where['torch']}, commit {where['commit'][:7]}{note and f'; {note}'}"
    title = f"{gpus} x {where['device'].removeprefix('NVIDIA ')} reach of ideal: {_finding(rows)}"
    figure.suptitle(f"{title}\n{origin}", fontsize=LARGE)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return True


def _kind(row: dict) -> str:
    return row["op"].split()[0].rstrip(",")


def _finding(rows: list[dict]) -> str:
    """From how much to how much of ideal each kind of row reaches."""
    kinds: dict[str, list[float]] = {}
    for row in rows:
        kinds.setdefault(_kind(row), []).append(float(row["efficiency"]))
    return ", ".join(f"{kind} {min(found):.0%} to {max(found):.0%}" for kind, found in kinds.items())
