"""What docs/ say of attention: a function for each region. What a file does not have is left out."""

import json
import statistics

from result_rows import OURS, RESULTS, cases_of, markdown, origin, prose, rows_of, times

FLASH_2, FLASH_3, FLASH_4, FLEX = "torch FlashAttention-2", "FlashAttention-3", "FlashAttention-4", "FlexAttention"
FLASH = {FLASH_2: "FA2", FLASH_3: "FA3", f"{FLASH_3}, deterministic": "FA3, deterministic",
         FLASH_4: "FA4", f"{FLASH_4}, deterministic": "FA4, deterministic"}  # fmt: skip
PEERS = {**FLASH, FLEX: "Flex"}
NOTHING, NOT_MEASURED = {"ratio_to_ours": 1}, "–"
LONG = ("mid4k:", "long16k:")
IMAGES, PADDED = ", images of ", "packing_ops, v padded"
MASK, LOOP = "torch SDPA block mask", "transformers, SDPA in a loop"


def attention_cases() -> dict[str, dict[str, dict[str, dict]]]:
    """{shape: {"forward" or "backward": {provider: row}}}"""
    found = {}
    for (op, shape, _), providers in cases_of(rows_of("attention_cuda")).items():
        found.setdefault(shape, {})["backward" if "backward" in op else "forward"] = providers
    return found


def lengths_of(name: str) -> list[int]:
    return json.loads((RESULTS.parent / "workloads.json").read_text())["workloads"].get(name, [])


def label(shape: str) -> str:
    """Of "name: T=65536 docs=16 heads=32/8 D=128 causal"."""
    name, _, rest = shape.partition(": ")
    fields = dict(part.split("=") for part in rest.split() if "=" in part)
    tokens = "" if name in ("long16k", "mid4k", "mid1k", "sft", "short") else f", {int(fields['T']):,} tokens"
    return f"{name}{tokens}, {fields['heads']} heads, D={fields['D']}"


def workload(shape: str) -> str:
    name = shape.partition(":")[0]
    lengths = lengths_of(name)
    if len({*lengths}) == 1:
        return f"{name}: {len(lengths)} x {lengths[0]:,}"
    return f"{name}: {len(lengths)}, median {statistics.median(lengths):.0f}, longest {max(lengths):,}"


def attention_table(cases: dict, first: str, label, peers: dict[str, str] = PEERS) -> str:
    """Returns two tables, forward and backward: our time, and the speedup over each peer that was measured."""
    tables = []
    for direction in ("forward", "backward"):
        measured = [peer for peer in peers if any(peer in case[direction] for case in cases.values())]
        header = [f"{direction}, {first}", "packing_ops, ms", *(f"speedup over {peers[peer]}" for peer in measured)]
        rows = []
        for shape, case in cases.items():
            providers = case[direction]
            speedups = [times(providers[p]["ratio_to_ours"]) if p in providers else NOT_MEASURED for p in measured]
            rows.append([label(shape), f"{float(providers[OURS]['p50_us']) / 1000:.2f}", *speedups])
        tables.append(markdown(header, rows))
    return "\n\n".join(tables)


def is_main(shape: str) -> bool:
    return bool(lengths_of(shape.partition(":")[0])) and "heads=32/8 D=128" in shape


LEGEND = {
    FLASH_2: "FA2: torch's built-in FlashAttention-2 (mma.sync, cp.async). Ours uses wgmma and bulk tensor copies on Hopper.",
    FLASH_3: "FA3: FlashAttention-3, only for Hopper. Its package fa3-fwd has no backward.",
    FLASH_4: "FA4: FlashAttention-4, of the package flash-attn-4.",
    f"{FLASH_4}, deterministic": "Deterministic: sums of the backward in one order, as ours always are.",
    FLEX: "Flex: FlexAttention, compiled, its mask of documents made before.",
}


def attention() -> str:
    cases = {shape: case for shape, case in attention_cases().items() if is_main(shape)}
    used = [row for case in cases.values() for providers in case.values() for row in providers.values()]
    clocks = [int(row["sm_mhz"]) for row in used if row.get("sm_mhz")]
    legend = [text for peer, text in LEGEND.items() if any(row["provider"] == peer for row in used)]
    at = f", multiprocessors at {min(clocks):,} to {max(clocks):,} MHz" if clocks else ""
    table = attention_table(cases, "65,536 tokens, 32/8 heads, D=128", workload)
    return f"{table}\n\n{prose(' '.join([*legend, f'{origin(used)}{at}.']))}"


def attention_slower() -> str:
    """Of the cases in neither other table those where a FlashAttention is ahead."""
    cases = {
        shape: case
        for shape, case in attention_cases().items()
        if not is_main(shape)
        and not shape.startswith(LONG)
        and any(
            float(providers.get(peer, NOTHING)["ratio_to_ours"]) < 1 for providers in case.values() for peer in FLASH
        )
    }
    if not cases:
        return prose("In none of the other cases measured is a FlashAttention ahead.")
    return attention_table(cases, "small batches", label)


def attention_memory() -> str:
    extra = {OURS: [], FLASH_2: []}
    for row in rows_of("attention-memory_cuda"):
        if row["op"] == "varlen_attention_backward":
            extra[row["provider"]].append(float(row["extra_bytes_per_q_element"]))
    ours, theirs = extra[OURS], extra[FLASH_2]
    return prose(
        f"Beyond outputs and gradients the backward takes at most {max(ours):.2f} bytes per element of q in each of these "
        f"batches, torch's FlashAttention-2 {min(theirs):.0f} to {max(theirs):.0f} "
        "([attention-memory_cuda.csv](benchmarks/results/attention-memory_cuda.csv); "
        f"{origin(rows_of('attention-memory_cuda'))})."
    )


def attention_dims() -> str:
    """Long documents of other head_dims, and values of another width."""
    cases = {shape: case for shape, case in attention_cases().items() if shape.startswith(LONG) and not is_main(shape)}
    table = attention_table(cases, "other heads and head_dims", label)
    found, rows = {}, rows_of("attention_widths_cuda")
    for (op, shape, _), providers in cases_of(rows).items():
        found.setdefault(shape, {})["backward" if "backward" in op else "forward"] = providers
    peers = {PADDED: "padding v", FLASH_3: "FA3", FLEX: "Flex", MASK: "SDPA, a mask"}
    widths = attention_table(found, "head_dim of q and k / of v", label, peers)
    said = f"Padding v: the same call with v padded to the head_dim of q and k, and out cut. {origin(rows)}."
    return f"{table}\n\n{widths}\n\n{prose(said)}"


def attention_images() -> str:
    """Text with blocks of images, whose tokens see each other, over causal attention."""
    shares = []
    for shape, case in attention_cases().items():
        for providers in case.values():
            if IMAGES in shape:
                shares.append(1 / float(providers["packing_ops, causal"]["ratio_to_ours"]))
    return prose(
        f"Image blocks of 256 tokens in every other place (`visible_end`) take {min(shares):.2f} to {max(shares):.2f} times "
        "what causal attention over the same text does, forward or backward, by workload."
    )


def attention_softcap() -> str:
    """Times that of the same call without softcap."""
    lines, rows = {}, rows_of("softcap_cuda")
    for (_, shape, _), providers in cases_of(rows).items():
        without = providers["packing_ops, no softcap"]
        cells = f"{float(providers[OURS]['p50_us']) / 1000:.2f}", f"{1 / float(without['ratio_to_ours']):.2f}"
        lines.setdefault(shape, [label(shape).replace(", softcap 50", "")]).extend(cells)
    header = [
        "softcap 50, as in Gemma 2",
        "forward, ms",
        "times that without softcap",
        "backward, ms",
        "times that without softcap",
    ]
    return f"{markdown(header, list(lines.values()))}\n\n{origin(rows)}."


def vision() -> str:
    rows = rows_of("vision_cuda")
    lines = [
        [op, shape, f"{float(providers[OURS]['p50_us']) / 1000:.1f}", times(providers[LOOP]["ratio_to_ours"])]
        for (op, shape, _), providers in cases_of(rows).items()
    ]
    told = f"Forward and backward of Qwen2.5-VL's vision tower on images of mixed size, bfloat16, {origin(rows)}."
    table = markdown(
        ["vision tower", "shape", "packing_ops, ms", "speedup over a call of SDPA for each image or window"], lines
    )
    return f"{table}\n\n{prose(told)}"


TABLES = {"attention": attention, "attention-slower": attention_slower, "attention-memory": attention_memory,
          "attention-dims": attention_dims, "attention-images": attention_images, "attention-softcap": attention_softcap,
          "vision": vision}  # fmt: skip
