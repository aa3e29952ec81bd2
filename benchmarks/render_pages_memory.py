"""What docs/memory.md says: measured memory of whole models and of the loss, from whole_cuda.csv and logps_cuda.csv."""

from render_pages_whole import PROVIDERS, SHOWN, best_of
from result_rows import is_measured, markdown, origin, prose, rows_of

BYTES_A_LOGIT = 12
LOSSES = {
    "torch eager": "torch eager",
    "torch.compile": "torch.compile",
    "packing_ops, all logits kept": "packing_ops, `keep_logits` of all",
    "packing_ops": "packing_ops",
}


def memory() -> str:
    """Two tables: GiB of a training step by provider, and MiB of the loss beside the formula."""
    if not (is_measured("whole_cuda") and is_measured("logps_cuda")):
        return "Not run yet: `benchmarks/bench_whole.py`, `benchmarks/bench_logps.py`."
    best = best_of(rows_of("whole_cuda"))
    used = [row for (part, _), row in best.items() if part == "small"]
    steps = [
        [PROVIDERS[name], f"{float(best['small', name]['peak_gib']):.1f}"]
        for name in ("padded", "fa2", "liger", "ours")
        if ("small", name) in best
    ]
    case = "T=16384 V=151936 hidden=4096"
    rows = [
        row for row in rows_of("logps_cuda") if (row["op"], row["shape"]) == ("token_logps, forward and backward", case)
    ]
    found = {row["provider"]: row for row in rows}
    losses = [[label, f"{float(found[name]['peak_mib']):,.0f}"] for name, label in LOSSES.items() if name in found]
    by_formula = 16384 * 151936 * BYTES_A_LOGIT / 2**20
    return "\n\n".join(
        [
            markdown([f"a training step, {SHOWN['small']}", "peak memory, GiB"], steps),
            prose(f"{origin(used)}."),
            markdown(
                ["log-probabilities of 16,384 tokens, vocabulary 151,936, hidden 4,096", "MiB besides the arguments"],
                losses,
            ),
            prose(
                f"12 bytes a logit are {by_formula:,.0f} MiB. {origin([found[name] for name in LOSSES if name in found])}."
            ),
        ]
    )


TABLES = {"memory": memory}
