"""What README.md and docs/ say of results: ``made`` gives the text of a region. What a file does not have is left out;
where the file is missing, the region names the command that writes it.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import render_tables_attention as attention
import render_tables_ops as ops
import render_tables_training as training
import render_tables_whole as whole
import result_rows
from result_rows import by_row, json_of, origin, prose, rows_of, table, times

COMMANDS = {  # where it is not bench_FILE.py
    "plan": "simulate_plan.py", "matrix": "../tests/matrix.py", "hybrid_bamba": "bench_hybrid.py --model bamba",
    "parallel-host": "bench_parallel_host.py", "report_docstrings": "bench_demo.py --only docstrings",
    **{name: f"bench_demo.py --only {name}" for name in ("grpo_same_bits", "grpo_vllm", "grpo_tree")},
}  # fmt: skip


def files() -> str:
    """Every result file, by family: its figures and its picture."""
    families = {}
    for path in sorted(result_rows.RESULTS.iterdir()):
        family, _, device = path.stem.rpartition("_")
        if path.suffix in (".csv", ".json", ".png") and device in ("cuda", "cpu"):
            link = f"[{path.suffix[1:]}](benchmarks/results/{path.name})"
            families.setdefault(family, {"cuda": [], "cpu": []})[device].append(link)
    lines = (" | ".join([family, *map(", ".join, found.values())]) for family, found in families.items())
    return table("family | GPU | CPU", lines, empty="–")


def invariance() -> str:
    """Bits that differ in another row, and the time of a step, with the mode and without."""
    rows = rows_of("invariance_cuda")
    eager = (
        "Eager steps without the mode were measured with stock RMSNorm, those with it with one kernel for RMSNorm: that makes them "
        "faster, not the mode ([what it is worth](performance.md#a-training-step)). {origin}."
    )
    step = {(row["model"], row["layers"]): float(row["step_ms"]) for row in rows if row["mode"] == "without"}
    rows = [row | {"times": float(row["step_ms"]) / step[row["model"], row["layers"]]} for row in rows]
    header = "model | GPU | layers | mode | log-probabilities that differ | a training step | time over the step without the mode"
    line = "{model} | {gpu} | {layers} | {mode} | {differ:,.0f} of {compared:,.0f} | {step_ms:.1f} ms | {times:.3f}"
    rows = [row | {"gpu": row["device"].removeprefix("NVIDIA ").partition(" ")[0]} for row in rows]
    return by_row(rows, header, line, eager)


def totals(steps: list[dict]) -> dict:
    """Of a loop of GRPO: tokens, how many of their log-probs differ from the trainer's, by how much, and times."""
    tokens, differ = (sum(step[name] for step in steps) for name in ("tokens", "not_0"))
    rollout, update = (median(step["seconds"][part] for step in steps) for part in ("rollout", "update"))
    largest = max(step["largest"] for step in steps)
    return {
        "tokens": tokens,
        "differ": differ,
        "largest": largest,
        "rollout": rollout,
        "update": update,
        "steps": len(steps),
    }


def same_bits() -> str:
    """How many log-probs of a rollout differ from the trainer's in bf16 on a GPU, with the mode and without."""
    results = json_of("grpo_same_bits_cuda")
    without, within = (totals(results[mode]) for mode in ("without the mode", "invariant=True"))
    return prose(
        "We sampled with transformers' `generate_batch` and trained the same model in bfloat16. "
        f"{without['differ'] / without['tokens']:.0%} of the tokens had another log-probability in training, by up to "
        f"{without['largest']:.3f}. With `apply_packing_ops(model, invariant=True)` {within['differ'] or 'none'} had "
        f"([the mode](docs/same-bits.md); {origin([results])})."
    )


def loops_of(name: str, models: dict[str, str], *loops: str, said: str = "") -> str:
    """Loops of GRPO: how many log-probs of rollouts differ from the trainer's, on each device."""
    lines, where = [], []
    line = "{tokens} | {largest} | {rollout:.2f} s | {update:.2f} s"
    for device, model in models.items():
        results, file = json_of(f"{name}_{device}"), f"benchmarks/results/{name}_{device}"
        where.append(f"[{name}_{device}.json]({file}.json) ([picture]({file}.png)): {origin([results])}.")
        for loop in loops:
            found = totals(results[loop])
            found["tokens"] = f"{found['differ']:,} of {found['tokens']:,}"
            found["largest"] = f"{found['largest']:.1e}" if found["largest"] else "0.0"
            lines.append(f"{model} | {loop} | {found['steps']} | {line.format(**found)}")
    header = "model | loop | steps | log-probs that differ | largest difference | rollout | update"
    return table(header, lines, " ".join([*where, *[said] * bool(said)]))


SMALL = {"cpu": "a Qwen3 of four small layers, float32"}
SAME_BITS = {**SMALL, "cuda": "Qwen3-0.6B's shape, bfloat16"}
SAME_BITS_TIMES = (
    "Do not compare the times of both loops: on the GPU the one without the mode ran stock RMSNorm, and the CPU's times are of a "
    "commit before products had 16 rows, which are slower."
)


def grpo_tree() -> str:
    """Both steps of examples/grpo_tree.py."""
    results, kinds = json_of("grpo_tree_cpu"), ("each sample with its prompt", "as a prefix tree")
    line = "{kind} | {rows:,} | {seconds:.2f} s | {kept_mib:.0f} MiB | {loss:.7f}"
    before, after = (results[kind]["seconds"] for kind in kinds)
    header = "a step of GRPO | tokens computed | time | kept for the backward | loss"
    return table(header, (line.format(kind=kind, **results[kind]) for kind in kinds), (
        f"{before / after:.1f} times as fast. The gradients differ by {results['gradients_differ_by']:.0e} of the largest entry. "
        "From [grpo_tree_cpu.json](benchmarks/results/grpo_tree_cpu.json) ([picture](benchmarks/results/grpo_tree_cpu.png)): "
        f"{SMALL['cpu']}, {origin([results])}."
    ))  # fmt: skip


def prefix_tree_savings() -> str:
    """Tokens and visible pairs, counted: no measurement."""
    lines = []
    for answers, prompt, answer in ((8, 8192, 1024), (8, 2048, 2048), (8, 1024, 8192), (64, 1024, 256), (2, 1024, 256)):
        sample = prompt + answer
        tokens = answers * sample / (prompt + answers * answer)
        within, across = answer * (answer + 1) // 2, answer * prompt
        pairs = answers * sample * (sample + 1) // 2 / (prompt * (prompt + 1) // 2 + answers * (within + across))
        lines.append(f"{answers} | {prompt:,} | {answer:,} | {tokens:.1f} times | {pairs:.1f} times")
    return table("G answers | P | R | fewer tokens | fewer pairs in attention", lines)


def demo() -> str:
    results = json_of("demo_cpu")
    padded, packed = results["runs"]
    first, second = (results["first_step_loss"][mode] for mode in ("padded", "packed"))
    same, speed = "the same" if abs(first - second) < 1e-6 else f"{abs(first - second):.1g} apart", results["speedup"]
    lines = [
        f"real tokens per second, relative | 1 | {times(speed)} | **{speed:.1f}x faster**",
        f"padding | {padded['padding_waste']:.0%} | {packed['padding_waste']:.1%} | ",
        f"optimizer steps | {padded['steps']} | {packed['steps']} | ",
        f"peak memory | {padded['peak_mib']:.0f} MiB | {packed['peak_mib']:.0f} MiB | {packed['peak_mib'] / padded['peak_mib']:.2f}x",
        f"loss of the first step, float32 | {first:.6f} | {second:.6f} | {same}",
    ]
    header = f"{results['documents']:,} docstrings, once each | padded, batches of 8 | packed, rows of 2,048 | "
    return table(header, lines, f"From [demo_cpu.json](benchmarks/results/demo_cpu.json): {origin([results])}.")


def docstrings() -> str:
    layouts, lines = json_of("report_docstrings")["layouts"], []
    names = {"padded": "padded, batches of 8", "length_grouped": "the same, grouped by length",
             "padding_free": "padding-free, batches of 8", "next_fit": "packed, next_fit", "ffd": "packed, ffd"}  # fmt: skip
    for name in (name for name in names if name in layouts):
        layout, ratios = layouts[name], layouts[name]["epoch_time_ratio"]
        faster = "1 / 1" if name == "padded" else f"{ratios['tokens']:.2f}x / {ratios['flops']:.2f}x faster"
        shares = f"{1 - layout['fill']:.1%} | {layout['flop_balance']:.1%}"
        lines.append(f"{names[name]} | {layout['rows']:,} | {layout['steps']} | {shares} | {faster}")
    return table(
        " | rows | steps per epoch | padding | FLOP balance of 8 ranks | estimated epoch, by slots / by flops", lines
    )


def report() -> str:
    rows = rows_of("report_cpu")
    text, chats = ({row["form"]: row for row in rows}[form] for form in ("text", "messages"))
    return prose(
        f"{text['documents']:,.0f} generated documents take {text['seconds']:.0f} s as plain text and {chats['seconds']:.0f} s as "
        f"chats on one core ([report_cpu.csv](benchmarks/results/report_cpu.csv), `bench_report.py --large`; {origin(rows)})."
    )


ROWS = {  # region: file, and what by_row is given: header, line of a row, note
    "build": ("build", "built | cores | time | CPU time of all cores | load before | date | commit",
              "{built} | {cores} | {seconds} s | {cpu_seconds} s | {load} | {date} | {commit!s:.7}", ""),
    "generate": ("generate_cuda", "call | attention | tokens per second | time over packing_ops'",
                 "`{call}` | {provider} | {tokens_per_second:,.0f} | {times_of_ours:.2f}",
                 "{requests} prompts of {prompt_tokens} tokens together, {new_tokens} new tokens. {origin}."),
    "matrix": ("matrix", "torch | Python | torch's CUDA | GPU | tests | date | commit",
               "{torch} | {python} | {torch_cuda} | {gpu} | {result} | {date} | {commit!s:.7}", "", (), "none"),
    "plan": ("plan_cpu", "lengths | ranks | efficiency of the plan | N | speedup over groups of N | speedup over the best size",
             "{kind} | {ranks} | {of_least:.2f} | {static_size} | {one_size_times_plan:.2f} | {best_size_times_plan:.2f}",
             "`benchmarks/simulate_plan.py`, {steps} steps of each, rows of 32,768 on 16 ranks and of 16,384 on 64; commit {commits}."),
    "scan_published": ("scan_published", "ms, as published | forward, 1 document | forward, 8 documents | backward, 1 | backward, 8",
                       "{library} | {forward_1:.2f} | {forward_8:.2f} | {backward_1:.2f} | {backward_8:.2f}", "", (), "–"),
}  # fmt: skip
MADE: dict[str, Callable[[], str]] = {
    **attention.MADE,
    **ops.MADE,
    **training.MADE,
    **whole.MADE,
    **{each.__name__: each for each in (files, invariance, same_bits, grpo_tree, prefix_tree_savings)},
    **{each.__name__: each for each in (demo, docstrings, report)},
    **{name: partial(lambda file, *spec: by_row(rows_of(file), *spec), *spec) for name, spec in ROWS.items()},
    "grpo_same_bits": partial(
        loops_of, "grpo_same_bits", SAME_BITS, "without the mode", "invariant=True", said=SAME_BITS_TIMES
    ),
    "grpo_vllm": partial(loops_of, "grpo_vllm", SMALL, "vLLM alone", "packing_ops"),
}


def made(name: str) -> str:
    """What a page has between the marks of a region."""
    try:
        return MADE[name]()
    except FileNotFoundError as missing:
        stem = Path(missing.filename).stem.removesuffix("_cuda").removesuffix("_cpu")
        return f"Not run yet: `benchmarks/{COMMANDS.get(stem, f'bench_{stem}.py')}`."
