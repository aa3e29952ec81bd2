"""Table, picture and JSON of the padded / packed comparison. The picture is drawn from the JSON alone."""

from dataclasses import asdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.table import Table

import packing_ops as po

from .results import save_results

COLORS = {"padded": "#D55E00", "packed": "#0072B2"}
WASTE = "gainsboro"
SHOWN = 2  # padded batches in the picture


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


def shown_documents(lengths: list[int], arguments) -> dict:
    """Two padded batches of the run and the same documents packed, padding as much of them as of the whole run.

    The order is the one in which batches of documents are shuffled for the padded run (``groups_of``).
    """
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(arguments.seed)).tolist()
    size, capacity = arguments.batch_size, arguments.capacity

    def padding(documents: list[int]) -> tuple[float, float]:
        batches = [documents[i : i + size] for i in range(0, len(documents), size)]
        padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
        packed = capacity * po.pack_sequences([lengths[i] for i in documents], capacity).num_bins
        real = sum(lengths[i] for i in documents)
        return 1 - real / padded, 1 - real / packed

    whole = padding(order)
    candidates = [order[i : i + SHOWN * size] for i in range(0, max(1, len(order) - SHOWN * size + 1), size)]
    chosen = min(candidates, key=lambda group: sum(abs(a - b) for a, b in zip(padding(group), whole, strict=True)))
    found = [lengths[i] for i in chosen]
    return {
        "lengths": found,
        "batch_size": size,
        "capacity": capacity,
        "rows": po.pack_sequences(found, capacity).bins,
    }


def save_picture(path: Path, results: dict) -> None:
    """Padded batches above the same documents in packed rows, slot for slot; beside them loss against seconds."""
    figure = plt.figure(figsize=(10, 4), layout="constrained")
    padded, loss, packed = figure.subplot_mosaic(
        [["padded", "loss"], ["packed", "loss"]],
        width_ratios=[3, 2],
        height_ratios=[len(results["shown"]["lengths"]), max(3, len(results["shown"]["rows"]))],
    ).values()
    _draw_rows(padded, packed, results)
    seconds = {run["mode"]: run["seconds_seen"][-1] for run in results["runs"]}
    for run in results["runs"]:
        loss.plot(run["seconds_seen"], smoothed(run["losses"]), label=run["mode"], color=COLORS[run["mode"]])
    saved = f"{seconds['packed']:.2g} s packed, {seconds['padded']:.2g} s padded"
    loss.set_title(f"The same documents: {saved}", fontsize=10)
    loss.set(xlabel="seconds", ylabel="loss per target token (mean of 15 steps)")
    loss.legend()
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _draw_rows(padded, packed, results: dict) -> None:
    """A colour per document, the same in both; grey is waste."""
    shown, palette = results["shown"], [color for i, color in enumerate(plt.cm.tab20.colors) if i not in (14, 15)]
    lengths, size, capacity = shown["lengths"], shown["batch_size"], shown["capacity"]
    for y, length in enumerate(lengths):
        first = y - y % size
        padded.barh(y, max(lengths[first : first + size]), height=0.86, color=WASTE)
        padded.barh(y, length, height=0.86, color=palette[y % len(palette)])
    for y, row in enumerate(shown["rows"]):
        packed.barh(y, capacity, height=0.86, color=WASTE)
        left = 0
        for document in row:
            packed.barh(y, lengths[document], left=left, height=0.86, color=palette[document % len(palette)])
            left += lengths[document]
    (padded_run, packed_run), count = results["runs"], len(lengths)
    padded.set_title(
        f"Padded batches of {size}: {padded_run['padding_waste']:.0%} of the run is padding (grey)", fontsize=11
    )
    packed.set_title(f"The same {count} documents packed: {packed_run['padding_waste']:.1%} of the run", fontsize=11)
    packed.set_xlabel("slots")
    for axis, num_rows in ((padded, count), (packed, max(3, len(shown["rows"])))):
        axis.set(yticks=[], xlim=(0, max(capacity, *lengths)), ylim=(num_rows - 0.5, -0.5))
        axis.spines[["top", "right", "left"]].set_visible(False)
    padded.set_xticklabels([])


def save_report(stem: Path, lengths: list[int], cut: int, arguments, runs, losses, **more) -> None:
    """stem.json and stem.png of two runs, padded and packed, and the table on the screen; ``more``: for the JSON."""
    results = {
        "documents": len(lengths),
        "documents_cut": cut,
        **more,
        "first_step_loss": losses,
        "shown": shown_documents(lengths, arguments),
        "speedup": runs[1].tokens_per_second / runs[0].tokens_per_second,
        "runs": [
            asdict(r) | {"tokens_per_second": r.tokens_per_second, "padding_waste": r.padding_waste} for r in runs
        ],
    }
    save_results(stem.with_suffix(".json"), results, arguments.device)
    save_picture(stem.with_suffix(".png"), results)
    print_table(runs, losses)
    print(f"written: {stem}.png")
