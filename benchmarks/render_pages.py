"""The figures of README.md and docs/, from benchmarks/results: python benchmarks/render_pages.py [--check]

Whatever stands between ``<!-- results: NAME -->`` and ``<!-- end -->`` is what a function of render_pages_attention.py,
render_pages_memory.py, render_pages_ops.py, render_pages_training.py or render_pages_whole.py makes of the result
files; --check changes nothing and fails where it is something else.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from statistics import median

import render_pages_attention
import render_pages_memory
import render_pages_ops
import render_pages_training
import render_pages_whole
from result_rows import RESULTS, is_measured, markdown, origin, prose, rows_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REGION = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.S)


def files() -> str:
    """Every result file, by family: its figures and its picture."""
    families = {}
    for path in sorted(RESULTS.iterdir()):
        family, _, device = path.stem.rpartition("_")
        if path.suffix in (".csv", ".json", ".png") and device in ("cuda", "cpu"):
            families.setdefault(family, {}).setdefault(device, []).append(path)
    rows = []
    for family, found in families.items():
        links = [
            ", ".join(f"[{path.suffix[1:]}](benchmarks/results/{path.name})" for path in found.get(device, ()))
            for device in ("cuda", "cpu")
        ]
        rows.append([family, *(link or render_pages_ops.NOT_MEASURED for link in links)])
    return markdown(["family", "GPU", "CPU"], rows)


def matrix() -> str:
    """What tests/matrix.py ran."""
    rows = rows_of("matrix") if (RESULTS / "matrix.csv").exists() else []
    if not rows:
        return "Not run yet."
    cells = [
        [r["torch"], r["python"], r["torch_cuda"], r["gpu"] or "none", r["result"], r["date"], r["commit"][:7]]
        for r in rows
    ]
    return markdown(["torch", "Python", "torch's CUDA", "GPU", "tests", "date", "commit"], cells)


def invariance() -> str:
    """Bits that differ in another row, and the time of a step, with the mode and without."""
    if not is_measured("invariance_cuda"):
        return "Not run yet: `benchmarks/bench_invariance.py`."
    rows = rows_of("invariance_cuda")
    step = {(row["model"], row["layers"], row["mode"]): float(row["step_ms"]) for row in rows}
    cells = []
    for row in rows:
        times = float(row["step_ms"]) / step[row["model"], row["layers"], "without"]
        differ = f"{int(row['differ']):,} of {int(row['compared']):,}"
        cells.append(
            [row["model"], row["layers"], row["mode"], differ, f"{float(row['step_ms']):.1f} ms", f"{times:.3f}"]
        )
    header = ["model", "layers", "mode", "log-probabilities that differ", "a training step", "times that without"]
    return f"{markdown(header, cells)}\n\n{origin(rows)}."


def same_bits() -> str:
    """How many log-probs of a rollout differ from the trainer's in bf16 on a GPU, with the mode and without."""
    path = RESULTS / "grpo_same_bits_cuda.json"
    if not path.exists():
        return "Not run yet: `benchmarks/bench_demo.py --only grpo_same_bits --device cuda`."
    results = json.loads(path.read_text())
    without, within = (results[mode] for mode in ("without the mode", "invariant=True"))
    differ, still = (sum(step["not_0"] for step in steps) for steps in (without, within))
    tokens, largest = sum(step["tokens"] for step in without), max(step["largest"] for step in without)
    where = f"{results['device']}, torch {results['torch']}, commit {results['commit'][:7]}"
    return prose(
        f"In bfloat16 {differ / tokens:.0%} of the log-probabilities of a rollout differ from the trainer's, by up to "
        f"{largest:.3f}. With `apply_packing_ops(model, invariant=True)` {still or 'none'} do: a token has the same bits in any "
        f"pack and micro-batch ([the mode](docs/same-bits.md), [picture](benchmarks/results/{path.stem}.png); {where})."
    )


def grpo_same_bits() -> str:
    """Both loops of examples/grpo_same_bits.py, on each device that it has run on."""
    models = {"cpu": "a Qwen3 of four small layers, float32", "cuda": "Qwen3-0.6B's shape, bfloat16"}
    return _loops("grpo_same_bits", models, ("without the mode", "invariant=True"))


def grpo_vllm() -> str:
    """Both loops of examples/grpo_vllm.py."""
    return _loops("grpo_vllm", {"cpu": "a Qwen3 of four small layers, float32"}, ("vLLM alone", "packing_ops"))


def _loops(name: str, models: dict[str, str], loops: tuple[str, str]) -> str:
    """Loops of GRPO: how many log-probs of rollouts differ from the trainer's, on each device that has a result."""
    cells, where = [], []
    for device, model in models.items():
        path = RESULTS / f"{name}_{device}.json"
        if not path.exists():
            continue
        results = json.loads(path.read_text())
        where.append(
            f"[{path.name}](benchmarks/results/{path.name}) ([picture](benchmarks/results/{path.stem}.png)): "
            f"{results['device']}, torch {results['torch']}, commit {results['commit'][:7]}."
        )
        for loop in loops:
            steps = results[loop]
            tokens, differ = (sum(step[name] for step in steps) for name in ("tokens", "not_0"))
            largest = max(step["largest"] for step in steps)
            seconds = [median(step["seconds"][part] for step in steps) for part in ("rollout", "update")]
            found = f"{differ:,} of {tokens:,}", f"{largest:.1e}" if largest else "0.0"
            cells.append([model, loop, str(len(steps)), *found, *(f"{each:.2f} s" for each in seconds)])
    if not cells:
        return f"Not run yet: `benchmarks/bench_demo.py --only {name}`."
    head = ["model", "", "steps", "log-probs that differ", "largest difference", "rollout", "update"]
    return markdown(head, cells) + "\n\n" + prose(" ".join(where))


def grpo_tree() -> str:
    """Both steps of examples/grpo_tree.py."""
    path = RESULTS / "grpo_tree_cpu.json"
    if not path.exists():
        return "Not run yet: `benchmarks/bench_demo.py --only grpo_tree`."
    results = json.loads(path.read_text())
    kinds = ("each sample with its prompt", "as a prefix tree")
    before, after = (results[kind] for kind in kinds)
    cells = [
        [kind, f"{each['rows']:,}", f"{each['seconds']:.2f} s", f"{each['kept_mib']:.0f} MiB", f"{each['loss']:.7f}"]
        for kind, each in zip(kinds, (before, after), strict=True)
    ]
    table = markdown(["a step of GRPO", "rows computed", "time", "kept for the backward", "loss"], cells)
    return (
        table
        + "\n\n"
        + prose(
            f"{before['seconds'] / after['seconds']:.1f} times as fast. The gradients differ by "
            f"{results['gradients_differ_by']:.0e} of the largest entry. From [grpo_tree_cpu.json](benchmarks/results/"
            f"grpo_tree_cpu.json) ([picture](benchmarks/results/grpo_tree_cpu.png)): a Qwen3 of four small layers, float32, "
            f"{results['device']}, torch {results['torch']}, commit {results['commit'][:7]}."
        )
    )


def prefix_tree_savings() -> str:
    """Tokens and visible pairs, counted: no measurement."""
    cells = []
    for answers, prompt, answer in ((8, 8192, 1024), (8, 2048, 2048), (8, 1024, 8192), (64, 1024, 256), (2, 1024, 256)):
        sample = prompt + answer
        tokens = answers * sample / (prompt + answers * answer)
        within, across = answer * (answer + 1) // 2, answer * prompt
        pairs = answers * sample * (sample + 1) // 2 / (prompt * (prompt + 1) // 2 + answers * (within + across))
        cells.append([str(answers), f"{prompt:,}", f"{answer:,}", f"{tokens:.1f} times", f"{pairs:.1f} times"])
    return markdown(["G answers", "P", "R", "fewer tokens", "fewer pairs in attention"], cells)


def build() -> str:
    """What bench_build.py measured."""
    rows = rows_of("build") if (RESULTS / "build.csv").exists() else []
    if not rows:
        return "Not measured yet."
    cells = [
        [r["built"], r["cores"], f"{r['seconds']} s", f"{r['cpu_seconds']} s", r["load"], r["date"], r["commit"][:7]]
        for r in rows
    ]
    return markdown(["built", "cores", "time", "CPU time of all cores", "load before", "date", "commit"], cells)


TABLES = (
    render_pages_attention.TABLES
    | render_pages_memory.TABLES
    | render_pages_ops.TABLES
    | render_pages_training.TABLES
    | render_pages_whole.TABLES
    | {"build": build, "files": files, "invariance": invariance, "matrix": matrix, "same_bits": same_bits}
    | {"grpo_same_bits": grpo_same_bits, "grpo_tree": grpo_tree, "grpo_vllm": grpo_vllm}
    | {"prefix_tree_savings": prefix_tree_savings}
)


def rewritten(text: str, page: Path) -> tuple[str, list[str]]:
    """The text of a page with today's figures, and the regions that had others."""
    changed = []
    results = os.path.relpath(ROOT / "benchmarks" / "results", page.parent)

    def replace(match: re.Match) -> str:
        begin, name, before, end = match.groups()
        after = f"{TABLES[name]()}\n".replace("](benchmarks/results/", f"]({results}/")  # as the page reaches them
        if after != before:
            changed.append(name)
        return begin + after + end

    return REGION.sub(replace, text), changed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stale = []
    for page in PAGES:
        name = page.relative_to(ROOT)
        text, changed = rewritten(page.read_text(), page)
        stale += [f"{name}: not what benchmarks/results says: {', '.join(changed)}"] if changed else []
        if changed and not arguments.check:
            page.write_text(text)
            print(f"{name}: rewritten: {', '.join(changed)}")
    if stale and arguments.check:
        sys.exit("\n".join([*stale, "make readme writes them again"]))
    if not stale:
        print("README.md and docs: are what benchmarks/results says")


if __name__ == "__main__":
    main()
