"""What README.md and docs/ say of whole models and of the loss; what a file does not have is left out."""

from functools import partial

import result_rows
from render_tables_whole import PROVIDERS, SHOWN, best_of, whole_rows
from result_rows import COPY, OURS, Case, by_row, cases_of, failed, origin, prose, rows_of, span, table, times

LAYERS, FLASH, CHECKPOINTING = "torch.compile of each layer", "packed, torch FlashAttention-2", "gradient checkpointing"
EAGER = "eager, the model's RMSNorm"
STEPS = {  # group: {row: label}; the first row of a group is ours, which the others are compared with
    "eager, one kernel for RMSNorm (our default)": {
        f"{OURS}, rms_norm=True": "packing_ops",
        f"{FLASH}, compiled rope, F.rms_norm": "packed, torch's FlashAttention-2, RoPE under torch.compile, `F.rms_norm`",
    },
    "each layer under torch.compile": {
        f"{OURS}, {LAYERS}": "packing_ops",
        f"{FLASH}, {LAYERS}": "packed, torch's FlashAttention-2",
        f"{FLASH}, F.rms_norm, {LAYERS}": "packed, torch's FlashAttention-2, `F.rms_norm`",
    },
    EAGER: {
        OURS: "packing_ops, `rms_norm=False`",
        "padded batches of 8, sdpa": "padded batches of 8, SDPA",
        "packed, sdpa mask": "packed, SDPA with a mask",
        "packed, flex_attention": "packed, FlexAttention",
        FLASH: "packed, torch's FlashAttention-2",
        f"{FLASH}, compiled rope": "packed, torch's FlashAttention-2, RoPE under torch.compile",
    },
    f"{EAGER}, {CHECKPOINTING}": {
        f"{OURS}, {CHECKPOINTING}": "packing_ops, `rms_norm=False`",
        f"{FLASH}, {CHECKPOINTING}": "packed, torch's FlashAttention-2",
    },
    f"{EAGER}, rows of 16,384 instead of 8,192": {
        f"{OURS}, rows of twice the capacity": "packing_ops, `rms_norm=False`"
    },
}


def e2e() -> str:
    """Returns a table in groups: what is the same in a group is its heading."""
    found, lines = {row["provider"]: row for row in rows_of("e2e_cuda")}, []
    for group, labels in STEPS.items():
        measured, first = [found[name] for name in labels if name in found], next(iter(labels))
        lines += [f"**{group}** |  |  | "] if measured else []
        for row in measured:
            line = f"{labels[row['provider']]} | {row['tokens_per_second']:.1k} | {row['peak_gib']:.1f} GiB"
            ours = float(found[first]["tokens_per_second"]) if row["provider"] != first and first in found else 0
            lines.append(f"{line} | {ours / float(row['tokens_per_second']):.2f}" if ours else f"{line} | –")
    measured = [row for row in found.values() if row["loss"]]
    losses, first = [float(row["loss"]) for row in measured], measured[0]
    vocabulary = f"vocabulary of {first['vocabulary']:,.0f}; " if first.get("vocabulary") else ""
    note = (
        f"{first['tokens']:,.0f} tokens in {first['documents']} documents; {vocabulary}bf16 losses differ by at most "
        f"{max(losses) - min(losses):.4f}. Why `F.rms_norm` is slower in compiled layers was not profiled. {origin(measured)}."
    )
    return table("trained with | tokens/s | peak memory | speedup of packing_ops over this row", lines, note)


def adapter() -> str:
    found = {row["provider"]: row for row in rows_of("e2e_cuda")}
    positions, explicit = (found[f"adapter overhead, {kind}"] for kind in ("position_ids", "cu_seq_lens"))
    return prose(
        f'attn_implementation="packing_ops" costs the host {positions["host_us_per_layer"]:.0f} us (position_ids) and '
        f"{explicit['host_us_per_layer']:.0f} us (cu_seq_lens) a layer beyond `varlen_attention` itself, and a step waits for the "
        f"GPU for {found[OURS]['host_waits_percent']:.1f}% of its time ({origin([positions, explicit])})."
    )


def megatron() -> str:
    rows, found = rows_of("megatron_cuda"), {}
    for (op, shape, _), providers in cases_of(rows).items():
        way = "hook" if op == "RoPE hook" else "both" if op.endswith("backward") else "forward"
        for name, row in providers.items():
            if way == "hook" or "T=65536" in shape:
                found.setdefault((way, name), []).append(float(row["ratio_to_ours"]))
    spread = {key: span(times, values) for key, values in found.items()}
    ranks = [row for row in rows_of("megatron-context-parallel_cuda") if row["ranks"] != "1"]
    shares = [f"{row['efficiency']:.0%} with {row['shape'].split('docs=')[1].split()[0]}" for row in ranks]
    return prose(
        "The core attention module of Megatron-core, 65,536 tokens, forward and backward: torch's FlashAttention-2 takes "
        f"{spread['both', 'torch FlashAttention-2']} times ours, FlashAttention-4 {spread['both', 'FlashAttention-4']}, a direct "
        f"call of `varlen_attention` {spread['both', 'varlen_attention']}. Forward alone: FlashAttention-3 takes "
        f"{spread['forward', 'FlashAttention-3']} times ours. TransformerEngine and cuDNN are not measured. The RoPE hook runs at "
        f"{100 * found['hook', COPY][0]:.0f}% of copy, {times(found['hook', 'megatron-core unfused'][0])}x as fast as "
        f"megatron-core's unfused RoPE ({origin(rows)}). Efficiency of context parallel attention on two GPUs, rows of 65,536 "
        f"tokens, forward and backward, by documents in the row: {', '.join(shares)} ({origin(ranks)})."
    )


def parallel() -> str:
    """Two tables, attention and training; what is the same in all rows of one is in its caption."""
    rows, said = rows_of("parallel_cuda"), []
    training = [row for row in rows if row["op"].startswith("training")]
    figures = "{ranks} | {p50_us:.1ms} | {efficiency:.2f} | {tokens_per_second:,.0f}"
    attention = [row | sizes_of(row["shape"]) for row in rows if row not in training]
    for row in attention:
        row["way"] = row["op"].removesuffix(", forward + backward")
    if attention:
        same = " and ".join(dict.fromkeys(row["heads"] for row in attention))
        said.append(f"Attention, forward and backward, {same}, bfloat16:")
        header = "attention | documents | tokens in all | GPUs | ms | efficiency | tokens/s"
        said.append(
            table(header, (f"{{way}} | {{label}} | {{slots:,}} | {figures}".format(**row) for row in attention))
        )
    if training:
        same = "; ".join(dict.fromkeys(row["shape"].replace("16384", "16,384") for row in training))
        said.append(prose(f"Training, bfloat16. {same}:"))
        for row in training:
            row["way"] = row["op"].removeprefix("training, ")
        header = "training | GPUs | ms | efficiency | tokens/s"
        said.append(table(header, (f"{{way}} | {figures}".format(**row) for row in training)))
    said.append(prose(
        "Efficiency: the time of one GPU in the same run, over the number of GPUs times their time; 1 is ideal. Times are of the "
        f"slowest rank ({origin(rows)}).{result_rows.without_overlap(rows)}"
    ))  # fmt: skip
    return "\n\n".join([*said, "![of ideal, by case](../benchmarks/results/parallel_cuda.png)"])


def sizes_of(shape: str) -> dict:
    """{"label", "slots", "heads"} of "one document: T=65536 docs=1 heads=32/8 D=128"."""
    label, _, sizes = shape.partition(": ")
    found = dict(size.split("=") for size in sizes.split())
    return {"label": label, "slots": int(found["T"]), "heads": f"{found['heads']} heads, head_dim {found['D']}"}


def parallel_host() -> str:
    """A row for each way to train; what one rank alone takes is measured in the same run."""
    rows = [
        row | ({"efficiency": result_rows.Cell()} if row["fake_ranks"] == "1" else {})
        for row in rows_of("parallel-host_cuda")
    ]
    header = "training | layers | rows | ms | GPU busy, ms | tokens/s per GPU | efficiency, at most"
    line = "{provider} | {layers} | {rows} | {p50_us:.0ms} | {gpu_busy_us:.0ms} | {tokens_per_second:,.0f} | {efficiency:.2f}"
    return by_row(rows, header, line, (
        f"Communication is left out: one GPU simulates rank 0 of {max(int(row['fake_ranks']) for row in rows)}, and collectives "
        "return at once. A gather copies this rank's part for each of the others; DDP's reduction is left out. The optimizer steps "
        'after every row. Efficiency, at most: the time of "one rank" over theirs, which no link can exceed. {model}, bfloat16, '
        "rms_norm, fused_loss ({origin})."
    ))  # fmt: skip


HYBRID = {
    OURS: "packing_ops, rms_norm=False",
    "packing_ops, linear_attention=False": "packing_ops, rms_norm=False, linear_attention=False",
}


def training_of(family: str) -> str:
    """A row for each way to train the model. One that failed has its error, and there is no speedup over it."""
    rows = rows_of(family)
    padded = next((float(row["tokens_per_second"] or 0) for row in rows if row["provider"].startswith("padded")), 0)
    for row in rows:
        speed = float(row["tokens_per_second"] or 0)
        row["label"] = HYBRID.get(row["provider"], row["provider"])
        row["speedup"] = times(speed / padded) if speed and padded else ""
        row["shown"] = (
            "{tokens_per_second:.1k} | {peak_gib:.1f} GiB".format(**row) if speed else f"{failed(row['error'])} | "
        )
    note = (
        "{layers} layers, {tokens:,.0f} tokens in {documents} documents. `rms_norm=True` is the default where a trial allows it; "
        "compiled layers run the model's formula. {origin}."
    )
    header = "trained with | tokens/s | peak memory | speedup over padded batches"
    return by_row(rows, header, "{label} | {shown} | {speedup}", note)


VLLM = {"packing_ops": "packing_ops, CUDA graphs of decoding steps", "vLLM": "vLLM's default: FlashAttention-3, compiled, CUDA graphs",
        "packing_ops, eager": "packing_ops, eager"}  # fmt: skip


def vllm() -> str:
    """A row for each engine and number of requests, beside vLLM's default with as many."""
    rows = rows_of("vllm_cuda")
    default = {row["requests"]: float(row["tokens_per_second"]) for row in rows if row["provider"] == "vLLM"}
    for row in rows:
        row["share"] = f"{float(row['tokens_per_second']) / default[row['requests']]:.2f}"
        row["label"] = VLLM.get(row["provider"], row["provider"])
    line = "{label} | {requests} | {tokens_per_second:,.0f} | {share} | {log_probs_differ:,.0f} of {log_probs:,.0f}"
    header = "engine | requests | tokens/s | over vLLM's default | log-probs that differ from the trainer's"
    return by_row(rows, header, line, "Qwen3-0.6B's shape, bfloat16, 200 tokens to each request. {origin}.")


LOGPS_KEPT = "packing_ops, all logits kept"
LOGPS = {OURS: "packing_ops", LOGPS_KEPT: "the same, all logits kept", "torch.compile": "torch.compile",
         "TRL's chunked log-probs": "TRL", "Liger's fused linear cross entropy": "Liger", "torch eager": "torch eager",
         "bare matmuls": "only the matrix products"}  # fmt: skip


def logps() -> str:
    """Returns two tables, milliseconds and GiB, with a row for each direction and hidden size."""
    found = []
    for (op, shape, _), providers in cases_of(rows_of("logps_cuda")).items():
        if op.startswith("token_logps, ") and shape.startswith("T=16384 "):
            way, hidden = op.removeprefix("token_logps, "), int(shape.rpartition("=")[2])
            found.append(Case(way=way, hidden=hidden, of=Case(providers)))
    found.sort(key=lambda case: (case["hidden"], len(case["way"])))
    cells = lambda form: " | ".join(["{way}, hidden {hidden:,}", *(f"{{of[{name}]{form}}}" for name in LOGPS)])  # noqa: E731
    what = " | ".join(["token_logps, 16,384 tokens, vocabulary of 151,936, bf16", *LOGPS.values()])
    note = (
        "GiB: besides the arguments, gradients included. Only the matrix products: cuBLAS, one forward and three backward. Ours "
        "makes the logits again in the backward unless it keeps them; torch keeps them. Liger's fused linear cross entropy gives "
        f"only the mean of a batch, with the gradients made in its forward. {origin([case['of'][OURS] for case in found])}."
    )
    took = table(f"ms of {what}", map(cells("[p50_us]:.1ms").format_map, found), empty="–")
    names = what.rpartition(" | ")[0]  # the products allocate nothing else
    line = cells("[peak_mib]:.1GiB").rpartition(" | ")[0]
    held = (line.format_map(case) for case in found if case["way"] != "backward")
    return f"{took}\n\n{table(f'GiB of {names}', held, note, empty='–')}"


def memory() -> str:
    """GiB of a training step by provider, and MiB of the loss beside the formula."""
    best = {name: row for (part, name), row in best_of(whole_rows()).items() if part == "small"}
    steps = [f"{PROVIDERS[name]} | {best[name]['peak_gib']:.1f}" for name in PROVIDERS if name in best]
    case = "token_logps, forward and backward", "T=16384 V=151936 hidden=4096"
    found = {row["provider"]: row for row in rows_of("logps_cuda") if (row["op"], row["shape"]) == case}
    labels = {"torch eager": "", "torch.compile": "", LOGPS_KEPT: "packing_ops, `keep_logits` of all", OURS: ""}
    losses = [f"{text or name} | {found[name]['peak_mib']:,.0f}" for name, text in labels.items() if name in found]
    note = f"12 bytes a logit are {16384 * 151936 * 12 / 2**20:,.0f} MiB. {origin([found[name] for name in labels if name in found])}."
    header = "log-probabilities of 16,384 tokens, vocabulary 151,936, hidden 4,096 | MiB besides the arguments"
    steps = table(f"a training step, {SHOWN['small']} | peak memory, GiB", steps, f"{origin([*best.values()])}.")
    return f"{steps}\n\n{table(header, losses, note)}"


MADE = {
    **{each.__name__: each for each in (e2e, adapter, megatron, parallel, parallel_host, vllm, logps, memory)},
    "hybrid": partial(training_of, "hybrid_cuda"),
    "hybrid_bamba": partial(training_of, "hybrid_bamba_cuda"),
}
