"""What README.md and docs/ say of whole models in training: a function for each region."""

from result_rows import RESULTS, commits, is_measured, markdown, origin, prose, read_rows, rows_of, times

NOT_RUN = "Not run yet: `benchmarks/bench_whole.py`."
PROVIDERS = {
    "ours": "packing_ops, fused_loss",
    "fa2": "packed, torch's FlashAttention-2",
    "liger": "packed, Liger's kernels, torch's FlashAttention-2",
    "padded": "padded batches of 8, SDPA",
}


def _measured() -> list[dict]:
    return rows_of("whole_cuda") if is_measured("whole_cuda") else []


def _model(row: dict) -> str:
    """Which model, trained how, on what: rows with the same have the same documents."""
    where = f"{row['wrapper']} on {row['ranks']} GPUs" if row["ranks"] != "1" else "one GPU"
    return f"{row['model']}{', LoRA' if row['lora'] == '1' else ''}, {where}, {row['documents']} documents"


def _how(row: dict) -> str:
    kept = row["checkpointing"]
    checkpointing = {"": "no checkpointing", "full": "full checkpointing"}.get(kept) or f"checkpoint_policy, {kept} GiB"
    rows = [] if row["provider"] == "padded" else [f"rows of {int(row['row']):,}"]
    return ", ".join([*rows, *(["compiled layers"] if row["compiled"] == "1" else []), checkpointing])


def _cells(row: dict) -> list[str]:
    if row["error"]:
        fails = "out of memory" if "OutOfMemory" in row["error"] else "fails"
        return [fails, "", "", ""]
    speed = f"{float(row['tokens_per_second_a_gpu']) / 1000:.1f}k"
    return [speed, f"{float(row['mfu']):.3f}", f"{float(row['peak_gib']):.1f}", row["loss"]]


def whole() -> str:
    """A table of all rows, model after model."""
    rows = _measured()
    if not rows:
        return NOT_RUN
    cells = []
    for model in dict.fromkeys(map(_model, rows)):
        cells.append([f"**{model}**", "", "", "", "", ""])
        cells += [[PROVIDERS[row["provider"]], _how(row), *_cells(row)] for row in rows if _model(row) == model]
    header = ["trained with", "settings", "tokens/s per GPU", "MFU", "peak GiB", "first loss"]
    note = (
        "Every row of a model trains on the same documents, in bf16 with fused AdamW; times are medians of three steps. Padding "
        "counts as no token. MFU: the model's operations a second over the 989 TFLOP/s of the GPU. A token takes 6 operations for "
        f"each parameter that it is multiplied with (4 with LoRA), and attention's. {origin(rows)}."
    )
    return f"{markdown(header, cells)}\n\n{prose(note)}"


def checkpointing() -> str:
    """Ours with full checkpointing, with policies, without."""
    rows = [row for row in _measured() if row["provider"] == "ours" and not row["error"] and row["model"] == "Qwen3-8B"]
    rows = [row for row in rows if row["documents"] == "sft"]
    full = {_model(row): float(row["tokens_per_second_a_gpu"]) for row in rows if row["checkpointing"] == "full"}
    with_policy = {_model(row) for row in rows if row["kept"]}
    cells = []
    for row in sorted(rows, key=lambda row: (_model(row), row["checkpointing"] != "full", row["peak_gib"])):
        speed = float(row["tokens_per_second_a_gpu"])
        times = f"{speed / full[_model(row)]:.2f}" if _model(row) in full else "–"
        if _model(row) in with_policy or _model(row) in full:
            cells.append([_model(row), _how(row), row["kept"].partition(": ")[2], *_cells(row)[:3], times])
    if not cells:
        return NOT_RUN
    header = [
        "model",
        "settings",
        "bytes kept by each layer",
        "tokens/s per GPU",
        "MFU",
        "peak GiB",
        "speedup over full checkpointing",
    ]
    return f"{markdown(header, cells)}\n\n{origin(rows)}."


SHOWN = {"small": "Qwen3-0.6B, one GPU", "8b": "Qwen3-8B, FSDP2, 2 GPUs"}


def best_of(rows: list[dict]) -> dict[tuple[str, str], dict]:
    """{(part, provider): its fastest row on sft documents}"""
    rows = [row for row in rows if row["documents"] == "sft" and not row["error"]]
    rows.sort(key=lambda row: float(row["tokens_per_second_a_gpu"]))
    return {(row["part"], row["provider"]): row for row in rows}


def headline() -> str:
    """The best row of each provider: tokens/s per GPU, MFU, GiB."""
    best = best_of(_measured())
    parts = [part for part in SHOWN if (part, "ours") in best]
    if not parts:
        return NOT_RUN
    empty = ["–"] * 3
    cells = [
        [
            PROVIDERS[name],
            *(cell for p in parts for cell in (_cells(best[p, name])[:3] if (p, name) in best else empty)),
        ]
        for name in ("padded", "fa2", "liger", "ours")
    ]
    header = [
        "trained with",
        *(cell for part in parts for cell in (f"{SHOWN[part]}: tokens/s per GPU", "MFU", "peak GiB")),
    ]
    used = [row for (part, _), row in best.items() if part in parts]
    where = f"bf16 ([how each was set, and more](docs/performance.md#whole-models); {origin(used)})."
    return f"{markdown(header, cells)}\n\n{prose(where)}"


def plan() -> str:
    """What simulate_plan.py counted."""
    if not (RESULTS / "plan_cpu.csv").exists():
        return "Not counted yet: `benchmarks/simulate_plan.py`."
    rows = read_rows(RESULTS / "plan_cpu.csv")
    cells = [
        [row["kind"], row["ranks"], f"{int(row['capacity']):,}", row["static_size"],
         *(f"{float(row[name]):.2f}" for name in ("of_ideal", "one_size_times_plan", "two_sizes_times_plan"))]
        for row in rows
    ]  # fmt: skip
    header = [
        "lengths",
        "ranks",
        "capacity",
        "ranks of one size",
        "plan, of ideal",
        "one size, times the plan",
        "two sizes, times the plan",
    ]
    return f"{markdown(header, cells)}\n\n`benchmarks/simulate_plan.py`, {rows[0]['steps']} steps of each; commit {commits(rows)}."


def hybrid() -> str:
    return training_of("hybrid_cuda")


def hybrid_bamba() -> str:
    return training_of("hybrid_bamba_cuda", "`benchmarks/bench_hybrid.py --model bamba`")


def training_of(family: str, command: str = "`benchmarks/bench_hybrid.py`") -> str:
    """Returns a row for each way to train the model; a provider that failed has its error, and there is no speedup over
    it.
    """
    if not is_measured(family):
        return f"Not run yet: {command}."
    rows = rows_of(family)
    padded = next((float(row["tokens_per_second"] or 0) for row in rows if row["provider"].startswith("padded")), 0)
    cells = []
    for row in rows:
        speed = float(row["tokens_per_second"] or 0)
        shown = (
            [f"{speed / 1000:.1f}k", f"{float(row['peak_gib']):.1f} GiB", times(speed / padded) if padded else ""]
            if speed
            else [row["error"], "", ""]
        )
        cells.append([row["provider"], *shown])
    header = ["trained with", "tokens/s", "peak memory", "speedup over padded batches"]
    what = f"{rows[0]['layers']} layers, {int(rows[0]['tokens']):,} tokens in {rows[0]['documents']} documents"
    return f"{markdown(header, cells)}\n\n{what}. {origin(rows)}."


TABLES = {
    "hybrid": hybrid,
    "hybrid_bamba": hybrid_bamba,
    "plan": plan,
    "whole": whole,
    "checkpointing": checkpointing,
    "headline": headline,
}
