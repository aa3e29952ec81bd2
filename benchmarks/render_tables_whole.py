"""What README.md and docs/ say of whole models in training, from whole_cuda.csv: a function for each region."""

from result_rows import failed, origin, rows_of, table

PROVIDERS = {
    "padded": "padded batches of 8, SDPA",
    "fa2": "packed, torch's FlashAttention-2",
    "liger": "packed, Liger's kernels, torch's FlashAttention-2",
    "liger_fa4": "packed, Liger's kernels, FlashAttention-4",
    "ours": "packing_ops, fused_loss",
}
SHOWN = {"small": "Qwen3-0.6B, one GPU", "8b": "Qwen3-8B, FSDP2, 2 GPUs"}


def whole_rows() -> list[dict]:
    """Rows of whole_cuda.csv with what the tables say of them; rows of one `of` have the same documents."""
    rows, kinds = rows_of("whole_cuda"), {"": "no checkpointing", "full": "full checkpointing"}
    for row in rows:
        where = f"{row['wrapper']} on {row['ranks']} GPUs" if row["ranks"] != "1" else "one GPU"
        row["of"] = f"{row['model']}{', LoRA' if row['lora'] == '1' else ''}, {where}, {row['documents']} documents"
        how = [] if row["provider"] == "padded" else [f"rows of {row['row']:,.0f}"]
        how += ["compiled layers"] if row["compiled"] == "1" else []
        how += [kinds.get(row["checkpointing"]) or f"checkpoint_policy, {row['checkpointing']} GiB"]
        row["name"], row["how"] = PROVIDERS[row["provider"]], ", ".join(how)
        row["figures"] = "{tokens_per_second_a_gpu:.1k} | {mfu:.3f} | {peak_gib:.1f}".format(**row)
        if row["error"]:
            row["figures"] = f"{failed(row['error'])} |  | "
    return rows


def whole() -> str:
    """A table of all rows, model after model."""
    rows, lines = [row for row in whole_rows() if row["part"] != "sweep"], []
    for model in dict.fromkeys(row["of"] for row in rows):
        lines.append(f"**{model}** |  |  |  |  | ")
        lines += ["{name} | {how} | {figures} | {loss}".format(**row) for row in rows if row["of"] == model]
    note = (
        "Every row of a model trains on the same documents, in bf16 with fused AdamW; times are medians of three steps, of 8B in "
        "padded batches one step. Padding counts as no token. MFU: the model's operations a second over the 989 TFLOP/s of the GPU. A token takes 6 operations for "
        f"each parameter that it is multiplied with (4 with LoRA), and attention's. {origin(rows)}."
    )
    return table("trained with | settings | tokens/s per GPU | MFU | peak GiB | first loss", lines, note)


def checkpointing() -> str:
    """Ours with full checkpointing, with policies, without."""
    of = {"provider": "ours", "error": "", "model": "Qwen3-8B", "documents": "sft"}
    rows = [row for row in whole_rows() if of.items() <= row.items()]
    full = {row["of"]: float(row["tokens_per_second_a_gpu"]) for row in rows if row["checkpointing"] == "full"}
    compared, lines = {row["of"] for row in rows if row["kept"]} | full.keys(), []
    for row in sorted(rows, key=lambda row: (row["of"], row["checkpointing"] != "full", row["peak_gib"])):
        faster = f"{float(row['tokens_per_second_a_gpu']) / full[row['of']]:.2f}" if row["of"] in full else "–"
        if row["of"] in compared:
            lines.append(f"{row['of']} | {row['how']} | {row['kept'].partition(': ')[2]} | {row['figures']} | {faster}")
    header = "model | settings | bytes kept by each layer | tokens/s per GPU | MFU | peak GiB | speedup over full checkpointing"
    return table(header, lines, f"{origin(rows)}.")


def best_of(rows: list[dict]) -> dict[tuple[str, str], dict]:
    """{(part, provider): its fastest row on sft documents}"""
    rows = [row for row in rows if row["documents"] == "sft" and not row["error"]]
    rows.sort(key=lambda row: float(row["tokens_per_second_a_gpu"]))
    return {(row["part"], row["provider"]): row for row in rows}


def headline() -> str:
    """The best row of each provider: tokens/s per GPU, MFU, GiB."""
    rows = whole_rows()
    best, tried = best_of(rows), {row["provider"] for row in rows}
    parts = [part for part in SHOWN if (part, "ours") in best]
    absent = {"figures": " |  | "}
    figures = {key: [best.get((part, key), absent)["figures"] for part in parts] for key in PROVIDERS if key in tried}
    lines = (" | ".join([PROVIDERS[key], *cells]) for key, cells in figures.items())
    header = ["trained with", *(f"{SHOWN[part]}: tokens/s per GPU | MFU | peak GiB" for part in parts)]
    used = [row for (part, _), row in best.items() if part in parts]
    note = f"bf16 ([settings, and more](docs/performance.md#whole-models); {origin(used)})."
    return table(" | ".join(header), lines, note, empty="–")


def sweep() -> str:
    """0.6B with compiled layers beside FlashAttention-2: a row for each length of rows, vocabulary and dynamic."""
    found: dict[tuple, dict] = {}
    for row in whole_rows():
        if (row["part"], row["compiled"], row["error"]) in (("small", "1", ""), ("sweep", "1", "")):
            setting = int(row["row"]), int(row["vocabulary"] or 151_936), row["dynamic"] == "1"
            kept = row["fused_loss"] == "0" and row["provider"] == "ours"
            found.setdefault(setting, {})["kept" if kept else row["provider"]] = row
    lines = []
    for (slots, vocabulary, dynamic), rows in sorted(found.items()):
        speeds = {name: float(row["tokens_per_second_a_gpu"]) for name, row in rows.items()}
        shown = [f"{speeds[name] / 1000:.1f}k" if name in speeds else "" for name in ("fa2", "kept", "ours")]
        faster = [
            f"{speeds[name] / speeds['fa2']:.2f}" if {name, "fa2"} <= {*speeds} else "" for name in ("kept", "ours")
        ]
        sizes = "any, `dynamic=True`" if dynamic else "those of a row"
        lines.append(" | ".join([f"{slots:,} | {vocabulary:,} | {sizes}", *shown, *faster]))
    header = (
        "slots of a row | vocabulary | sizes compiled for | torch's FlashAttention-2: tokens/s | packing_ops | packing_ops, "
        "fused_loss | speedup | speedup, fused_loss"
    )
    return table(header, lines, f"{origin([row for rows in found.values() for row in rows.values()])}.", empty="–")


MADE = {each.__name__: each for each in (whole, checkpointing, headline, sweep)}
