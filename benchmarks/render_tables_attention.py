"""What docs/ say of attention; what a file does not have is left out."""

import json
from pathlib import Path
from statistics import median

from result_rows import OURS, Case, by_row, cases_of, origin, prose, rows_of, table

FLASH_2, FLASH_3, FLASH_4, FLEX = "torch FlashAttention-2", "FlashAttention-3", "FlashAttention-4", "FlexAttention"
FLASH = {FLASH_2: "FA2", FLASH_3: "FA3", f"{FLASH_3}, deterministic": "FA3, deterministic",
         FLASH_4: "FA4", f"{FLASH_4}, deterministic": "FA4, deterministic"}  # fmt: skip
LONG = ("mid4k:", "long16k:")
WIDTHS = {"packing_ops, v padded": "padding v", FLASH_3: "FA3", FLEX: "Flex", "torch SDPA block mask": "SDPA, a mask"}
LEGEND = {
    FLASH_2: "FA2: torch's built-in FlashAttention-2 (mma.sync, cp.async). Ours uses wgmma and bulk tensor copies on Hopper.",
    FLASH_3: "FA3: FlashAttention-3, only for Hopper. Its package fa3-fwd has no backward.",
    FLASH_4: "FA4: FlashAttention-4, of the package flash-attn-4.",
    f"{FLASH_4}, deterministic": "Deterministic: sums of the backward in one order, as ours always are.",
    FLEX: "Flex: FlexAttention, compiled, its mask of documents made before.",
}


def directions_of(name: str, where=lambda shape: True) -> list[Case]:
    """A case for each shape, whose forward and backward have a row for each provider."""
    found = {}
    for (op, shape, _), providers in cases_of(rows_of(name)).items():
        if where(shape):
            case = found.setdefault(shape, Case(shape=shape, label=label(shape)))
            case["backward" if "backward" in op else "forward"] = Case(providers)
    return [*found.values()]


def rows_in(cases: list[Case]) -> list[dict]:
    return [row for case in cases for way in ("forward", "backward") for row in case[way].values()]


def lengths_of(shape: str) -> list[int]:
    workloads = json.loads((Path(__file__).parent / "workloads.json").read_text())["workloads"]
    return workloads.get(shape.partition(":")[0], [])


def is_main(shape: str) -> bool:
    return bool(lengths_of(shape)) and "heads=32/8 D=128" in shape


def label(shape: str) -> str:
    """Of "name: T=65536 docs=16 heads=32/8 D=128 causal"."""
    name, _, rest = shape.partition(": ")
    fields = dict(part.split("=") for part in rest.split() if "=" in part)
    tokens = "" if name in ("long16k", "mid4k", "mid1k", "sft", "short") else f", {int(fields['T']):,} tokens"
    return f"{name}{tokens}, {fields['heads']} heads, D={fields['D']}"


def workload(shape: str) -> str:
    name, lengths = shape.partition(":")[0], lengths_of(shape)
    if len({*lengths}) == 1:
        return f"{name}: {len(lengths)} x {lengths[0]:,}"
    return f"{name}: {len(lengths)}, median {median(lengths):.0f}, longest {max(lengths):,}"


def attention_table(cases: list[Case], first: str, note: str = "", peers: dict = FLASH | {FLEX: "Flex"}) -> str:
    """Returns two tables, forward and backward: our time, and the speedup over each peer that was measured."""
    speedups = " | ".join(f"speedup over {name}" for name in peers.values())
    tables = []
    for way in ("forward", "backward"):
        line = [
            "{label}",
            f"{{{way}[packing_ops][p50_us]:.2ms}}",
            *(f"{{{way}[{peer}][ratio_to_ours]:x}}" for peer in peers),
        ]
        header, lines = (
            f"{way}, {first} | packing_ops, ms | {speedups}",
            (" | ".join(line).format_map(case) for case in cases),
        )
        tables.append(table(header, lines, note if way == "backward" else "", empty="–"))
    return "\n\n".join(tables)


def attention() -> str:
    cases = directions_of("attention_cuda", is_main)
    cases = [Case(case, label=workload(case["shape"])) for case in cases]
    used = rows_in(cases)
    clocks = [int(row["sm_mhz"]) for row in used if row.get("sm_mhz")]
    legend = [text for peer, text in LEGEND.items() if any(row["provider"] == peer for row in used)]
    at = f", multiprocessors at {min(clocks):,} to {max(clocks):,} MHz" if clocks else ""
    return attention_table(cases, "65,536 tokens, 32/8 heads, D=128", " ".join([*legend, f"{origin(used)}{at}."]))


def attention_slower() -> str:
    """Of the cases in neither other table those where a FlashAttention is ahead."""
    cases = directions_of("attention_cuda", lambda shape: not is_main(shape) and not shape.startswith(LONG))
    is_ahead = lambda row: row["provider"] in FLASH and float(row["ratio_to_ours"]) < 1  # noqa: E731
    cases = [case for case in cases if any(map(is_ahead, rows_in([case])))]
    none = "In none of the other cases measured is a FlashAttention ahead."
    return attention_table(cases, "small batches") if cases else none


def attention_memory() -> str:
    rows, file, column = rows_of("attention-memory_cuda"), "attention-memory_cuda.csv", "extra_bytes_per_q_element"
    rows = [row for row in rows if row["op"] == "varlen_attention_backward"]
    ours, theirs = ([float(row[column]) for row in rows if row["provider"] == name] for name in (OURS, FLASH_2))
    return prose(
        f"Beyond outputs and gradients the backward takes at most {max(ours):.2f} bytes per element of q in each of these batches, "
        f"torch's FlashAttention-2 {min(theirs):.0f} to {max(theirs):.0f} ([{file}](benchmarks/results/{file}); {origin(rows)})."
    )


def attention_dims() -> str:
    """Long documents of other head_dims, and values of another width."""
    cases = directions_of("attention_cuda", lambda shape: shape.startswith(LONG) and not is_main(shape))
    widths = directions_of("attention_widths_cuda")
    note = f"Padding v: the same call with v padded to the head_dim of q and k, and out cut. {origin(rows_in(widths))}."
    widths = attention_table(widths, "head_dim of q and k / of v", note, WIDTHS)
    return f"{attention_table(cases, 'other heads and head_dims')}\n\n{widths}"


def attention_images() -> str:
    """Text with blocks of images, whose tokens see each other, over causal attention."""
    rows = rows_in(directions_of("attention_cuda", lambda shape: ", images of " in shape))
    shares = [1 / float(row["ratio_to_ours"]) for row in rows if row["provider"] == "packing_ops, causal"]
    return prose(
        f"Image blocks of 256 tokens in every other place (`visible_end`) take {min(shares):.2f} to {max(shares):.2f} times "
        "what causal attention over the same text does, forward or backward, by workload."
    )


def attention_softcap() -> str:
    """Times that of the same call without softcap."""
    ways, cases = ("forward", "backward"), directions_of("softcap_cuda")
    cases = [Case(case, label=case["label"].replace(", softcap 50", "")) for case in cases]
    cell = "{{{0}[packing_ops][p50_us]:.2ms}} | {{{0}[packing_ops, no softcap][ratio_to_ours]:/.2f}}".format
    header = " | ".join(["softcap 50, as in Gemma 2", *(f"{way}, ms | times that without softcap" for way in ways)])
    return by_row(cases, header, " | ".join(["{label}", *map(cell, ways)]), used=rows_in(cases))


def vision() -> str:
    rows = rows_of("vision_cuda")
    cases = [{"op": op, "shape": shape, "of": of} for (op, shape, _), of in cases_of(rows).items()]
    line = "{op} | {shape} | {of[packing_ops][p50_us]:.1ms} | {of[transformers, SDPA in a loop][ratio_to_ours]:x}"
    note = "Forward and backward of Qwen2.5-VL's vision tower on images of mixed size, bfloat16, {origin}."
    return by_row(
        cases,
        "vision tower | shape | packing_ops, ms | speedup over a call of SDPA for each image or window",
        line,
        note,
        rows,
    )


MADE = {
    "attention": attention, "attention-slower": attention_slower, "attention-dims": attention_dims,
    "attention-memory": attention_memory, "attention-images": attention_images, "attention-softcap": attention_softcap,
    "vision": vision,
}  # fmt: skip
