"""What README.md and docs/ say of whole models in training, from whole_cuda.csv: a function for each region."""

import re

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


SETTINGS = ("part", "model", "ranks", "wrapper", "row", "documents", "compiled", "checkpointing", "lora")


def at_equal_settings(rows: list[dict]) -> list[tuple[dict, dict]]:
    """(ours, FlashAttention-2's) of the same documents, rows, wrapper, compilation and checkpointing."""
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if not row["error"]:
            found.setdefault(tuple(row[name] for name in SETTINGS), {})[row["provider"]] = row
    return [(pair["ours"], pair["fa2"]) for pair in found.values() if {"ours", "fa2"} <= pair.keys()]


def speed(row: dict) -> float:
    return float(row["tokens_per_second_a_gpu"] or 0)


def whole() -> str:
    """A table of all rows, model after model: first what runs at equal settings, then the others, the fastest first."""
    rows, lines = [row for row in whole_rows() if row["part"] != "sweep"], []
    pairs = at_equal_settings(rows)
    for model in dict.fromkeys(row["of"] for row in rows):
        lines.append(f"**{model}** |  |  |  |  |  | ")
        equal = [pair for pair in pairs if pair[0]["of"] == model]
        for ours, fa2 in equal:
            lines.append("{name} | {how} | {figures} | {loss} | ".format(**ours))
            lines.append("{name} | {how} | {figures} | {loss} | ".format(**fa2) + f"{speed(ours) / speed(fa2):.2f}")
        others = [row for row in rows if row["of"] == model and not any(row in pair for pair in equal)]
        others.sort(key=speed, reverse=True)
        lines += ["{name} | {how} | {figures} | {loss} | ".format(**row) for row in others]
    note = (
        "Speedup at equal settings: of packing_ops over this row, where both have the same row length, compilation and "
        "checkpointing. The first loss, of random weights, shows that all rows compute the same. Every row of a model trains on the same documents, in bf16 with fused AdamW. Times are medians of three "
        "steps; the padded 8B run had only one. Padding counts as no token. MFU: the model's operations a second over the 989 "
        "TFLOP/s of the GPU. It counts 6 operations for each token and parameter that multiplies it (4 with LoRA), and "
        f"attention's. Recomputation is not counted. {origin(rows)}."
    )
    header = "trained with | settings | tokens/s per GPU | MFU | peak GiB | first loss | speedup at equal settings"
    return table(header, lines, note)


def kept_by_each_layer(row: dict) -> str:
    """Say what a layer keeps for the backward: of a policy in the words of its explain(), in GiB."""
    bytes_and_counts = re.search(r"([\d,]+) of attention, ([\d,]+) of (\d+) of (\d+) products", row["kept"])
    if bytes_and_counts is None:
        return "its input" if row["checkpointing"] == "full" else "everything"
    attention, products, kept, of = (int(each.replace(",", "")) for each in bytes_and_counts.groups())
    return f"{attention / 2**30:.2f} GiB of attention, {products / 2**30:.2f} GiB of {kept} of {of} matrix products"


def checkpointing() -> str:
    """Ours with policies, with full checkpointing, and without."""
    of = {"provider": "ours", "error": "", "model": "Qwen3-8B", "documents": "sft"}
    rows = [row for row in whole_rows() if of.items() <= row.items()]
    compared = {row["of"] for row in rows if row["kept"]}
    lines = [
        f"{row['of']} | {row['how']} | {kept_by_each_layer(row)} | {row['figures']}"
        for row in sorted(rows, key=lambda row: (row["of"], row["peak_gib"]))
        if row["of"] in compared
    ]
    return table("model | settings | each layer keeps | tokens/s per GPU | MFU | peak GiB", lines, f"{origin(rows)}.")


def best_of(rows: list[dict]) -> dict[tuple[str, str], dict]:
    """{(part, provider): its fastest row on sft documents}"""
    rows = [row for row in rows if row["documents"] == "sft" and not row["error"]]
    rows.sort(key=lambda row: float(row["tokens_per_second_a_gpu"]))
    return {(row["part"], row["provider"]): row for row in rows}


def headline() -> str:
    """Of two models the best row of each provider, and ours at FlashAttention-2's settings; then what to expect."""
    rows, best, lines, used, said = whole_rows(), best_of(whole_rows()), [], [], []
    for part, model in SHOWN.items():
        pair = next((pair for pair in at_equal_settings(rows) if pair[1] == best.get((part, "fa2"))), None)
        mine = [row for row in rows if row["part"] == part and row["provider"] in PROVIDERS]
        for provider in PROVIDERS:
            fastest = best.get((part, provider)) or next((row for row in mine if row["provider"] == provider), None)
            shown = [fastest] if fastest else []
            if provider == "ours" and fastest and pair and pair[0] != fastest:
                shown = [pair[0], fastest | {"name": f"{fastest['name']}, best setting"}]
            lines += [f"{model} | {{name}} | {{how}} | {{figures}}".format(**row) for row in shown]
            used += shown
        if pair:
            ours, fa2 = pair
            memory = float(ours["peak_gib"]) / float(fa2["peak_gib"])
            faster = f"{speed(ours) / speed(fa2):.2f} times as fast in {memory:.0%} of the memory"
            said.append(f"{faster} ({ours['model']})")
    at_equal = f"at equal settings packing_ops is {', '.join(said)}."
    verdict = f"If you already pack rows on FlashAttention-2: {at_equal} " if said else ""
    liger = {row["compiled"] for row in used if row["provider"] == "liger"}
    plain = "Liger's rows are not compiled. " if liger == {"0"} else ""
    note = f"{verdict}{plain}([More rows, and MFU](docs/performance.md#whole-models); bf16, {origin(used)}.)"
    return table("model | trained with | settings | tokens/s per GPU | MFU | peak GiB", lines, note)


def sweep() -> str:
    """0.6B with compiled layers beside FlashAttention-2: a row for each length of rows, vocabulary and dynamic."""
    found: dict[tuple, dict] = {}
    for row in whole_rows():
        if (row["part"], row["compiled"], row["error"]) in (("small", "1", ""), ("sweep", "1", "")):
            setting = int(row["row"]), int(row["vocabulary"] or 151_936), row["dynamic"] == "1"
            kept = row["fused_loss"] == "0" and row["provider"] == "ours"
            found.setdefault(setting, {})["kept" if kept else row["provider"]] = row
    lines = []
    if len(found) < 2:
        return "Not run yet: `benchmarks/bench_whole.py --part small sweep`."
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
