"""What docs/ say of single ops: a function for each region. What a file does not have is left out."""

from collections.abc import Callable

from result_rows import (
    OURS,
    PERCENT_OF_COPY,
    cases_of,
    commits,
    duration,
    is_measured,
    markdown,
    origin,
    percent_of_copy,
    prose,
    rows_of,
    times,
)

NOT_MEASURED = "–"

FORMULA = {"transformers formula": "transformers formula", "transformers formula, torch.compile": "under torch.compile"}
BERT = {"bert_padding formulas": "bert_padding formulas", "bert_padding formulas, torch.compile": "under torch.compile"}
EAGER = {"torch eager": "torch eager", "torch.compile": "torch.compile"}
HOST = {"copy and pack_sequences": "copied to the host and packed there"}
FIRST, SECOND = "B=64 S=2048 row=[4096] total=43184 right", "B=256 S=512 row=[1024] total=62715 right"
SLOTS = "T=1048576 docs=2321"
GPU_OPS = [  # label, file, (op, shape, dtype), others
    ("rope q+k, T=65,536, 32+8 heads, D=128", "rope", ("forward", "S=65536 H=32+8 D=128", "bfloat16"), FORMULA),
    ("the same, [B, H, S, D] in memory", "rope", ("forward", "S=65536 H=32+8 D=128 heads first", "bfloat16"), FORMULA),
    ("rope backward", "rope", ("backward", "S=65536 H=32+8 D=128", "bfloat16"), FORMULA),
    ("rope, 14+2 heads, D=64", "rope", ("forward", "S=65536 H=14+2 D=64", "bfloat16"), FORMULA),
    ("rope, 32+32 heads, D=96", "rope", ("forward", "S=65536 H=32+32 D=96", "bfloat16"), FORMULA),
    ("rope, T=8,192, 32+8 heads, D=128", "rope", ("forward", "S=8192 H=32+8 D=128", "bfloat16"), FORMULA),
    ("unpad_input, 64 x 2,048 x 4,096, 33% kept, layout and wait included", "padding",
     ("unpad_input", FIRST, "bfloat16"), BERT),
    ("unpad_input, 256 x 512 x 1,024, 48% kept", "padding", ("unpad_input", SECOND, "bfloat16"), BERT),
    ("pad_input, the first", "padding", ("pad_input", FIRST, "bfloat16"), BERT),
    ("pad_input, the second", "padding", ("pad_input", SECOND, "bfloat16"), BERT),
    ("position_ids, 1,048,576 slots, int64", "boundaries", ("position_ids_from_cu_seqlens", SLOTS, "int64"), EAGER),
    ("seq_idx, int32", "boundaries", ("seq_idx_from_cu_seqlens", SLOTS, "int32"), EAGER),
    ("mask_boundary_labels, int64", "boundaries", ("mask_boundary_labels", SLOTS, "int64"), EAGER),
    ("segment_sum, float32", "boundaries", ("segment_sum", SLOTS, "float32"), EAGER),
    ("gae, 1,048,576 tokens in 2,321 documents, float32", "boundaries", ("gae", f"{SLOTS} padded to 5986", "float32"), {}),
    ("gae, one document of 100,000", "boundaries", ("gae", "T=100000 docs=1", "float32"), {}),
    ("pack_ffd on the device, 4,096 lengths", "packing", ("pack_ffd", "n=4096", "int64"), HOST),
    ("pack_ffd on the device, 65,536 lengths", "packing", ("pack_ffd", "n=65536", "int64"), HOST),
]  # fmt: skip


def ops() -> str:
    rows, used, short, slower = [], [], False, []
    for label, family, case, labels in GPU_OPS:
        found = cases_of(rows_of(f"{family}_cuda")).get(case)
        if not found:
            continue
        percent = percent_of_copy(found)
        short |= percent is not None and percent < 80
        others = [f"{shown}: {times(found[p]['ratio_to_ours'])}x" for p, shown in labels.items() if p in found]
        slower += [1 / float(found[p]["ratio_to_ours"]) for p in HOST if p in found]
        rows.append(
            [label, duration(found[OURS]), NOT_MEASURED if percent is None else f"{percent:.0f}%", ", ".join(others)]
        )
        used.append(found[OURS])
    header = ["op (bf16 unless said)", "time", "percent of copy", "speedup over"]
    goal = "Rows below 80% are short of our goal: " if short else ""
    profile = f"[profile_cuda.csv](benchmarks/results/profile_cuda.csv), taken at {commits(rows_of('profile_cuda'))},"
    note = f"{PERCENT_OF_COPY} {origin(used)}. {goal}{profile} says what the kernels wait for."
    if slower:
        note += (
            f" `pack_ffd` on the device takes {times(min(slower))} to {times(max(slower))} times as long as a copy of the "
            "lengths to the host and `pack_sequences`, and its time depends on steps in a row, not on bytes: it is for "
            "lengths that the host must not wait for, in a CUDA graph above all."
        )
    return f"{markdown(header, rows)}\n\n{prose(note)}"


# --- on the CPU ---

ATTENTION_CPU = ("attention forward + backward", "T=8192 docs=32 heads=4/4 D=64", "float32")
CPU_OPS = [  # label, file, patterns of (op, shape, dtype) of its cases, {provider: label}
    ("pack_dataset, 100,000 documents", "packing", ("pack_dataset", "n=100000*"),
     {"trl pack_dataset": "trl's pack_dataset, in batches of 1,000 rows and all at once"}),
    ("pack_prefix_tree, 1,024 samples of 9,216 tokens, 8 answers to a prompt of 8,192, one core", "prefix_tree",
     ("pack_prefix_tree", "8 answers of 1/8 of the prompt, samples=1024*"),
     {"filling new tensors of these sizes": "filling new tensors of the sizes of its results"}),
    ("pack_prefix_tree, 9,216 samples of 1,024 tokens, nothing shared, one core", "prefix_tree",
     ("pack_prefix_tree", "nothing shared, samples=9216*"),
     {"filling new tensors of these sizes": "filling new tensors of the sizes of its results"}),
    ("apply_rotary_qk, 4,096 tokens, 32+8 heads, D=128, float32", "rope",
     ("forward", "S=4096 H=32+8 D=128", "float32"), {"transformers formula": "the transformers formula"}),
    ("varlen_attention, 32 documents of 256, forward + backward, float32", "attention", ATTENTION_CPU,
     {"plain loop of torch SDPA": "a call of scaled_dot_product_attention for each document"}),
    ("PackedCollator, 1,024 examples, 8 ranks", "data", ("PackedCollator", "n=1024*"),
     {"plain loop over documents, rows already packed": "a plain loop over documents, rows already packed"}),
    ("PaddingFreeCollator, 8 and 64 examples", "data", ("PaddingFreeCollator",),
     {"transformers DataCollatorWithFlattening": "transformers' DataCollatorWithFlattening"}),
    ("token_budget_microbatches, 4,096 lengths, 8 ranks", "data", ("token_budget_microbatches",),
     {"Karmarkar-Karp, a plain loop in Python": "Karmarkar-Karp, a plain loop in Python"}),
    ("normalize_advantages, 1,024 x 2,048", "data", ("normalize_advantages",),
     {"plain loop over mini-batches in torch": "a plain loop over mini-batches in torch"}),
    ("position_ids, seq_idx, mask_boundary_labels and segment_sum, 1,048,576 slots", "boundaries", ("*", SLOTS),
     {"torch eager": "torch eager"}),
    ("unpad_input, 16 x 512 x 1,024", "padding", ("unpad_input", "B=16 S=512 row=[1024]*"),
     {"torch index_select": "only index_select", "bert_padding formulas": "bert_padding formulas"}),
    ("pad_input, the same", "padding", ("pad_input", "B=16 S=512 row=[1024]*"),
     {"torch zeros + index_copy": "zeros + index_copy", "bert_padding formulas": "bert_padding formulas"}),
]  # fmt: skip


def is_meant(part: str, pattern: str) -> bool:
    return part.startswith(pattern[:-1]) if pattern.endswith("*") else part == pattern


def cpu() -> str:
    rows, used = [], []
    for name, family, patterns, others in CPU_OPS:
        found = [
            providers
            for case, providers in cases_of(rows_of(f"{family}_cpu")).items()
            if all(is_meant(part, pattern) for part, pattern in zip(case, patterns, strict=False))
        ]
        for provider, shown in others.items():
            both = [providers for providers in found if provider in providers]
            ratios = sorted(float(providers[provider]["ratio_to_ours"]) for providers in both)
            ours = sorted((providers[OURS] for providers in both), key=lambda row: float(row["p50_us"]))
            if both:
                spread = list(dict.fromkeys([times(ratios[0]), times(ratios[-1])]))
                spans = list(dict.fromkeys([duration(ours[0]), duration(ours[-1])]))
                name = (
                    "the same"
                    if rows and rows[-1][0] in (name, "the same") and provider != next(iter(others))
                    else name
                )
                rows.append([name, " to ".join(spans), shown, " to ".join(spread)])
                used += ours
    return (
        f"{markdown(['on two CPU cores', 'time', 'compared with', 'speedup over it'], rows)}\n\n{prose(origin(used))}."
    )


def by_provider(family: str, part: str = "", label: Callable[[str, str], str] = "{}, {}".format) -> str:
    """Returns a table of time and memory: a row for each case, a column for each provider.

    part: of the ops and shapes that are shown. label: of an op and a shape; cases of one label run one after the other.
    """
    if not is_measured(family):
        return f"Not run yet: `benchmarks/bench_{family.removesuffix('_cuda')}.py`."
    rows = [row for row in rows_of(family) if part in f"{row['op']} {row['shape']}"]
    names = list(dict.fromkeys([OURS, *(row["provider"] for row in rows)]))
    found = {}
    for (op, shape, _), providers in cases_of(rows).items():
        found.setdefault(label(op, shape), []).append(providers)
    cells = []
    for case, runs in found.items():
        shown = []
        for name in names:
            took = sum(float(run[name]["p50_us"]) for run in runs if name in run)
            mib = max((float(run[name]["peak_mib"]) for run in runs if name in run), default=0)
            shown.append(f"{duration({'p50_us': took})}, {mib:,.0f} MiB" if took else NOT_MEASURED)
        cells.append([case, *shown])
    header = ["case", *(name if name == OURS else name.removeprefix(f"{OURS}, ") for name in names)]
    said = "In each cell: the time, and the most memory beyond what was there before the call."
    return f"{markdown(header, cells)}\n\n{prose(f'{said} {origin(rows)}.')}"


def pages() -> str:
    return by_provider("pages_cuda")


def generate() -> str:
    """Tokens a second of generate_batch and generate."""
    if not is_measured("generate_cuda"):
        return "Not run yet: `benchmarks/bench_generate.py`."
    rows = rows_of("generate_cuda")
    cells = [
        [
            f"`{row['call']}`",
            row["provider"],
            f"{float(row['tokens_per_second']):,.0f}",
            f"{float(row['times_of_ours']):.2f}",
        ]
        for row in rows
    ]
    size = "{requests} prompts of {prompt_tokens} tokens together, {new_tokens} new tokens".format(**rows[0])
    header = ["call", "attention", "tokens per second", "time over packing_ops'"]
    return f"{markdown(header, cells)}\n\n{prose(f'{size}. {origin(rows)}.')}"


def logps_masked() -> str:
    return by_provider("logps_cuda", "masked")


def logps_8192() -> str:
    return by_provider("logps_cuda", "T=8192", label=lambda op, _: op.removeprefix("token_logps, "))


def kl() -> str:
    """Returns the table of token_kl, by divergence and by the hidden sizes of student and teacher."""

    def label(op: str, shape: str) -> str:
        sizes = [f"{int(size):,}" for size in shape.partition("hidden=")[2].split(", ")]
        return f"{op.removeprefix('token_kl, ').removesuffix(', forward and backward')}, hidden {' and '.join(sizes)}"

    return by_provider("kl_cuda", "backward", label=label)


def trees() -> str:
    """Forward and backward of attention together."""

    def label(op: str, shape: str) -> str:
        work = "training step" if op == "training_step" else "attention"
        return f"{work}, {shape.split(' heads')[0].split(' hidden')[0]}"

    return by_provider("trees_cuda", label=label)


def conv() -> str:
    return by_provider("conv_cuda")


def scan() -> str:
    return by_provider("scan_cuda")


def scan_mamba() -> str:
    return by_provider("scan_mamba_cuda")


def rope_unsloth() -> str:
    return by_provider("rope_unsloth_cuda")


TABLES = {"rope_unsloth": rope_unsloth, "conv": conv, "scan": scan, "scan_mamba": scan_mamba, "ops": ops, "cpu": cpu, "pages": pages, "generate": generate, "logps-masked": logps_masked,
          "logps-8192": logps_8192, "kl": kl, "trees": trees}  # fmt: skip
