"""What docs/ say of single ops; what a file does not have is left out."""

from collections.abc import Callable
from functools import partial

import result_rows
from result_rows import OURS, cases_of, commits, duration, origin, percent_of_copy, rows_of, span, table, times


def by_provider(family: str, part: str = "", label: Callable[[str, str], str] = "{}, {}".format) -> str:
    """Returns a table of time and memory: a row for each case, a column for each provider.

    part: of the ops and shapes that are shown. label: of an op and a shape; cases of one label run one after the other.
    """
    rows = [row for row in rows_of(family) if part in f"{row['op']} {row['shape']}"]
    names = list(dict.fromkeys([OURS, *(row["provider"] for row in rows)]))
    found, lines = {}, []
    for (op, shape, _), providers in cases_of(rows).items():
        found.setdefault(label(op, shape), []).append(providers)
    for case, runs in found.items():
        shown = [case]
        for name in names:
            took = sum(float(run[name]["p50_us"]) for run in runs if name in run)
            mib = max((float(run[name]["peak_mib"]) for run in runs if name in run), default=0)
            shown.append(f"{duration(took)}, {mib:,.0f} MiB" if took else "–")
        lines.append(" | ".join(shown))
    header = ["case", *(name if name == OURS else name.removeprefix(f"{OURS}, ") for name in names)]
    note = "In each cell: the time, and the most memory beyond what was there before the call."
    return table(" | ".join(header), lines, f"{note} {origin(rows)}.")


def label_of_kl(op: str, shape: str) -> str:
    """The divergence, and the hidden sizes of student and teacher."""
    sizes = [f"{int(size):,}" for size in shape.partition("hidden=")[2].split(", ")]
    return f"{op.removeprefix('token_kl, ').removesuffix(', forward and backward')}, hidden {' and '.join(sizes)}"


def label_of_tree(op: str, shape: str) -> str:
    work = "training step" if op == "training_step" else "attention"
    return f"{work}, {shape.split(' heads')[0].split(' hidden')[0].replace(' rows=', ' slots=')}"


# fmt: off
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
    ("unpad_input, 64 x 2,048 x 4,096, 33% kept, layout and wait included", "padding", ("unpad_input", FIRST, "bfloat16"), BERT),
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
]
FILLING = {"filling new tensors of these sizes": "filling new tensors of the sizes of its results"}
CPU_OPS = [  # label, file, patterns of (op, shape, dtype) of its cases, others
    ("pack_dataset, 100,000 documents", "packing", ("pack_dataset", "n=100000*"),
     {"trl pack_dataset": "trl's pack_dataset, in batches of 1,000 rows and all at once"}),
    ("pack_prefix_tree, 1,024 samples of 9,216 tokens, 8 answers to a prompt of 8,192, one core", "prefix_tree",
     ("pack_prefix_tree", "8 answers of 1/8 of the prompt, samples=1024*"), FILLING),
    ("pack_prefix_tree, 9,216 samples of 1,024 tokens, nothing shared, one core", "prefix_tree",
     ("pack_prefix_tree", "nothing shared, samples=9216*"), FILLING),
    ("apply_rotary_qk, 4,096 tokens, 32+8 heads, D=128, float32", "rope", ("forward", "S=4096 H=32+8 D=128", "float32"),
     {"transformers formula": "the transformers formula"}),
    ("varlen_attention, 32 documents of 256, forward + backward, float32", "attention",
     ("attention forward + backward", "T=8192 docs=32 heads=4/4 D=64", "float32"),
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
]
# fmt: on


def ops() -> str:
    lines, used, percents, slower = [], [], [], []
    for label, family, case, labels in GPU_OPS:
        found = cases_of(rows_of(f"{family}_cuda")).get(case)
        if not found:
            continue
        ours, percent = found[OURS], percent_of_copy(found)
        others = [f"{shown}: {found[p]['ratio_to_ours']:x}x" for p, shown in labels.items() if p in found]
        slower += [1 / float(found[p]["ratio_to_ours"]) for p in HOST if p in found]
        percents += [] if percent is None else [percent]
        lines.append(
            f"{label} | {ours['p50_us']:us} | {'–' if percent is None else f'{percent:.0f}%'} | {', '.join(others)}"
        )
        used.append(ours)
    goal = "Rows below 80% are short of our goal: " if min(percents, default=100) < 80 else ""
    profile = f"[profile_cuda.csv](benchmarks/results/profile_cuda.csv), taken at {commits(rows_of('profile_cuda'))},"
    note = f"{result_rows.PERCENT_OF_COPY} {origin(used)}. {goal}{profile} says what the kernels wait for."
    if slower:
        note += (
            f" `pack_ffd` on the device takes {times(min(slower))} to {times(max(slower))} times as long as a copy of the "
            "lengths to the host and `pack_sequences`, and its time depends on steps in a row, not on bytes: it is for "
            "lengths that the host must not wait for, in a CUDA graph above all."
        )
    return table("op (bf16 unless said) | time | percent of copy | speedup over", lines, note)


def is_meant(part: str, pattern: str) -> bool:
    return part.startswith(pattern[:-1]) if pattern.endswith("*") else part == pattern


def cpu() -> str:
    lines, used = [], []
    for name, family, patterns, others in CPU_OPS:
        cases = cases_of(rows_of(f"{family}_cpu"))
        found = [cases[case] for case in cases if all(map(is_meant, case, patterns))]
        for provider, shown in others.items():
            both = [providers for providers in found if provider in providers]
            if both:
                ours, ratios = [each[OURS] for each in both], [each[provider]["ratio_to_ours"] for each in both]
                took = span(duration, (row["p50_us"] for row in ours))
                lines.append(f"{name} | {took} | {shown} | {span(times, ratios)}")
                name, used = "the same", used + ours
    return table("on two CPU cores | time | compared with | speedup over it", lines, f"{origin(used)}.")


LOGPS_KEPT, LIGER = "packing_ops, all logits kept", "Liger's fused linear cross entropy"


BY_PROVIDER: dict[str, dict] = {  # region: what by_provider is given
    **{name: {"family": f"{name}_cuda"} for name in ("conv", "pages", "rope_unsloth", "scan", "scan_mamba")},
    "kl": {"family": "kl_cuda", "part": "backward", "label": label_of_kl},
    "logps-masked": {"family": "logps_cuda", "part": "masked"},
    "logps-8192": {"family": "logps_cuda", "part": "T=8192", "label": lambda op, _: op.removeprefix("token_logps, ")},
    "trees": {"family": "trees_cuda", "label": label_of_tree},
}
MADE = {
    "ops": ops,
    "cpu": cpu,
    **{name: partial(by_provider, **given) for name, given in BY_PROVIDER.items()},
}
