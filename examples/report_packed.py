"""Table, picture and JSON of the padded / packed comparison."""

from dataclasses import asdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table
from save_results import save_results

COLORS = {"padded": "tab:gray", "packed": "tab:blue"}


def print_table(runs, losses: dict[str, float]) -> None:
    table = Table("", *(run.mode for run in runs), "packed vs padded", title="the same documents, once each")
    rows = [
        ("real tokens per second", "{:,.0f}", [r.tokens_per_second for r in runs], True),
        ("padding waste", "{:.1%}", [r.padding_waste for r in runs], False),
        ("steps", "{}", [r.steps for r in runs], False),
        ("seconds", "{:.1f}", [r.seconds for r in runs], True),
        ("peak memory (MiB)", "{:,.0f}", [r.peak_mib for r in runs], True),
        ("last loss (mean of 20 steps)", "{:.3f}", [sum(r.losses[-20:]) / len(r.losses[-20:]) for r in runs], False),
    ]
    held_out = [getattr(run, "held_out_loss", None) for run in runs]
    if None not in held_out:  # means over the last steps are over other documents in each run
        rows[-1] = ("held-out loss, same tokens", "{:.3f}", held_out, False)
    for name, form, (a, b), ratio in rows:
        table.add_row(name, form.format(a), form.format(b), f"{b / a:.2f}x" if ratio else "")
    difference = abs(losses["packed"] - losses["padded"])
    table.add_row(
        "first-step loss", f"{losses['padded']:.6f}", f"{losses['packed']:.6f}", f"differs by {difference:.1e}"
    )
    Console(width=100).print(table)


def smoothed(values: list[float], span: int = 15) -> list[float]:
    return [
        sum(values[max(0, i - span + 1) : i + 1]) / len(values[max(0, i - span + 1) : i + 1])
        for i in range(len(values))
    ]


def save_picture(path: Path, lengths: list[int], rows: list[list[int]], capacity: int, runs) -> None:
    """Length histogram; how the packed rows are filled; loss against real tokens."""
    figure, (histogram, fill, loss) = plt.subplots(1, 3, figsize=(15, 4.2), constrained_layout=True)
    histogram.hist(lengths, bins=60, color="tab:green")
    histogram.set(title=f"{len(lengths)} documents", xlabel="tokens", ylabel="documents")

    shown = rows[:: max(1, len(rows) // 40)][:40]
    for y, row in enumerate(shown):
        left = 0
        for i, length in enumerate(row):
            fill.barh(y, length, left=left, height=0.9, color=plt.cm.tab20(i % 20))
            left += length
    fill.axvline(capacity, color="black", linewidth=1)
    waste = 1 - sum(lengths) / (len(rows) * capacity)
    fill.set(title=f"{len(shown)} of {len(rows)} packed rows ({waste:.1%} empty)", xlabel="slot", ylabel="row")

    for run in runs:
        loss.plot(run.tokens_seen, smoothed(run.losses), label=run.mode, color=COLORS[run.mode])
    loss.set(title="loss (mean of 15 steps)", xlabel="real tokens", ylabel="loss per target token")
    loss.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def save_report(
    stem: Path, lengths: list[int], cut: int, rows: list[list[int]], arguments, runs, losses, **more
) -> None:
    """stem.json and stem.png of two runs, padded and packed, and the table on the screen; ``more``: for the JSON."""
    results = {
        "documents": len(lengths),
        "documents_cut": cut,
        **more,
        "first_step_loss": losses,
        "speedup": runs[1].tokens_per_second / runs[0].tokens_per_second,
        "runs": [
            asdict(r) | {"tokens_per_second": r.tokens_per_second, "padding_waste": r.padding_waste} for r in runs
        ],
    }
    save_results(stem.with_suffix(".json"), results, arguments.device)
    filled = [[lengths[i] for i in row] for row in rows]
    save_picture(stem.with_suffix(".png"), lengths, filled, arguments.capacity, runs)
    print_table(runs, losses)
    print(f"written: {stem}.png")
