"""A picture of whole models in training: tokens per second and GPU of each provider's best setting."""

from pathlib import Path

from render_pages_whole import PROVIDERS, SHOWN, best_of
from render_pictures import CASE, DPI, WIDTH, plt

ORDER = ("padded", "fa2", "liger", "ours")


def picture_of_whole(rows: list[dict], path: Path) -> bool:
    """A part of the picture for each model, a bar for each provider. False, and no picture, where none has one of ours."""
    best = best_of(rows)
    parts = [part for part in SHOWN if (part, "ours") in best]
    if not parts:
        return False
    bars = [sum((part, name) in best for name in ORDER) for part in parts]
    size = WIDTH, 1.2 + 2 * CASE * sum(bars)
    options = {"figsize": size, "layout": "constrained", "squeeze": False, "height_ratios": bars}
    figure, axes = plt.subplots(len(parts), **options)
    for axis, part in zip(axes[:, 0], parts, strict=True):
        shown = [name for name in ORDER if (part, name) in best]
        for y, name in enumerate(shown):
            row = best[part, name]
            speed = float(row["tokens_per_second_a_gpu"]) / 1000
            axis.barh(y, speed, height=0.7, color="tab:blue" if name == "ours" else "tab:gray")
            said = f" {speed:.1f}k tokens/s, MFU {float(row['mfu']):.2f}, {float(row['peak_gib']):.0f} GiB"
            axis.text(speed, y, said, fontsize=8, va="center")
        axis.set_yticks(range(len(shown)), [PROVIDERS[name] for name in shown], fontsize=8)
        axis.set_xlim(0, 1.45 * max(float(best[part, name]["tokens_per_second_a_gpu"]) / 1000 for name in shown))
        axis.invert_yaxis()
        axis.set_title(f"{SHOWN[part]}, a training step of sft documents, bf16", fontsize=9, loc="left")
        axis.set_xticks([])
    where = best[parts[0], "ours"]
    figure.supxlabel(f"{where['device']}, torch {where['torch']}, commit {where['commit'][:7]}", fontsize=7)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return True
