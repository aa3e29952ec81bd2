"""A picture of whole models in training: tokens per second and GPU of each provider's best setting."""

from pathlib import Path

from render_pages_whole import PROVIDERS, SHOWN, best_of
from render_pictures import BLUE, CASE, DPI, GRAY, LARGE, SMALL, WIDTH, plt

IN_SHORT = {"padded": "padded SDPA", "fa2": "packed FlashAttention-2"}
ORDER = ("padded", "fa2", "liger", "ours")


def picture_of_whole(rows: list[dict], path: Path) -> bool:
    """A part of the picture for each model, a bar for each provider. False, and no picture, where none has one of
    ours.
    """
    best = best_of(rows)
    parts = [part for part in SHOWN if (part, "ours") in best]
    if not parts:
        return False
    bars = [sum((part, name) in best for name in ORDER) for part in parts]
    size = WIDTH, 1.6 + 2 * CASE * sum(bars)
    options = {"figsize": size, "layout": "constrained", "squeeze": False, "height_ratios": bars}
    figure, axes = plt.subplots(len(parts), **options)
    for axis, part in zip(axes[:, 0], parts, strict=True):
        shown = [name for name in ORDER if (part, name) in best]
        for y, name in enumerate(shown):
            row = best[part, name]
            speed = float(row["tokens_per_second_a_gpu"]) / 1000
            axis.barh(y, speed, height=0.7, color=BLUE if name == "ours" else GRAY)
            said = f" {speed:.1f}k tokens/s, MFU {float(row['mfu']):.2f}, {float(row['peak_gib']):.0f} GiB"
            axis.text(speed, y, said, fontsize=SMALL + 1, va="center")
        axis.set_yticks(range(len(shown)), [PROVIDERS[name] for name in shown], fontsize=SMALL + 1)
        axis.set_xlim(0, 1.75 * max(float(best[part, name]["tokens_per_second_a_gpu"]) / 1000 for name in shown))
        axis.invert_yaxis()
        axis.set_title(f"{SHOWN[part]}: {_finding(best, part)}", fontsize=LARGE, loc="left")
        axis.set_xticks([])
    where = best[parts[0], "ours"]
    origin = f"{where['device']}, torch {where['torch']}, commit {where['commit'][:7]}"
    figure.supxlabel(f"training steps of sft documents in bf16, tokens per second and GPU; {origin}", fontsize=SMALL)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return True


def _finding(best: dict, part: str) -> str:
    """How many times as fast as each other provider ours is."""
    speeds = {name: float(best[part, name]["tokens_per_second_a_gpu"]) for name in ORDER if (part, name) in best}
    others = (f"{speeds['ours'] / speed:.2f} x {IN_SHORT[name]}" for name, speed in speeds.items() if name in IN_SHORT)
    return ", ".join(others)
