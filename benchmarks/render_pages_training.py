"""Renders what README.md and docs/ say of training: a function for each region. Missing results are left out."""

import json

from result_rows import (
    COPY,
    OURS,
    RESULTS,
    cases_of,
    duration,
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
CHECKPOINTING = "gradient checkpointing"
MODELS = [  # label, row, the row of ours that it is compared with
    ("packing_ops, `rms_norm=False`, rows of 8,192", OURS, ""),
    ("the same with RMSNorm swapped, the default", f"{OURS}, rms_norm=True", ""),
    ("the first, rows of 16,384", f"{OURS}, rows of twice the capacity", ""),
    ("the first, gradient checkpointing", f"{OURS}, {CHECKPOINTING}", ""),
    ("padded batches of 8, SDPA", "padded batches of 8, sdpa", OURS),
    ("packed, SDPA with a mask", "packed, sdpa mask", OURS),
    ("packed, FlexAttention", "packed, flex_attention", OURS),
    ("packed, torch's FlashAttention-2", FLASH, OURS),
    ("the same, gradient checkpointing", f"{FLASH}, {CHECKPOINTING}", f"{OURS}, {CHECKPOINTING}"),
    ("FlashAttention-2, RoPE under torch.compile", f"{FLASH}, compiled rope", OURS),
    ("the same and torch's rms_norm", f"{FLASH}, compiled rope, F.rms_norm", f"{OURS}, rms_norm=True"),
    ("**each layer under torch.compile:** packing_ops", f"{OURS}, {LAYERS}", ""),
    ("packed, torch's FlashAttention-2", f"{FLASH}, {LAYERS}", f"{OURS}, {LAYERS}"),
    ("the same and torch's rms_norm", f"{FLASH}, F.rms_norm, {LAYERS}", f"{OURS}, {LAYERS}"),
]
AGAINST = {OURS: "", f"{OURS}, rms_norm=True": " (the default)", f"{OURS}, {CHECKPOINTING}": f" ({CHECKPOINTING})"}


def e2e() -> str:
    found, rows = {row["provider"]: row for row in rows_of("e2e_cuda")}, []
    for label, name, ours in MODELS:
        if name not in found:
            continue
        speed, faster = float(found[name]["tokens_per_second"]), "1" if name == OURS else "–"
        if ours in found:
            faster = f"{float(found[ours]['tokens_per_second']) / speed:.2f}{AGAINST.get(ours, ' (compiled)')}"
        rows.append([label, f"{speed / 1000:.1f}k", f"{float(found[name]['peak_gib']):.1f} GiB", faster])
    measured = [row for row in found.values() if row["loss"]]
    losses = [float(row["loss"]) for row in measured]
    apart = max(losses) - min(losses)
    first = measured[0]
    table = markdown(["", "tokens per second", "memory", "packing_ops is faster by"], rows)
    vocabulary = f"vocabulary of {int(first['vocabulary']):,}; " if first.get("vocabulary") else ""
    return (
        f"{table}\n\n{int(first['tokens']):,} tokens in {first['documents']} documents; {vocabulary}bf16 losses differ by "
        f"at most {apart:.4f}. {origin(measured)}."
    )


def headline() -> str:
    """The table of e2e in two sentences."""
    found = {row["provider"]: row for row in rows_of("e2e_cuda")}
    ours = float(found[OURS]["tokens_per_second"])
    others = {"padded batches of 8, sdpa": "padded batches under SDPA", "packed, sdpa mask": "packed rows under SDPA with a mask",
              FLASH: "packed rows with torch's FlashAttention-2"}  # fmt: skip
    ratios = [f"{ours / float(found[name]['tokens_per_second']):.2f} times {label}" for name, label in others.items()]
    compiled, flash = (float(found[f"{name}, {LAYERS}"]["tokens_per_second"]) for name in (OURS, FLASH))
    return prose(
        f"On a GPU a training step of Qwen3-0.6B's shape, vocabulary {int(found[OURS]['vocabulary']):,}, bf16, runs at "
        f"{compiled / 1000:.1f}k tokens per second with each layer under torch.compile, {compiled / flash:.2f} times {others[FLASH]} "
        f"compiled. Without, at {ours / 1000:.1f}k: {', '.join(ratios)} ([all measurements](docs/performance.md); {origin([found[OURS]])})."
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
        f"Megatron-core's seam, 65,536 tokens: forward and backward together take "
        f"{spread(True, 'varlen_attention')} of the core attention module's time where `varlen_attention` is called directly, by "
        f"torch's FlashAttention-2 {spread(True, 'torch FlashAttention-2')}, by FlashAttention-4 {spread(True, 'FlashAttention-4')}; "
        f"for the forward FlashAttention-3 takes {spread(False, 'FlashAttention-3')} (TransformerEngine and cuDNN are not measured). "
        "megatron-core's attention takes no packed rows: padded to the longest document its forward takes "
        f"{spread(False, 'megatron-core, padded')} where it was measured. The RoPE hook runs at "
        f"{100 * found['hook', COPY][0]:.0f}% of copy, {times(found['hook', 'megatron-core unfused'][0])}x "
        f"megatron-core's unfused RoPE ({origin(rows)}). "
        "Context parallel attention on two GPUs, rows of 65,536 tokens, forward and backward together, in percent of ideal by documents "
        f"in the row: {', '.join(shares)} ({origin(parallel)})."
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
    header = ["what", "shape", "GPUs", "ms", "of ideal", "tokens/s"]
    return markdown(header, table) + "\n\n" + prose(
        "Of ideal: the time of one GPU in the same run over GPUs times theirs. bfloat16, GPU clocks, the slowest rank "
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
    header = ["training", "layers", "rows", "ms", "GPU busy, ms", "tokens/s per GPU", "of ideal, at most"]
    ranks = max(int(row["fake_ranks"]) for row in rows)
    return markdown(header, table) + "\n\n" + prose(
        f"One GPU; all rows but \"one rank\" run as rank 0 of {ranks} that are not there: collectives send nothing, wait for nobody, and "
        "a gather copies this rank's part for each of the others; DDP's reduction is left out. An optimizer step after every row. At "
        "most of ideal: the time of \"one rank\" over theirs, which no link can exceed. "
        f"{rows[0]['model']}, bfloat16, rms_norm, fused_loss ({origin(rows)})."
    )  # fmt: skip


LOGPS_KEPT = "packing_ops, all logits kept"
LOGPS_PEERS = {LOGPS_KEPT: "logits kept", "torch eager": "torch eager", "torch.compile": "torch.compile",
               "Liger's fused linear cross entropy": "Liger", "TRL's chunked log-probs": "TRL",
               "bare matmuls": "bare matmuls"}  # fmt: skip
LOGPS_MEMORY = {OURS: "GiB of ours", LOGPS_KEPT: "GiB, logits kept", "torch eager": "GiB, eager", "torch.compile": "GiB, compiled",
                "Liger's fused linear cross entropy": "GiB, Liger"}  # fmt: skip


def logps() -> str:
    """A row for each direction and hidden size; what the others need in memory beside it."""
    rows, used = [], []
    cases = cases_of(rows_of("logps_cuda"))
    for case in sorted(cases, key=lambda case: (int(case[1].rpartition("=")[2]), len(case[0]))):
        providers, (op, shape, _) = cases[case], case
        if not op.startswith("token_logps, ") or not shape.startswith("T=16384 "):
            continue
        others = [times(providers[p]["ratio_to_ours"]) if p in providers else "" for p in LOGPS_PEERS]
        held = {p: row["peak_mib"] for p, row in providers.items() if "backward" not in op or "forward" in op}
        peaks = [f"{float(held[p]) / 1024:.1f}" if held.get(p) else "" for p in LOGPS_MEMORY]
        label = f"{op.removeprefix('token_logps, ')}, hidden {int(shape.rpartition('=')[2]):,}"
        rows.append([label, duration(providers[OURS]), *others, *peaks])
        used.append(providers[OURS])
    header = ["token_logps, 16,384 tokens, vocabulary of 151,936, bf16", "time of ours", *(f"{name} / ours" for name in LOGPS_PEERS.values()),
              *LOGPS_MEMORY.values()]  # fmt: skip
    note = (
        "/ ours: the time of the other over ours, below 1 where the other is faster. Bare matmuls: only cuBLAS, one product "
        "forward, three backward (ours makes the logits again unless it keeps them; torch keeps them). Liger's fused linear cross entropy gives only the mean of a batch, gradients made in its forward. GiB: "
        f"besides the arguments, gradients included. {origin(used)}."
    )
    return f"{markdown(header, rows)}\n\n{prose(note)}"


TABLES = {"demo": demo, "docstrings": docstrings, "report": report_speed, "e2e": e2e, "adapter": adapter,
          "megatron": megatron, "parallel": parallel, "parallel_host": parallel_host, "logps": logps}  # fmt: skip
