"""Renders what README.md and docs/ say of training: a function for each region. Missing results are left out."""

import json

from result_rows import (
    COPY,
    OURS,
    RESULTS,
    cases_of,
    is_measured,
    markdown,
    origin,
    prose,
    rows_of,
    times,
    without_overlap,
)

# --- examples and the report on a data set ---


def demo() -> str:
    results = json.loads((RESULTS / "demo_cpu.json").read_text())
    padded, packed = results["runs"]
    losses = [results["first_step_loss"][mode] for mode in ("padded", "packed")]
    same = "the same" if abs(losses[0] - losses[1]) < 1e-6 else f"{abs(losses[0] - losses[1]):.1g} apart"
    rows = [
        ["real tokens per second, relative", "1", times(results["speedup"]), f"**{results['speedup']:.1f}x faster**"],
        ["padding", *(f"{run['padding_waste']:.{digits}%}" for run, digits in ((padded, 0), (packed, 1))), ""],
        ["optimizer steps", str(padded["steps"]), str(packed["steps"]), ""],
        ["peak memory", *(f"{run['peak_mib']:.0f} MiB" for run in (padded, packed)),
         f"{packed['peak_mib'] / padded['peak_mib']:.2f}x"],
        ["loss of the first step, float32", *(f"{loss:.6f}" for loss in losses), same],
    ]  # fmt: skip
    header = [f"{results['documents']:,} docstrings, once each", "padded, batches of 8", "packed, rows of 2,048", ""]
    where = f"{results['device']}, torch {results['torch']}, commit {results['commit'][:7]}"
    return f"{markdown(header, rows)}\n\nFrom [demo_cpu.json](benchmarks/results/demo_cpu.json): {where}."


def docstrings() -> str:
    layouts = json.loads((RESULTS / "report_docstrings.json").read_text())["layouts"]
    names = {"padded": "padded, batches of 8", "length_grouped": "the same, grouped by length",
             "padding_free": "padding-free, batches of 8",
             "next_fit": "packed, next_fit", "ffd": "packed, ffd"}  # fmt: skip
    rows = []
    for name, label in names.items():
        if name not in layouts:
            continue
        layout, ratios = layouts[name], layouts[name]["epoch_time_ratio"]
        faster = "1 / 1" if name == "padded" else f"{ratios['tokens']:.2f}x / {ratios['flops']:.2f}x faster"
        rows.append([label, f"{layout['rows']:,}", str(layout["steps"]), f"{1 - layout['fill']:.1%}",
                     f"{layout['flop_balance']:.1%}", faster])  # fmt: skip
    header = [
        "",
        "rows",
        "steps per epoch",
        "padding",
        "FLOP balance of 8 ranks",
        "estimated epoch, by slots / by flops",
    ]
    return markdown(header, rows)


def report_speed() -> str:
    found = {row["form"]: row for row in rows_of("report_cpu")}
    text, chats = (f"{float(found[form]['seconds']):.0f} s" for form in ("text", "messages"))
    return prose(
        f"{int(found['text']['documents']):,} generated documents take {text} as plain text and {chats} as chats on one "
        f"core ([report_cpu.csv](benchmarks/results/report_cpu.csv), `bench_report.py --large`; {origin(rows_of('report_cpu'))})."
    )


# --- a whole model ---

LAYERS, FLASH = "torch.compile of each layer", "packed, torch FlashAttention-2"
CHECKPOINTING, NOTHING = "gradient checkpointing", "–"
EAGER, FUSED = "eager, the model's RMSNorm", "eager, one kernel for RMSNorm (our default)"
STEPS = {  # group: {row: label}; the first row of a group is ours, which the others are compared with
    EAGER: {
        OURS: "packing_ops, `rms_norm=False`",
        "padded batches of 8, sdpa": "padded batches of 8, SDPA",
        "packed, sdpa mask": "packed, SDPA with a mask",
        "packed, flex_attention": "packed, FlexAttention",
        FLASH: "packed, torch's FlashAttention-2",
        f"{FLASH}, compiled rope": "the same, RoPE under torch.compile",
    },
    FUSED: {
        f"{OURS}, rms_norm=True": "packing_ops",
        f"{FLASH}, compiled rope, F.rms_norm": "packed, torch's FlashAttention-2, RoPE under torch.compile, `F.rms_norm`",
    },
    "each layer under torch.compile": {
        f"{OURS}, {LAYERS}": "packing_ops",
        f"{FLASH}, {LAYERS}": "packed, torch's FlashAttention-2",
        f"{FLASH}, F.rms_norm, {LAYERS}": "the same, `F.rms_norm`",
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
    found, rows = {row["provider"]: row for row in rows_of("e2e_cuda")}, []
    for group, labels in STEPS.items():
        measured = [found[name] for name in labels if name in found]
        if measured:
            rows.append([f"**{group}**", "", "", ""])
        ours = float(found[next(iter(labels))]["tokens_per_second"]) if next(iter(labels)) in found else 0
        for row in measured:
            speed = float(row["tokens_per_second"])
            faster = NOTHING if row["provider"] == next(iter(labels)) or not ours else f"{ours / speed:.2f}"
            rows.append([labels[row["provider"]], f"{speed / 1000:.1f}k", f"{float(row['peak_gib']):.1f} GiB", faster])
    measured = [row for row in found.values() if row["loss"]]
    losses = [float(row["loss"]) for row in measured]
    first = measured[0]
    table = markdown(["trained with", "tokens/s", "peak memory", "speedup of packing_ops over this row"], rows)
    vocabulary = f"vocabulary of {int(first['vocabulary']):,}; " if first.get("vocabulary") else ""
    return (
        f"{table}\n\n{int(first['tokens']):,} tokens in {first['documents']} documents; {vocabulary}bf16 losses differ by "
        f"at most {max(losses) - min(losses):.4f}. {origin(measured)}."
    )


def adapter() -> str:
    found = {row["provider"]: row for row in rows_of("e2e_cuda")}
    positions, explicit = (
        float(found[f"adapter overhead, {kind}"]["host_us_per_layer"]) for kind in ("position_ids", "cu_seq_lens")
    )
    return prose(
        f'attn_implementation="packing_ops" costs the host {positions:.0f} us (position_ids) and {explicit:.0f} us '
        f"(cu_seq_lens) a layer beyond `varlen_attention` itself, and a step waits for the GPU for "
        f"{float(found[OURS]['host_waits_percent']):.1f}% of its time "
        f"({origin([row for row in found.values() if row['host_us_per_layer']])})."
    )


# --- megatron-core ---


def megatron() -> str:
    rows, found = rows_of("megatron_cuda"), {}
    for (op, shape, _), providers in cases_of(rows).items():
        for name, row in providers.items():
            key = "hook" if op == "RoPE hook" else op.endswith("backward") if "T=65536" in shape else None
            found.setdefault((key, name), []).append(float(row["ratio_to_ours"]))
    parallel = rows_of("megatron-context-parallel_cuda")
    shares = [f"{float(row['efficiency']):.0%} with {row['shape'].split('docs=')[1].split()[0]}"
              for row in parallel if row["ranks"] != "1"]  # fmt: skip
    spread = lambda *key: " to ".join(dict.fromkeys(map(times, (min(found[key]), max(found[key])))))  # noqa: E731
    return prose(
        f"The core attention module of Megatron-core, 65,536 tokens, forward and backward: torch's FlashAttention-2 takes "
        f"{spread(True, 'torch FlashAttention-2')} times ours, FlashAttention-4 {spread(True, 'FlashAttention-4')}, a direct call of "
        f"`varlen_attention` {spread(True, 'varlen_attention')}. Forward alone: FlashAttention-3 takes "
        f"{spread(False, 'FlashAttention-3')} times ours. TransformerEngine and cuDNN are not measured. The RoPE hook runs at "
        f"{100 * found['hook', COPY][0]:.0f}% of copy, {times(found['hook', 'megatron-core unfused'][0])}x as fast as "
        f"megatron-core's unfused RoPE ({origin(rows)}). "
        "Efficiency of context parallel attention on two GPUs, rows of 65,536 tokens, forward and backward, by documents in the row: "
        f"{', '.join(shares)} ({origin(parallel)})."
    )


# --- several GPUs ---


def parallel() -> str:
    """A row for each way to use them; what one GPU takes is measured in the same run."""
    rows = rows_of("parallel_cuda")
    table = [
        [
            row["op"], row["shape"], row["ranks"], f"{float(row['p50_us']) / 1000:.1f}",
            f"{float(row['efficiency']):.2f}" if row["efficiency"] else "", f"{int(row['tokens_per_second']):,}",
        ]
        for row in rows
    ]  # fmt: skip
    header = ["what", "case", "GPUs", "ms", "efficiency", "tokens/s"]
    return markdown(header, table) + "\n\n" + prose(
        "Efficiency: the time of one GPU in the same run, over the number of GPUs times their time; 1 is ideal. bfloat16, the slowest rank "
        f"({origin(rows)}).{without_overlap(rows)}"
    ) + "\n\n![of ideal, by case](../benchmarks/results/parallel_cuda.png)"  # fmt: skip


def parallel_host() -> str:
    """A row for each way to train; what one rank alone takes is measured in the same run."""
    rows = rows_of("parallel-host_cuda") if is_measured("parallel-host_cuda") else []
    if not rows:
        return "Not measured yet."
    table = []
    for row in rows:
        alone = row["fake_ranks"] == "1"
        milliseconds = [f"{float(row[name]) / 1000:.0f}" for name in ("p50_us", "gpu_busy_us")]
        bound = "" if alone else f"{float(row['efficiency']):.2f}"
        table.append(
            [row["provider"], row["layers"], row["rows"], *milliseconds, f"{int(row['tokens_per_second']):,}", bound]
        )
    header = ["training", "layers", "rows", "ms", "GPU busy, ms", "tokens/s per GPU", "efficiency, at most"]
    ranks = max(int(row["fake_ranks"]) for row in rows)
    return markdown(header, table) + "\n\n" + prose(
        f"One GPU; all rows but \"one rank\" run as rank 0 of {ranks} that are not there: collectives send nothing, wait for nobody, and "
        "a gather copies this rank's part for each of the others; DDP's reduction is left out. An optimizer step after every row. "
        "Efficiency, at most: the time of \"one rank\" over theirs, which no link can exceed. "
        f"{rows[0]['model']}, bfloat16, rms_norm, fused_loss ({origin(rows)})."
    )  # fmt: skip


LOGPS = {OURS: "packing_ops", "packing_ops, all logits kept": "the same, all logits kept", "torch.compile": "torch.compile",
         "TRL's chunked log-probs": "TRL", "Liger's fused linear cross entropy": "Liger", "torch eager": "torch eager",
         "bare matmuls": "only the matrix products"}  # fmt: skip


def logps() -> str:
    """Returns two tables, milliseconds and GiB, with a row for each direction and hidden size."""
    took, held, used = [], [], []
    cases = cases_of(rows_of("logps_cuda"))
    for case in sorted(cases, key=lambda case: (int(case[1].rpartition("=")[2]), len(case[0]))):
        providers, (op, shape, _) = cases[case], case
        if not op.startswith("token_logps, ") or not shape.startswith("T=16384 "):
            continue
        label = f"{op.removeprefix('token_logps, ')}, hidden {int(shape.rpartition('=')[2]):,}"
        milliseconds = [f"{float(providers[p]['p50_us']) / 1000:.1f}" if p in providers else NOTHING for p in LOGPS]
        took.append([label, *milliseconds])
        used.append(providers[OURS])
        if not op.endswith(", backward"):
            names = list(LOGPS)[:-1]  # the products allocate nothing else
            peaks = [providers[p]["peak_mib"] if p in providers else "" for p in names]
            held.append([label, *(f"{float(peak) / 1024:.1f}" if peak else NOTHING for peak in peaks)])
    note = (
        "GiB: besides the arguments, gradients included. Only the matrix products: cuBLAS, one forward and three backward. Ours "
        "makes the logits again in the backward unless it keeps them; torch keeps them. Liger's fused linear cross entropy gives "
        f"only the mean of a batch, with the gradients made in its forward. {origin(used)}."
    )
    what = "token_logps, 16,384 tokens, vocabulary of 151,936, bf16"
    times_of = markdown([f"ms of {what}", *LOGPS.values()], took)
    return f"{times_of}\n\n{markdown([f'GiB of {what}', *list(LOGPS.values())[:-1]], held)}\n\n{prose(note)}"


TABLES = {"demo": demo, "docstrings": docstrings, "report": report_speed, "e2e": e2e, "adapter": adapter,
          "megatron": megatron, "parallel": parallel, "parallel_host": parallel_host, "logps": logps}  # fmt: skip
